"""The oracle's Kimi delta attention and multi-head latent attention, written from their definitions.

Sources: Kimi Linear, arXiv 2510.26692; DeepSeek-V2, arXiv 2405.04434. Latent attention is written as the papers train it,
with K and V of every head: nothing is absorbed into projections, and no latent is cached once it is expanded.
Letters as in oracle_mixers; H heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Rope(Protocol):
    def rotate(self, x: Tensor, start: int) -> Tensor:
        """``x`` [n, heads, D] at positions start..start+n-1."""


class PairedRope:
    """DeepSeek's rotary embedding, whose pairs are neighbours; from the model's own angles."""

    def __init__(self, rotary_emb: Any) -> None:
        self._rotary_emb = rotary_emb

    def rotate(self, x: Tensor, start: int) -> Tensor:
        turns = self._rotary_emb(x, torch.arange(start, start + len(x))[None])[0]
        return torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns[:, None]
        ).flatten(-2)


class KdaTokens(NamedTuple):
    """What the recurrence needs of each token, float32.

    Attributes:
        raw: inputs of the three convolutions [n, C]. k: normalised keys [n, H, dk]. v: [n, H, dv].
        g: log decay of every key channel [n, H, dk], <= 0. beta: write strength [n, H].
    """

    raw: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class KdaState(NamedTuple):
    """h [H, dk, dv] (the paper's layout, not SGLang's) and the conv window [W-1, C], oldest input first; float32."""

    h: Tensor
    window: Tensor


class KimiDelta:
    """Kimi delta attention: projections, norm and parameters are the module's, the mixing is done here."""

    def __init__(self, module: Any) -> None:
        self._m = module
        convolutions = (module.q_conv1d, module.k_conv1d, module.v_conv1d)
        self._taps: Tensor = torch.cat([c.weight[:, 0] for c in convolutions]).T  # [W, C]

    def start(self) -> KdaState:
        m, (w, c) = self._m, self._taps.shape
        return KdaState(torch.zeros(m.num_heads, m.head_dim, m.head_dim), torch.zeros(w - 1, c))

    def run(self, y: Tensor, state: KdaState) -> tuple[Tensor, KdaState, KdaTokens]:
        m, n, heads = self._m, len(y), (self._m.num_heads, self._m.head_dim)
        raw = torch.cat([m.q_proj(y), m.k_proj(y), m.v_proj(y)], -1)
        inputs = torch.cat([state.window, raw])
        mixed = F.silu(sum(inputs[j : j + n] * tap for j, tap in enumerate(self._taps)))
        q, k, v = (x.view(n, *heads) for x in mixed.chunk(3, -1))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        gates = (m.f_b_proj(m.f_a_proj(y)) + m.dt_bias).view(n, *heads)
        g = -m.A_log.exp().view(-1, 1) * F.softplus(gates)
        record = KdaTokens(raw, k, v, g, m.b_proj(y).sigmoid())
        h, out = self._scan(state.h, record, q * m.head_dim**-0.5)
        gate = m.g_b_proj(m.g_a_proj(y)).view(n, *heads).sigmoid()
        return m.o_proj((m.o_norm(out) * gate).flatten(1)), KdaState(h, self._window(state, raw)), record

    def replay(self, state: KdaState, record: KdaTokens) -> KdaState:
        h, _ = self._scan(state.h, record, record.k)
        return KdaState(h, self._window(state, record.raw))

    def _scan(self, h: Tensor, t: KdaTokens, q: Tensor) -> tuple[Tensor, Tensor]:
        """Row d of h decays by e^g_d, then h <- h + k (beta (v - h^T k))^T, then o = h^T q: end state, outputs [n, H, dv]."""
        outputs = []
        for k, v, g, beta, q_i in zip(t.k, t.v, t.g, t.beta, q, strict=True):
            h = g.exp()[:, :, None] * h
            correction = beta[:, None] * (v - torch.einsum("hkv,hk->hv", h, k))
            h = h + k[:, :, None] * correction[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", h, q_i))
        return h, torch.stack(outputs) if outputs else torch.empty(0, *h.shape[::2])

    def _window(self, state: KdaState, raw: Tensor) -> Tensor:
        inputs = torch.cat([state.window, raw])
        return inputs[len(inputs) - len(state.window) :]


class LatentKV(NamedTuple):
    """K of all heads without their shared part [tokens, H, nope], V [tokens, H, dv], the shared part of K before RoPE
    [tokens, 1, rope]; float32. A state: row i is position i of the prompt."""

    k: Tensor
    v: Tensor
    shared: Tensor


class LatentAttention:
    """Causal multi-head latent attention; ``rope`` turns the shared part of K and its counterpart in the queries."""

    def __init__(self, module: Any, rope: Rope) -> None:
        self._m, self._rope = module, rope

    def start(self) -> LatentKV:
        m = self._m
        k, v = (torch.empty(0, m.num_heads, d) for d in (m.qk_nope_head_dim, m.v_head_dim))
        return LatentKV(k, v, torch.empty(0, 1, m.qk_rope_head_dim))

    def run(self, y: Tensor, state: LatentKV) -> tuple[Tensor, LatentKV, LatentKV]:
        m, n = self._m, len(y)
        queries = m.q_proj(y) if hasattr(m, "q_proj") else m.q_b_proj(m.q_a_layernorm(m.q_a_proj(y)))
        q, q_shared = queries.view(n, m.num_heads, -1).split([m.qk_nope_head_dim, m.qk_rope_head_dim], -1)
        latent, shared = m.kv_a_proj_with_mqa(y).split([m.kv_lora_rank, m.qk_rope_head_dim], -1)
        kv = m.kv_b_proj(m.kv_a_layernorm(latent)).view(n, m.num_heads, -1)
        k, v = kv.split([m.qk_nope_head_dim, m.v_head_dim], -1)
        record = LatentKV(k, v, shared[:, None])
        state = self.replay(state, record)
        start = len(state.k) - n
        q_shared, k_shared = self._rope.rotate(q_shared, start), self._rope.rotate(state.shared, 0)
        scores = torch.einsum("nhd,mhd->hnm", q, state.k) + torch.einsum("nhd,md->hnm", q_shared, k_shared[:, 0])
        future = torch.arange(len(state.k)) > torch.arange(start, len(state.k))[:, None]
        weights = (scores * m.scaling).masked_fill(future, -torch.inf).softmax(-1)
        return m.o_proj(torch.einsum("hnm,mhd->nhd", weights, state.v).flatten(1)), state, record

    def replay(self, state: LatentKV, record: LatentKV) -> LatentKV:
        return LatentKV(*(torch.cat(pair) for pair in zip(state, record, strict=True)))
