"""Kimi-Linear's parameters under their published names: transformers has no such model.

Modules hold weights, project and mix channels. How tokens mix is written once, in the oracle's mixers (oracle_kimi).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = _linear(hidden, width), _linear(hidden, width)
        self.down_proj = _linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Expert(nn.Module):
    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.w1, self.w2, self.w3 = _linear(hidden, width), _linear(width, hidden), _linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Router(nn.Module):
    def __init__(self, hidden: int, experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(experts))


class MixtureOfExperts(nn.Module):
    """Sigmoid scores; the bias takes part in the choice only."""

    def __init__(self, c: Any):
        super().__init__()
        self._c = c
        self.gate = Router(c.hidden_size, c.num_experts)
        self.experts = nn.ModuleList(Expert(c.hidden_size, c.moe_intermediate_size) for _ in range(c.num_experts))
        self.shared_experts = Mlp(c.hidden_size, c.moe_intermediate_size * c.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.gate.weight).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self._c.num_experts_per_token, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self._c.routed_scaling_factor
        share = torch.zeros_like(scores).scatter(-1, chosen, weights)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        out: Tensor = (outputs * share[..., None, :]).sum(-1) + self.shared_experts(x)
        return out


class DeltaAttention(nn.Module):
    """Kimi delta attention: parameters only."""

    def __init__(self, c: Any):
        super().__init__()
        linear = c.linear_attn_config
        self.num_heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        width = self.num_heads * self.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, _linear(c.hidden_size, width))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            setattr(self, name, nn.Conv1d(width, width, linear["short_conv_kernel_size"], groups=width, bias=False))
        for name in ("f", "g"):
            setattr(self, f"{name}_a_proj", _linear(c.hidden_size, self.head_dim))
            setattr(self, f"{name}_b_proj", _linear(self.head_dim, width))
        self.b_proj = _linear(c.hidden_size, self.num_heads)
        self.A_log = nn.Parameter(torch.zeros(1, 1, self.num_heads, 1))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = nn.RMSNorm(self.head_dim, eps=c.rms_norm_eps)
        self.o_proj = _linear(width, c.hidden_size)


class LatentAttention(nn.Module):
    """Multi-head latent attention: parameters only."""

    def __init__(self, c: Any):
        super().__init__()
        self.num_heads = c.num_attention_heads
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = (
            c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim,
        )  # fmt: skip
        self.kv_lora_rank = c.kv_lora_rank
        self.qk_head_dim = c.qk_nope_head_dim + c.qk_rope_head_dim
        self.scaling = self.qk_head_dim**-0.5
        self.q_proj = _linear(c.hidden_size, self.num_heads * self.qk_head_dim)
        self.kv_a_proj_with_mqa = _linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, eps=c.rms_norm_eps)
        self.kv_b_proj = _linear(c.kv_lora_rank, self.num_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = _linear(self.num_heads * c.v_head_dim, c.hidden_size)


class KimiDecoderLayer(nn.Module):
    def __init__(self, c: Any, index: int):
        super().__init__()
        is_linear = index + 1 in c.linear_attn_config["kda_layers"]
        self.self_attn = DeltaAttention(c) if is_linear else LatentAttention(c)
        if index >= c.first_k_dense_replace:
            self.block_sparse_moe = MixtureOfExperts(c)
        else:
            self.mlp = Mlp(c.hidden_size, c.intermediate_size)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def channels(self, x: Tensor) -> Tensor:
        out: Tensor = (self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp)(x)
        return out


class KimiModel(nn.Module):
    def __init__(self, c: Any):
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(KimiDecoderLayer(c, i) for i in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens


class KimiLinear(nn.Module):
    """``config``: the fields of config.json."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self._config, c = config, SimpleNamespace(**config)
        if c.q_lora_rank is not None or not c.mla_use_nope or c.num_expert_group != 1 or not c.moe_renormalize:
            raise NotImplementedError("Kimi-Linear with low-rank queries, RoPE, groups of experts or raw scores")
        self.model = KimiModel(c)
        self.lm_head = _linear(c.hidden_size, c.vocab_size)

    @classmethod
    def from_pretrained(cls, folder: Path) -> KimiLinear:
        model = cls(json.loads((folder / "config.json").read_text()))
        weights: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            weights |= load_file(file)
        model.load_state_dict(weights)
        return model.float()

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self._config, indent=1))
        save_file(self.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
