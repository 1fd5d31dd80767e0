"""Token mixers of the reference. Weights, projections and norms are those of the Hugging Face modules.

``link`` computes the first tokens of a prompt by a :class:`Layout`; ``run`` goes on from there with ordinary tokens. Letters
in shapes: n tokens, c computed ones of them; G K/V heads of H query heads each, D head size; Hv value heads, K and V their
key and value sizes, C conv channels, W conv kernel size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypic.check.oracle_mixers import KV, DeltaNet, DeltaState, DeltaTokens, FusedDeltaNet
from hypic.eval.reference.delta import delta_rule
from hypic.eval.reference.layout import Layout


class Linked(NamedTuple):
    """What one layer makes of a prompt's first tokens.

    Attributes:
        out: outputs of the computed tokens [c, d].
        state: what :meth:`run` goes on from.
        record: of the computed tokens.
        values: [n, F], V or written values of all tokens, as used.
        kept: rotated K and V of all tokens [n, F] (0 where hidden), or a linear layer's state h.
    """

    out: Tensor
    state: Any
    record: Any
    values: Tensor
    kept: Tensor


class Rope:
    """Rotation by the model's own rotary embedding, to any positions."""

    def __init__(self, rotary_emb: nn.Module, device: Any) -> None:
        self._rotary_emb, self._device = rotary_emb, device
        self._cos = self._sin = torch.empty(0, 0, device=device)

    def rotate(self, x: Tensor, places: Tensor) -> Tensor:
        """``x`` [n, heads, D] to positions ``places`` [n]; only the leading channels turn, in half-split order."""
        if len(places) and (stop := int(places.max()) + 1) > len(self._cos):
            positions = torch.arange(max(stop, 2 * len(self._cos), 1024), device=self._device)[None]
            cos, sin = self._rotary_emb(torch.empty(0, device=self._device), positions)
            self._cos, self._sin = cos[0].float(), sin[0].float()
        cos, sin = self._cos[places][:, None], self._sin[places][:, None]
        turned, rest = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([(turned * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype), rest], dim=-1)


class Attention:
    """Causal full attention. A state holds rotated K, and V, of what later tokens see; a record holds K before RoPE."""

    kind = "attention"

    def __init__(self, module: Any, rope: Rope) -> None:
        self._m, self._rope = module, rope
        self._d: int = module.head_dim
        self._per_kv: int = module.num_key_value_groups
        self._heads: int = module.o_proj.in_features // self._d
        self._gated: bool = module.q_proj.out_features == 2 * self._heads * self._d
        self._q_norm = getattr(module, "q_norm", None) or nn.Identity()
        self._k_norm = getattr(module, "k_norm", None) or nn.Identity()

    def start(self, like: Tensor) -> KV:
        empty = like.new_empty(0, self._heads // self._per_kv, self._d)
        return KV(empty, empty)

    def record(self, y: Tensor) -> KV:
        shape = (len(y), -1, self._d)
        return KV(self._k_norm(self._m.k_proj(y).view(shape)), self._m.v_proj(y).view(shape))

    def link(self, y: Tensor, layout: Layout, records: Sequence[KV]) -> Linked:
        own = self.record(y)
        k = self._rope.rotate(layout.fill(own.k, [r.k for r in records]), layout.places)
        v = layout.fill(own.v, [r.v for r in records])
        out = self._attend(y, layout.computed, k, v, layout.mask)
        kept = torch.cat([k.flatten(1), v.flatten(1)], dim=-1)
        if layout.method.kv:
            return Linked(out, KV(k, v), own, v.flatten(1), kept)
        outside = layout.owners == 0
        return Linked(out, KV(k[outside], v[outside]), own, v.flatten(1), kept * outside[:, None])

    def run(self, y: Tensor, state: KV, position: int) -> tuple[Tensor, KV]:
        own = self.record(y)
        places = torch.arange(position, position + len(y), device=y.device)
        k = torch.cat([state.k, self._rope.rotate(own.k, places)])
        v = torch.cat([state.v, own.v])
        mask = None
        if len(state.k):
            mask = torch.ones(len(y), len(k), dtype=torch.bool, device=y.device).tril(len(state.k))
        return self._attend(y, places, k, v, mask), KV(k, v)

    def _attend(self, y: Tensor, places: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        m, n, d = self._m, len(y), self._d
        q, gate = m.q_proj(y).view(n, self._heads, -1).split([d, d * self._gated], dim=-1)
        q = self._rope.rotate(self._q_norm(q), places).transpose(0, 1)
        k, v = (x.transpose(0, 1).repeat_interleave(self._per_kv, 0) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=m.scaling
        )
        out = out[0].transpose(0, 1).reshape(n, -1)
        return m.o_proj(out * gate.reshape(n, -1).sigmoid() if self._gated else out)


class Delta(DeltaNet):
    """Gated delta net by chunks; its projections and records are the oracle's."""

    kind = "linear"

    def start(self, like: Tensor) -> DeltaState:  # type: ignore[override]
        m, (w, c) = self._m, self._taps.shape
        h = torch.zeros(m.num_v_heads, m.head_k_dim, m.head_v_dim, device=like.device)
        return DeltaState(h, like.new_zeros(w - 1, c))

    def link(self, y: Tensor, layout: Layout, records: Sequence[DeltaTokens]) -> Linked:
        raw, z, b, a = self._project(y)
        everything = layout.fill(raw, [r.raw for r in records])
        empty = self.start(y)
        q, k, v = self._convolved(torch.cat([empty.window, everything]))
        for (start, first, end), record in zip(layout.documents, records, strict=True):
            k[first:end], v[first:end] = record.k[first - start :], record.v[first - start :]
        own_g, own_beta = self._gates(b, a)
        g, beta = layout.fill(own_g, [r.g for r in records]), layout.fill(own_beta, [r.beta for r in records])
        h, out = _steps(DeltaTokens(everything, k, v, g, beta), q, layout)
        state = DeltaState(h, torch.cat([empty.window, everything])[-len(empty.window) :])
        record = DeltaTokens(raw, k[layout.computed], v[layout.computed], own_g, own_beta)
        return Linked(self._out(out[layout.computed], z), state, record, v.flatten(1), h)

    def run(self, y: Tensor, state: DeltaState, position: int) -> tuple[Tensor, DeltaState]:  # type: ignore[override]
        raw, z, b, a = self._project(y)
        inputs = torch.cat([state.window, raw])
        q, k, v = self._convolved(inputs)
        h, out = delta_rule(q, k, v, *self._gates(b, a), state.h)
        return self._out(out, z), DeltaState(h, inputs[-len(state.window) :])

    def _convolved(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [n, Hv, K] and v [n, Hv, V] from conv inputs [W - 1 + n, C]."""
        m, taps = self._m, self._taps
        n = len(inputs) - len(taps) + 1
        mixed = F.silu(sum(inputs[j : j + n] * tap for j, tap in enumerate(taps)))
        q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
        return self._unit_keys(q.float()), self._unit_keys(k.float()), v.float().reshape(n, -1, m.head_v_dim)

    def _gates(self, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        m = self._m
        return -m.A_log.float().exp() * F.softplus(a.float() + m.dt_bias.float()), b.float().sigmoid()

    def _out(self, out: Tensor, z: Tensor) -> Tensor:
        m, n = self._m, len(out)
        out = m.norm(out.to(z.dtype).reshape(-1, m.head_v_dim), z.reshape(-1, m.head_v_dim))
        return m.out_proj(out.reshape(n, -1))


class FusedDelta(Delta, FusedDeltaNet):
    """The same with Qwen3-Next's fused projections."""


def _steps(t: DeltaTokens, q: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The state after all tokens, and outputs [n, Hv, V]; those of interiors mean nothing."""
    how = layout.method.state
    if how == "compose" or not layout.documents:
        return delta_rule(q, t.k, t.v, t.g, t.beta)

    def run(start: int, end: int, h: Tensor | None) -> tuple[Tensor, Tensor]:
        part = slice(start, end)
        return delta_rule(q[part], t.k[part], t.v[part], t.g[part], t.beta[part], h)

    out = torch.zeros_like(t.v)
    h = t.k.new_zeros(t.k.shape[1], t.k.shape[2], t.v.shape[2])
    done = 0
    for _, first, end in layout.documents:
        if done < first:
            h, out[done:first] = run(done, first, h)
        if how == "zero":
            h = torch.zeros_like(h)
        else:
            alone, _ = run(first, end, None)
            decay = t.g[first:end].sum(0).exp()[:, None, None]
            h = {"additive": h, "decay": decay * h, "last": 0 * h}[how] + alone
        done = end
    if done < layout.n:
        h, out[done:] = run(done, layout.n, h)
    return h, out


def mixer_of(layer: Any, rope: Rope) -> Attention | Delta:
    """The mixer of one Hugging Face decoder layer. Raises NotImplementedError for a kind that is not known."""
    if hasattr(layer, "self_attn"):
        if getattr(layer.self_attn, "sliding_window", None) is not None:
            raise NotImplementedError("sliding-window attention: only full attention is known")
        return Attention(layer.self_attn, rope)
    if hasattr(layer, "linear_attn"):
        return (FusedDelta if hasattr(layer.linear_attn, "in_proj_qkvz") else Delta)(layer.linear_attn)
    raise NotImplementedError(f"{type(layer).__name__} has neither self_attn nor linear_attn")
