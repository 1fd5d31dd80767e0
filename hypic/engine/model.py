"""Reading the loaded model: which layers an artifact covers, their shapes, and whether PIC holds for them."""

from __future__ import annotations

from typing import Any

import torch

from hypic.artifact.layout import ArtifactLayout, FullShape, LinearShape
from hypic.config import artifact_dtypes
from hypic.engine.families import family, family_of_backend, known_families
from hypic.engine.latent import backend_problem
from hypic.engine.relocation import CannotRelocate, Rotary, find_rotary
from hypic.engine.support import SLIDING_WINDOWS, Unsupported, cannot_serve, check_state_dtype


def read_layout(model_runner: Any, state_dtype: str) -> ArtifactLayout:
    """Artifact layout of the loaded model on this rank; `state_dtype` is the setting. Raises Unsupported."""
    backend, config = model_runner.attn_backend, model_runner.model_config
    try:
        linear = _linear_shape(model_runner, backend, state_dtype)
        return ArtifactLayout(linear, _full_shape(model_runner, backend))
    except Unsupported as e:
        raise cannot_serve(config.model_path, config.hf_config.architectures[0], [str(e)]) from None


def _linear_shape(model_runner: Any, backend: Any, setting: str) -> LinearShape | None:
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    if not isinstance(backend, HybridLinearAttnBackend):
        return None
    found = family_of_backend(backend.linear_attn_backend)
    if found is None:
        raise Unsupported(f"linear attention of {type(backend.linear_attn_backend).__name__}: {known_families()}")
    pool = model_runner.req_to_token_pool
    if pool.mamba_ckpt_pool is not None:
        raise Unsupported("int8 state checkpoints: rounding in the radix tree is not proven")
    check_state_dtype(setting, _name(model_runner.dtype))
    state_dtype, operator_dtype = artifact_dtypes(setting, _name(model_runner.dtype))
    cache = pool.mamba_pool.mamba_cache
    try:
        shape = found.shape(
            tuple(pool.mamba_map),
            [tuple(conv.shape[2:]) for conv in cache.conv],
            tuple(cache.temporal.shape[2:]),
            _name(cache.conv[0].dtype) if cache.conv else state_dtype,
            state_dtype,
        )
    except ValueError as e:
        raise Unsupported(str(e)) from None
    return shape.with_operators_in(operator_dtype)


def _full_shape(model_runner: Any, backend: Any) -> FullShape | None:
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool

    pool = model_runner.token_to_kv_pool
    if model_runner.is_hybrid_swa or model_runner.sliding_window_size or has_windows(model_runner.model):
        raise Unsupported(SLIDING_WINDOWS)
    inner = pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool
    latent = type(inner) is MLATokenToKVPool  # a subclass keeps more than the latent, or quantises it
    if not latent and not isinstance(inner, MHATokenToKVPool):
        raise Unsupported(f"KV pool {type(inner).__name__}: only K and V or a latent, neither quantised nor indexed")
    if latent and (problem := backend_problem(model_runner.server_args)):
        raise Unsupported(problem)
    if hasattr(backend, "full_attn_layers"):
        layers = tuple(backend.full_attn_layers)
    else:
        layers = tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    if not layers:
        return None
    k = pool.get_key_buffer(layers[0])
    d_v = 0 if latent else pool.get_value_buffer(layers[0]).shape[2]
    if not k.is_floating_point() or k.element_size() < 2:
        raise Unsupported(f"KV cache in {k.dtype}: relocating a quantised K is not proven")
    return FullShape(layer_ids=layers, heads=k.shape[1], d_k=k.shape[2], d_v=d_v, dtype=_name(k.dtype))


def has_windows(model: Any) -> bool:
    """Whether a layer attends to a window; not every model with such layers tells SGLang."""
    layers = (m for m in model.modules() if type(m).__name__ == "RadixAttention")
    return any(layer.sliding_window_size > -1 for layer in layers)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def prove(model_runner: Any, layout: ArtifactLayout) -> tuple[Rotary | None, str | None]:
    """Start-up self-check of the loaded weights: (rotary of the full-attention layers, why PIC is off or None)."""
    from hypic.engine.composition import ComposeError, check_composition

    rotary = None
    try:
        if layout.full is not None:
            rotary = find_rotary(model_runner.model, layout.full.layer_ids, model_runner.model_config.context_len)
        if layout.linear is not None:
            family(layout.linear.family).check_model(model_runner.model, model_runner.model_config.context_len)
            check_composition(model_runner.model, layout.linear)
    except (CannotRelocate, ComposeError) as e:
        return rotary, str(e)
    return rotary, None
