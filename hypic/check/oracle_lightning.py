"""The oracle's Lightning and grouped-query mixers of Ring-linear and Ring-2.5, on the modules of ``check.bailing``,
and MiniMax's on transformers'.

A record keeps keys before RoPE; a state replays them turned to where they stand, one token at a time, so that nothing here
ever rotates a state. Letters as in oracle_mixers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.check.oracle_kimi import LatentAttention, PairedRope, Rope
from hypic.check.oracle_mixers import KV


class LightningState(NamedTuple):
    """h [H, K, V], and how many tokens it has seen: where the next one stands."""

    h: Tensor
    seen: int


class Lightning:
    """h <- e^-slope h + k v^T, then read o = q h."""

    def __init__(self, module: Any, rope: Rope) -> None:
        self._m, self._rope = module, rope
        self._decay = (-module.slopes).exp().float()[:, None, None]

    def start(self) -> LightningState:
        return LightningState(torch.zeros(self._m.heads, self._m.head_dim, self._m.head_dim), 0)

    def run(self, y: Tensor, state: LightningState) -> tuple[Tensor, LightningState, KV]:
        q, k, v = self._m.project(y)
        after, outputs = self._scan(state, KV(k, v), self._rope.rotate(q, state.seen) * self._m.scaling)
        return self._m.finish(outputs, y), after, KV(k, v)

    def replay(self, state: LightningState, record: KV) -> LightningState:
        return self._scan(state, record, record.k)[0]

    def _scan(self, state: LightningState, record: KV, q: Tensor) -> tuple[LightningState, Tensor]:
        h, outputs = state.h, torch.empty_like(record.v)
        for i, k in enumerate(self._rope.rotate(record.k, state.seen)):
            h = self._decay * h + k[:, :, None] * record.v[i][:, None, :]
            outputs[i] = (q[i][:, None] @ h)[:, 0]
        return LightningState(h, state.seen + len(record.k)), outputs


class GroupedQuery:
    """Causal attention; keeps K before RoPE and turns all of it whenever it attends."""

    def __init__(self, module: Any, rope: Rope) -> None:
        self._m, self._rope = module, rope

    def start(self) -> KV:
        empty = torch.empty(0, self._m.kv_heads, self._m.head_dim)
        return KV(empty, empty)

    def run(self, y: Tensor, state: KV) -> tuple[Tensor, KV, KV]:
        q, k, v = self._m.project(y)
        record, before = KV(k, v), len(state.k)
        state = self.replay(state, record)
        q = self._rope.rotate(q, before).unflatten(1, (self._m.kv_heads, -1))
        scores = torch.einsum("nghd,mgd->ghnm", q, self._rope.rotate(state.k, 0)) * self._m.scaling
        future = torch.arange(len(state.k)) > torch.arange(before, len(state.k))[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        mixed = torch.einsum("ghnm,mgd->nghd", weights, state.v).flatten(1, 2)
        return self._m.finish(mixed, y), state, record

    def replay(self, state: KV, record: KV) -> KV:
        return KV(torch.cat([state.k, record.k]), torch.cat([state.v, record.v]))


class MiniMaxLinear:
    """transformers' MiniMaxLightningAttention as Lightning reads a module. Its queries are not scaled."""

    scaling = 1.0

    def __init__(self, module: Any) -> None:
        self._m, self.heads, self.head_dim = module, module.num_attention_heads, module.head_dim
        self.slopes = module.slope_rate.flatten().double()

    def project(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.silu(self._m.qkv_proj(y)).view(len(y), self.heads, 3, self.head_dim).unbind(2)
        return q, k, v

    def finish(self, mixed: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self._m.out_proj(self._m.norm(mixed.flatten(1)) * self._m.output_gate(y).sigmoid())
        return out


def mixer_of(layer: Any, rope: Rope) -> Lightning | GroupedQuery | LatentAttention:
    """Of a BailingLinearLayer. ``rope`` is that of linear and grouped-query layers; latent ones have their own."""
    module = layer.attention
    if hasattr(module, "kv_lora_rank"):
        return LatentAttention(module, PairedRope(module.rotary))
    return (Lightning if hasattr(module, "slopes") else GroupedQuery)(module, rope)
