"""The hook table of CPU mode: every place where stock SGLang needs a GPU or a compiled kernel, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypic.engine.hook import Hook, HookTable

from . import attention, defaults, fork_server, kda_ops, lightning_ops, mamba_ops, torch_ops

_NO_TRITON = "Triton kernel: no GPU to run it"
_FLA = "sglang.kernels.ops.attention.fla"
_MAMBA = "sglang.kernels.ops.mamba"
_ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise"
_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_PROJ = "sglang.kernels.ops.attention.triton_gdn_fused_proj"
_GRAMMAR = "sglang.srt.constrained.xgrammar_backend"


# ------------------------------------------------------------------------------------------- small replacements


def _server_args_defaults(self: Any) -> None:
    defaults.fill_server_args(self)


def _allow_extra_buffer(original: Any, self: Any, view: Any, model_arch: str) -> None:
    from sglang.srt import server_args

    is_cuda, server_args.is_cuda = server_args.is_cuda, lambda: True
    try:
        original(self, view, model_arch)
    finally:
        server_args.is_cuda = is_cuda


def _track_indices(batch: Any, track_positions: Sequence[int] | None = None) -> None:
    import torch

    buffers = batch.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping[batch.req_pool_indices]
    positions = track_positions or [req.mamba_next_track_idx or 0 for req in batch.reqs]
    batch.mamba_track_indices = buffers.gather(1, torch.tensor(positions).unsqueeze(1)).squeeze(1).to(torch.int64)


def _unpinned(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``original``; where it asks torch for a new pinned tensor, it gets an ordinary one."""
    from torch.overrides import TorchFunctionMode

    class Unpinned(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})

    with Unpinned():
        return original(*args, **kwargs)


def _mm_in_out_dtype(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``original``; where it asks for a product in a wider type, the factors are widened first."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Widened(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.mm and (dtype := kwargs.pop("out_dtype", None)) is not None:
                args = [factor.to(dtype) for factor in args]
            return func(*args, **kwargs)

    with Widened():
        return original(*args, **kwargs)


def _no_stream(context: Any, name: str) -> None:
    return None


def _allocate_bitmask(vocab_size: int, batch_size: int) -> Any:
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def _apply_bitmask(logits: Any, vocab_mask: Any) -> None:
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


# ---------------------------------------------------------------------------------------------------- the table

_HOOKS: tuple[Hook, ...] = (
    # torch stand-ins for Triton kernels
    Hook(
        f"{_MAMBA}.causal_conv1d_triton.causal_conv1d_fn",
        "replace",
        torch_ops.causal_conv1d_fn,
        _NO_TRITON,
        ("x", "weight", "bias", "conv_states", "query_start_loc", "seq_lens_cpu", "cache_indices"),
    ),
    Hook(
        f"{_MAMBA}.causal_conv1d_triton.causal_conv1d_update",
        "replace",
        torch_ops.causal_conv1d_update,
        _NO_TRITON,
        ("x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices"),
    ),
    Hook(
        f"{_FLA}.fused_gdn_gating.fused_gdn_gating",
        "replace",
        torch_ops.fused_gdn_gating,
        _NO_TRITON,
        ("A_log", "a", "b", "dt_bias"),
    ),
    Hook(
        f"{_FLA}.chunk.chunk_gated_delta_rule",
        "replace",
        torch_ops.chunk_gated_delta_rule,
        _NO_TRITON + "; the original also refuses float32",
        ("q", "k", "v", "g", "beta", "scale", "initial_state", "initial_state_indices", "cu_seqlens"),
    ),
    Hook(
        f"{_FLA}.chunk.chunk_gated_delta_rule_fwd_intra",
        "replace",
        torch_ops.solve_chunks,
        _NO_TRITON,
        ("k", "v", "g", "beta", "cu_seqlens", "chunk_size", "chunk_indices"),
    ),
    Hook(
        f"{_FLA}.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        "replace",
        torch_ops.fused_recurrent_gated_delta_rule_packed_decode,
        _NO_TRITON,
        ("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "out", "ssm_state_indices"),
    ),
    Hook(
        f"{_FLA}.kda.chunk_kda",
        "replace",
        kda_ops.chunk_kda,
        _NO_TRITON,
        ("q", "k", "v", "g", "beta", "scale", "initial_state", "initial_state_indices"),
    ),
    Hook(
        f"{_FLA}.fused_recurrent.fused_recurrent_kda_packed_decode",
        "replace",
        kda_ops.fused_recurrent_kda_packed_decode,
        _NO_TRITON,
        ("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "out", "ssm_state_indices"),
    ),
    Hook(
        f"{_PROJ}.fused_qkvzba_split_reshape_cat",
        "replace",
        torch_ops.fused_qkvzba_split_reshape_cat,
        _NO_TRITON,
        ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v"),
    ),
    Hook(
        f"{_PROJ}.fused_qkvzba_split_reshape_cat_contiguous",
        "replace",
        torch_ops.fused_qkvzba_split_reshape_cat_contiguous,
        _NO_TRITON,
        ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v"),
    ),
    Hook(
        f"{_FLA}.fused_norm_gate.rms_norm_gated",
        "replace",
        torch_ops.rms_norm_gated,
        _NO_TRITON,
        ("x", "g", "weight", "bias", "activation"),
    ),
    Hook(
        f"{_FLA}.layernorm_gated.rms_norm_gated",
        "replace",
        torch_ops.norm_gated,
        _NO_TRITON,
        ("x", "weight", "bias", "z", "eps", "group_size"),
    ),
    Hook(
        f"{_ELEMENTWISE}.fused_sigmoid_mul",
        "replace",
        torch_ops.fused_sigmoid_mul,
        _NO_TRITON,
        ("attn_output", "gate", "inplace"),
    ),
    Hook(
        f"{_ELEMENTWISE}.fused_gate_sigmoid_mul_add",
        "replace",
        torch_ops.fused_gate_sigmoid_mul_add,
        _NO_TRITON,
        ("hidden_states", "gate_weight", "shared_output", "final_hidden_states"),
    ),
    Hook(
        f"{_MAMBA}.mamba_state_scatter_triton.track_mamba_states_all_layers",
        "replace",
        torch_ops.track_mamba_states_all_layers,
        _NO_TRITON,
        ("conv_states_pool", "ssm_states_pool", "cache_indices", "mamba_track_mask", "mamba_track_indices"),
    ),
    Hook(
        f"{_MAMBA}.mamba_state_scatter_triton.track_mamba_states_if_needed",
        "replace",
        torch_ops.track_mamba_states_if_needed,
        _NO_TRITON,
        ("conv_states", "ssm_states", "cache_indices", "mamba_track_mask", "mamba_track_indices"),
    ),
    Hook(
        f"{_MIXER}.mamba_chunk_scan_combined",
        "replace",
        mamba_ops.mamba_chunk_scan_combined,
        _NO_TRITON,
        ("x", "dt", "A", "B", "C", "chunk_size", "D", "z", "dt_bias", "initial_states", "seq_idx"),
    ),
    Hook(
        f"{_MIXER}.selective_state_update",
        "replace",
        mamba_ops.selective_state_update,
        _NO_TRITON,
    ),
    Hook(
        f"{_MIXER}.MambaMixer2.__init__",
        "before",
        mamba_ops.bind_convolutions,
        "its module imports the convolutions for named kinds of devices only, and calls them by name",
        ("self", "cache_params", "hidden_size"),
    ),
    Hook(
        "sglang.srt.layers.attention.linear.lightning_backend.seg_la_fwd",
        "replace",
        lightning_ops.seg_la_fwd,
        _NO_TRITON,
        ("q", "k", "v", "s", "decay_scales", "meta", "caches", "cache_indices", "track_lens", "track_state_indices"),
    ),
    Hook(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
        "around",
        attention.run_sdpa_forward_extend,
        "computes the attention of the whole prefix again for every row of an extend batch",
        ("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens"),
    ),
    Hook(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        "around",
        attention.latent_method,
        "takes forms of latent attention that torch_native has no kernels for",
        ("backend_name",),
    ),
    Hook(
        "sglang.srt.layers.rotary_embedding.get_rope_wrapper",
        "around",
        attention.rope_without_compiled_kernels,
        "knows deepseek_yarn alone on a CPU",
        ("head_size", "rotary_dim", "max_position", "base", "is_neox_style"),
    ),
    Hook(
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda",
        "replace",
        lambda self, *args, **kwargs: self.forward_native(*args, **kwargs),
        "compiled kernel; Ring-2.5's latent attention calls it whatever the device",
        ("self", "positions", "query", "key"),
    ),
    Hook(
        "sglang.srt.runtime_context.RuntimeContext.get_stream",
        "replace",
        _no_stream,
        "CUDA streams; models take None for there being one stream",
        ("self", "name"),
    ),
    # settings
    Hook(
        "sglang.srt.server_args.ServerArgs.__post_init__",
        "before",
        _server_args_defaults,
        "CPU defaults must land before SGLang picks the attention backend of its own CPU engine",
        ("self",),
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs._validate_mamba_extra_buffer",
        "around",
        _allow_extra_buffer,
        "asserts a GPU before its other checks; the extra_buffer strategy itself needs none",
        ("self", "view", "model_arch"),
    ),
    # processes
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
        "around",
        fork_server.launch,
        "spawns an interpreter that imports SGLang anew; `hypic serve` has a process that did so meanwhile",
        ("server_args", "port_args", "run_scheduler_process_func"),
    ),
    Hook(
        "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses",
        "around",
        fork_server.launch,
        "the same",
        ("server_args", "port_args", "run_detokenizer_process_func"),
    ),
    # device handling
    Hook(
        "sglang.srt.utils.numa_utils.init_threads_binding",
        "replace",
        lambda *, tp_rank, tp_size: None,
        "picks cores for compiled CPU kernels that are not there; refuses more ranks than NUMA nodes",
        ("tp_rank", "tp_size"),
    ),
    Hook(
        "torch.Tensor.pin_memory",
        "replace",
        lambda self, *args: self,
        "ScheduleBatch.prepare_for_decode pins outright; without an accelerator there is nothing to pin for",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs",
        "replace",
        _track_indices,
        "allocates pinned memory outright",
        ("batch", "track_positions"),
    ),
    Hook(
        "sglang.srt.layers.quantization.unquant.UnquantizedFusedMoEMethod.forward_native",
        "around",
        mamba_ops.experts,
        "knows SiLU alone on a CPU, and no factor on what experts give",
        ("self", "layer", "dispatch_output"),
    ),
    Hook(
        "sglang.srt.models.nemotron_h.NemotronHMoE._forward_core_normal",
        "around",
        _mm_in_out_dtype,
        "torch.mm has no out_dtype on a CPU",
        ("self", "hidden_states"),
    ),
    # adapters
    Hook(
        "sglang.srt.lora.lora_manager.LoRAManager.__init__",
        "around",
        _unpinned,
        "the adapted layers allocate pinned memory outright",
        ("self", "base_model"),
    ),
    Hook(
        "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
        "around",
        _unpinned,
        "the LoRA backend allocates pinned memory outright",
        ("self", "forward_batch"),
    ),
    # constrained decoding
    Hook(
        f"{_GRAMMAR}._allocate_token_bitmask",
        "replace",
        _allocate_bitmask,
        "allocates pinned memory outright",
        ("vocab_size", "batch_size"),
    ),
    Hook(
        f"{_GRAMMAR}.XGrammarGrammarBackend.apply_vocab_mask",
        "replace",
        _apply_bitmask,
        "raises for CPU logits in the scheduler; xgrammar has a CPU kernel",
        ("logits", "vocab_mask"),
    ),
    Hook(
        f"{_GRAMMAR}.XGrammarGrammar.apply_vocab_mask",
        "replace",
        lambda self, logits, vocab_mask: _apply_bitmask(logits, vocab_mask),
        "raises for CPU logits in the scheduler; xgrammar has a CPU kernel",
        ("self", "logits", "vocab_mask"),
    ),
)

TABLE = HookTable("hypic_cpu", _HOOKS)


def register() -> None:
    """Set CPU mode's environment and hand the hooks to SGLang."""
    defaults.set_environment()
    TABLE.register()
