"""Ring-linear-2.0 and Ring-2.5 as Hugging Face models in plain torch, for tests: transformers has neither.

Written from the published recurrence (Lightning attention, arXiv 2401.04658; Ring-linear, 2510.19338), with parameters named
as SGLang loads them. Linear layers are computed in the quadratic form, sum over s <= t of e^(-slope (t-s)) (q_t k_s) v_s in
float64: no state, no recurrence, no chunk, so nothing is shared with the engine or with the oracle's mixer.

What is different in Ring-2.5 (github.com/inclusionAI/Ring-V2.5, models/): every ``layer_group_size``-th layer, 8th in the
published ones, is multi-head latent attention with low-rank queries (kv_lora_rank 512, q_lora_rank 1536, 64 rotary channels in
neighbouring pairs) in place of grouped-query attention. Linear layers are those of Ring-linear-2.0: half of each key rotates, in
half-split pairs. The published code gives layer l the slopes that SGLang 0.5.17 gives layer l - 1; here they are SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from hypic.check.oracle_mixers import RopeTable


class BailingLinearConfig(PreTrainedConfig):
    model_type = "bailing_moe_linear"


class BailingHybridConfig(PreTrainedConfig):
    model_type = "bailing_hybrid"


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, groups: int = 1):
        super().__init__()
        self.weight, self._eps, self._groups = nn.Parameter(torch.ones(size)), eps, groups

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self._groups, -1))
        parts = parts * (parts.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return self.weight * parts.flatten(-2)


class Rotary(nn.Module):
    """As transformers' modules: cos and sin of positions, the angles in float32 as in every published model."""

    rope_type = "default"

    def __init__(self, config: Any):
        super().__init__()
        self._dim, self._theta = int(config.head_dim * config.partial_rotary_factor), config.rope_theta

    def forward(self, _: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = 1.0 / self._theta ** (torch.arange(0, self._dim, 2) / self._dim)
        angles = (positions[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Projections of both kinds of layers; heads of q, k and v side by side."""

    def __init__(self, config: Any, kv_heads: int):
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = config.head_dim, config.num_attention_heads, kv_heads
        self.scaling = self.head_dim**-0.5
        inner = self.heads * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, inner + 2 * kv_heads * self.head_dim, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(inner, config.hidden_size, bias=False)

    def project(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [n, heads, D], k and v [n, kv_heads, D] before RoPE."""
        heads = self.query_key_value(y).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return self.query_layernorm(q), self.key_layernorm(k), v

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * self.scaling
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    def finish(self, mixed: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.dense(mixed.flatten(1))
        return out

    def forward(self, y: Tensor, rope: RopeTable) -> Tensor:
        q, k, v = self.project(y)
        return self.finish(self.mix(rope.rotate(q, 0), rope.rotate(k, 0), v), y)


class LinearAttention(Attention):
    """Its slopes [heads], the log decays per token, are a geometric series over heads and smaller in later layers.

    The number of heads must be a power of two.
    """

    def __init__(self, config: Any, layer_id: int):
        super().__init__(config, config.num_attention_heads)
        self.g_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.g_norm = RMSNorm(self.heads * self.head_dim, config.rms_norm_eps, config.group_norm_size)
        self._share = 1 - layer_id / (config.num_hidden_layers - 1) + 1e-5

    @property
    def slopes(self) -> Tensor:
        base: Tensor = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1).double() / self.heads)
        return base * self._share

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ago = torch.arange(len(q))[:, None] - torch.arange(len(q))
        decay = (-self.slopes[:, None, None] * ago).exp().masked_fill(ago < 0, 0.0)
        scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * self.scaling * decay
        return torch.einsum("hnm,mhd->nhd", scores, v.double()).float()

    def finish(self, mixed: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.dense(self.g_norm(mixed.flatten(1)) * self.g_proj(y).sigmoid())
        return out


class PairedRotary(nn.Module):
    """Turns of neighbouring channels by position, as complex numbers."""

    def __init__(self, dim: int, theta: float):
        super().__init__()
        self._dim, self._theta = dim, theta

    def forward(self, _: Tensor, positions: Tensor) -> Tensor:
        frequencies = 1.0 / self._theta ** (torch.arange(0, self._dim, 2) / self._dim)
        angles = positions[..., None] * frequencies
        return torch.polar(torch.ones_like(angles), angles)


class LatentAttention(nn.Module):
    """Multi-head latent attention with low-rank queries, K and V of every head written out."""

    def __init__(self, c: Any):
        super().__init__()
        self.num_heads, self.kv_lora_rank, self.v_head_dim = c.num_attention_heads, c.kv_lora_rank, c.v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = c.qk_nope_head_dim, c.qk_rope_head_dim
        self.rotary = PairedRotary(c.qk_rope_head_dim, c.rope_theta)
        width = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.scaling = width**-0.5
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, self.num_heads * width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, self.num_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.dense = nn.Linear(self.num_heads * c.v_head_dim, c.hidden_size, bias=False)

    @property
    def o_proj(self) -> nn.Module:
        """As other models call it."""
        return self.dense

    def forward(self, y: Tensor, _: RopeTable) -> Tensor:
        turns = self.rotary(y, torch.arange(len(y)))[:, None]

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * turns.real - b * turns.imag, b * turns.real + a * turns.imag], -1).flatten(-2)

        sizes = [self.qk_nope_head_dim, self.qk_rope_head_dim]
        q, q_turning = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(y))).unflatten(-1, (self.num_heads, -1)).split(sizes, -1)
        )
        latent, shared = self.kv_a_proj_with_mqa(y).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        k, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        q = torch.cat([q, turned(q_turning)], -1)
        k = torch.cat([k, turned(shared[:, None]).expand(-1, self.num_heads, -1)], -1)
        future = torch.ones(len(y), len(y), dtype=torch.bool).triu(1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) * self.scaling
        mixed = torch.einsum("hnm,mhd->nhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)
        out: Tensor = self.dense(mixed.flatten(1))
        return out


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Router(nn.Module):
    def __init__(self, hidden: int, experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.expert_bias = nn.Parameter(torch.zeros(experts))


class MixtureOfExperts(nn.Module):
    """Sigmoid scores. The best experts are taken from the best groups; the bias takes part in that choice only."""

    def __init__(self, c: Any):
        super().__init__()
        self._c = c
        self.gate = Router(c.hidden_size, c.num_experts)
        self.experts = nn.ModuleList(Mlp(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts))
        self.shared_experts = Mlp(c.hidden_size, c.moe_intermediate_size * c.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        c, scores = self._c, F.linear(x, self.gate.weight).sigmoid()
        grouped = (scores + self.gate.expert_bias).unflatten(-1, (c.n_group, -1))
        groups = grouped.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        out_of_play = torch.ones(grouped.shape[:-1], dtype=torch.bool).scatter(-1, groups, False)
        ranked = grouped.masked_fill(out_of_play[..., None], -torch.inf).flatten(-2)
        chosen = ranked.topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, chosen)
        share = torch.zeros_like(scores).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        routed = (outputs * share[..., None, :]).sum(-1) * c.routed_scaling_factor
        out: Tensor = routed + self.shared_experts(x)
        return out


class BailingLinearLayer(nn.Module):
    def __init__(self, config: Any, layer_id: int):
        super().__init__()
        self.attention: nn.Module
        if (layer_id + 1) % config.layer_group_size:
            self.attention = LinearAttention(config, layer_id)
        elif config.model_type == BailingHybridConfig.model_type:
            self.attention = LatentAttention(config)
        else:
            self.attention = Attention(config, config.num_key_value_heads)
        dense = config.num_experts == 1 or layer_id < config.first_k_dense_replace
        self.mlp = Mlp(config.hidden_size, config.intermediate_size) if dense else MixtureOfExperts(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: RopeTable) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), rope)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class BailingLinearModel(PreTrainedModel):
    """Without a cache: ``past_key_values`` only carries the tokens so far, and all of them are computed again."""

    config_class = BailingLinearConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(BailingLinearLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotary(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **_: Any) -> BaseModelOutputWithPast:
        if past_key_values is not None:
            seen = getattr(past_key_values, "seen", input_ids[:, :0])
            past_key_values.seen = input_ids = torch.cat([seen, input_ids], 1)
        x, rope = self.word_embeddings(input_ids[0]), RopeTable(self.rotary_emb)
        for layer in self.layers:
            x = layer(x, rope)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x)[None], past_key_values=past_key_values)


class BailingMoeLinearV2ForCausalLM(PreTrainedModel):
    config_class = BailingLinearConfig

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = BailingLinearModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.word_embeddings


class BailingMoeV2_5ForCausalLM(BailingMoeLinearV2ForCausalLM):
    """Ring-2.5 and Ling-2.5."""

    config_class = BailingHybridConfig
