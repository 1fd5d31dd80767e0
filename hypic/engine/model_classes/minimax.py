"""MiniMax-Text-01 and MiniMax-M1: Lightning layers whose keys do not rotate, softmax attention, and norms whose output is the
residual stream, weighed where layers add to it (arXiv 2501.08313; transformers' modeling_minimax).

SGLang 0.5.17 has no such model but all its parts: Mixtral's experts and weight names, Llama's attention, the Lightning backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.distributed import get_pp_group
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.models.minimax_m2 import MiniMaxM2RMSNormTP
from sglang.srt.models.mixtral import MixtralForCausalLM, MixtralMoE
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import add_prefix, make_layers
from torch import Tensor, nn

NOT_WEIGHTS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Constants that transformers saves."""


class MiniMaxLightningAttention(nn.Module):
    """q, k and v of a head lie side by side in the projection, so that a rank's share of its outputs is its heads.

    Attributes: as the family of Lightning layers reads them.
    """

    linear_backend, linear_rope = "seg_la", False

    def __init__(self, config: Any, layer_id: int, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        self.layer_id, self.total_num_heads, self.head_dim = layer_id, config.num_attention_heads, config.head_dim
        self.heads, self.scaling = self.total_num_heads // get_parallel().attn_tp_size, self.head_dim**-0.5
        width = self.total_num_heads * self.head_dim

        def column(name: str, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden_size, outputs, bias=False, quant_config=quant_config, prefix=add_prefix(name, prefix)
            )

        self.in_proj, self.output_gate = column("qkv_proj", 3 * width), column("output_gate", width)
        self.out_proj = RowParallelLinear(
            width, config.hidden_size, bias=False, quant_config=quant_config, prefix=add_prefix("out_proj", prefix)
        )
        self.norm = MiniMaxM2RMSNormTP(width, self.total_num_heads, eps=1e-6)
        self.attn = RadixAttention(
            self.heads,
            self.head_dim,
            self.scaling,
            num_kv_heads=self.heads,
            layer_id=layer_id,
            quant_config=quant_config,
        )

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        inner, _ = self.in_proj(hidden_states)
        q, k, v = F.silu(inner).float().view(len(inner), self.heads, 3, self.head_dim).unbind(2)
        # The backend multiplies queries by 1 / sqrt(head_dim), this model by nothing.
        mixed = self.attn((q / self.scaling).contiguous(), k.contiguous(), v.contiguous(), forward_batch)
        gate, _ = self.output_gate(hidden_states)
        mixed = self.norm(mixed.view(len(inner), -1).to(hidden_states.dtype)) * gate.sigmoid()
        out: Tensor = self.out_proj(mixed)[0]
        return out


class MiniMaxDecoderLayer(nn.Module):
    def __init__(self, config: Any, layer_id: int, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        linear = config.layer_types[layer_id] == "linear_attention"
        name = add_prefix("self_attn", prefix)
        self.self_attn: nn.Module
        if linear:
            self.self_attn = MiniMaxLightningAttention(config, layer_id, quant_config, name)
        else:
            self.self_attn = LlamaAttention(
                config, config.hidden_size, config.num_attention_heads, config.num_key_value_heads, layer_id,
                rope_theta=config.rope_parameters["rope_theta"], max_position_embeddings=config.max_position_embeddings,
                quant_config=quant_config, prefix=name,
            )  # fmt: skip
        self.block_sparse_moe = MixtralMoE(
            config.num_local_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size, layer_id,
            quant_config=quant_config, prefix=add_prefix("block_sparse_moe", prefix),
        )  # fmt: skip
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        kind = "linear" if linear else "full"
        self._alpha, self._beta = (getattr(config, f"{kind}_attn_{name}_factor") for name in ("alpha", "beta"))
        self._mlp_alpha, self._mlp_beta = config.mlp_alpha_factor, config.mlp_beta_factor

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Tensor:
        x = self.input_layernorm(hidden_states)
        kept = x * self._alpha
        x = kept + self.self_attn(positions=positions, hidden_states=x, forward_batch=forward_batch) * self._beta
        x = self.post_attention_layernorm(x)
        kept = x * self._mlp_alpha  # experts write over their input
        return kept + self.block_sparse_moe(x) * self._mlp_beta


class MiniMaxModel(nn.Module):
    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = make_layers(
            config.num_hidden_layers,
            lambda idx, prefix: MiniMaxDecoderLayer(config, idx, quant_config, prefix),
            prefix=add_prefix("layers", prefix),
        )
        self.start_layer, self.end_layer = 0, config.num_hidden_layers
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        pp_proxy_tensors: None = None,
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
        for layer in self.layers:
            x = layer(positions, x, forward_batch)
        out: Tensor = self.norm(x)
        return out


class MiniMaxForCausalLM(MixtralForCausalLM):
    """As transformers names the architecture."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        nn.Module.__init__(self)
        self.pp_group, self.config, self.quant_config = get_pp_group(), config, quant_config
        if self.pp_group.world_size > 1:
            raise NotImplementedError("MiniMax on several pipeline stages")
        self.model = MiniMaxModel(config, quant_config, add_prefix("model", prefix))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=add_prefix("lm_head", prefix))
        self.logits_processor = LogitsProcessor(config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Full-attention layers come with q_proj, k_proj and v_proj; qkv_proj is a linear layer's."""
        kept = ((name, w) for name, w in weights if not name.endswith(NOT_WEIGHTS))
        return super().load_weights((name.replace(".qkv_proj.", ".in_proj."), w) for name, w in kept)


class MiniMaxText01ForCausalLM(MiniMaxForCausalLM):
    """As published."""


class MiniMaxM1ForCausalLM(MiniMaxForCausalLM):
    """As published."""


EntryClass = [MiniMaxForCausalLM, MiniMaxText01ForCausalLM, MiniMaxM1ForCausalLM]
