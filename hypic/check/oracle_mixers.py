"""Token mixers of the oracle: full attention and gated delta net, written straight from their definitions.

Each mixer wraps one Hugging Face module for its weights, projections and norms, and does the mixing itself, in float32
on the CPU. What a run of tokens leaves behind is a *record* (one row per token); a state is nothing but records that
were replayed into it. So there is no transition operator, no zero-start end-state and no relocation here: attention
keeps K before RoPE and rotates all of it by its place in the prompt whenever it attends, and the delta net updates its
state one token at a time (Yang et al., "Gated Delta Networks", arXiv 2412.06464, eq. 10; the Hugging Face reference is
``torch_recurrent_gated_delta_rule`` in transformers' modeling_qwen3_next.py).

Letters in shapes: n tokens of the run, m tokens so far (the run included), d model width; G K/V heads of H query heads
each, D head size; Hk key and Hv value heads, dk and dv their sizes, W conv kernel size, C conv channels (q, k, v).
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypic.check.oracle_kimi import LatentAttention, Rope

Record = TypeVar("Record", bound=tuple[Any, ...])
State = TypeVar("State")


def interior(record: Record, w: int) -> Record:
    """The rows of the tokens from ``w`` on: what an artifact with seam window ``w`` covers. Records may hold records."""
    return type(record)(*(interior(rows, w) if isinstance(rows, tuple) else rows[w:] for rows in record))


class Mixer(Protocol, Generic[State, Record]):
    """One layer's token mixer. States are values: ``run`` and ``replay`` return a new one, never write to the old."""

    def start(self) -> State:
        """The state before any token."""

    def run(self, y: Tensor, state: State) -> tuple[Tensor, State, Record]:
        """Compute tokens ``y`` [n, d] after ``state``: output [n, d], the state after them, and their record."""

    def replay(self, state: State, record: Record) -> State:
        """The state after tokens whose record was taken elsewhere; nothing is computed from their hidden states."""


class RopeTable:
    """cos and sin of the model's own rotary embedding for positions 0, 1, 2, ...; grows on demand.

    Text-only positions: Qwen3.5's mrope gives all three axes the same position when it is called with 2-d positions.
    """

    def __init__(self, rotary_emb: nn.Module) -> None:
        self._rotary_emb = rotary_emb
        self._cos = self._sin = torch.empty(0, 0)

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """``x`` [n, heads, D] at positions start..start+n-1; only the leading channels turn, in half-split order."""
        stop = start + len(x)
        if stop > len(self._cos):
            positions = torch.arange(max(stop, 2 * len(self._cos), 256))[None]
            cos, sin = self._rotary_emb(torch.empty(0), positions)
            self._cos, self._sin = cos[0], sin[0]
        cos, sin = self._cos[start:stop, None], self._sin[start:stop, None]
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


class NoRope:
    """In the place of a RopeTable where attention knows no positions."""

    def rotate(self, x: Tensor, start: int) -> Tensor:
        return x


class KV(NamedTuple):
    """K before RoPE (after k_norm) and V, both [tokens, G, D] float32. A state: row i is position i of the prompt."""

    k: Tensor
    v: Tensor


class Attention:
    """Causal full attention with grouped K/V heads; optional q/k norm (Qwen3), output gate (Qwen3-Next, Qwen3.5) and factor
    on K (Falcon-H1)."""

    def __init__(self, module: Any, rope: Rope) -> None:
        self._m, self._rope = module, rope
        self._d: int = module.head_dim
        self._per_kv: int = module.num_key_value_groups
        self._heads: int = module.o_proj.in_features // self._d
        self._gated: bool = module.q_proj.out_features == 2 * self._heads * self._d
        self._q_norm = getattr(module, "q_norm", None) or nn.Identity()
        self._k_norm = getattr(module, "k_norm", None) or nn.Identity()
        self._k_factor: float = getattr(module, "key_multiplier", 1.0)

    def start(self) -> KV:
        empty = torch.empty(0, self._heads // self._per_kv, self._d)
        return KV(empty, empty)

    def run(self, y: Tensor, state: KV) -> tuple[Tensor, KV, KV]:
        m, n, d = self._m, len(y), self._d
        q, gate = m.q_proj(y).view(n, self._heads, -1).split([d, d * self._gated], dim=-1)
        record = KV(self._k_norm(m.k_proj(y).view(n, -1, d) * self._k_factor), m.v_proj(y).view(n, -1, d))
        state = self.replay(state, record)
        start = len(state.k) - n
        q = self._rope.rotate(self._q_norm(q), start).view(n, -1, self._per_kv, d)
        k = self._rope.rotate(state.k, 0)
        scores = torch.einsum("nghd,mgd->ghnm", q, k) * m.scaling
        future = torch.arange(len(k)) > torch.arange(start, len(k))[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = torch.einsum("ghnm,mgd->nghd", weights, state.v).reshape(n, -1)
        if self._gated:
            out = out * gate.reshape(n, -1).sigmoid()
        return m.o_proj(out), state, record

    def replay(self, state: KV, record: KV) -> KV:
        return KV(torch.cat([state.k, record.k]), torch.cat([state.v, record.v]))


class DeltaTokens(NamedTuple):
    """What the recurrence needs of each token, float32, leading dimension = tokens.

    Attributes:
        raw: inputs of the causal convolution [n, C].
        k: normalised keys, repeated to the value heads [n, Hv, dk].
        v: values [n, Hv, dv].
        g: log decay [n, Hv], <= 0.
        beta: write strength [n, Hv].
    """

    raw: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class DeltaState(NamedTuple):
    """h [Hv, dk, dv] (the paper's layout, not SGLang's) and the conv window [W-1, C], oldest input first; float32."""

    h: Tensor
    window: Tensor


def delta_rule(h: Tensor, t: DeltaTokens, q: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, token by token: h <- e^g h, then h <- h + k (beta (v - h^T k))^T, then read o = h^T q.

    Args:
        h: state before the tokens [Hv, dk, dv]; not written to.
        t: the tokens.
        q: queries [n, Hv, dk], or None when the outputs are not wanted.
    Returns:
        the state after the last token, and the outputs [n, Hv, dv] or None.
    """
    h = h.clone()
    outputs = []
    k_row, beta_v = t.k.unsqueeze(-2), t.beta[:, :, None, None]
    for i, decay in enumerate(t.g.exp()[:, :, None, None]):
        h.mul_(decay)
        delta = (t.v[i].unsqueeze(-2) - k_row[i] @ h) * beta_v[i]
        h.baddbmm_(t.k[i].unsqueeze(-1), delta)
        if q is not None:
            outputs.append(q[i].unsqueeze(-2) @ h)
    return h, torch.stack(outputs).squeeze(-2) if q is not None else None


class DeltaNet:
    """Gated delta net with its causal convolution, as in Qwen3.5 (separate q/k/v, z, b and a projections)."""

    def __init__(self, module: Any) -> None:
        self._m = module
        self._taps: Tensor = module.conv1d.weight[:, 0].T  # [W, C]; the last tap weighs the token itself

    def start(self) -> DeltaState:
        m, (w, c) = self._m, self._taps.shape
        return DeltaState(torch.zeros(m.num_v_heads, m.head_k_dim, m.head_v_dim), torch.zeros(w - 1, c))

    def run(self, y: Tensor, state: DeltaState) -> tuple[Tensor, DeltaState, DeltaTokens]:
        m, n = self._m, len(y)
        raw, z, b, a = self._project(y)
        inputs = torch.cat([state.window, raw])
        mixed = F.silu(sum(inputs[j : j + n] * tap for j, tap in enumerate(self._taps)))
        q, k, v = torch.split(mixed, [m.key_dim, m.key_dim, m.value_dim], dim=-1)
        q, k = (self._unit_keys(t) for t in (q, k))
        g = -m.A_log.exp() * F.softplus(a + m.dt_bias)
        record = DeltaTokens(raw, k, v.reshape(n, -1, m.head_v_dim), g, b.sigmoid())
        h, out = delta_rule(state.h, record, q * m.head_k_dim**-0.5)
        assert out is not None
        out = m.norm(out.reshape(-1, m.head_v_dim), z.reshape(-1, m.head_v_dim)).reshape(n, -1)
        return m.out_proj(out), DeltaState(h, self._window(state, raw)), record

    def replay(self, state: DeltaState, record: DeltaTokens) -> DeltaState:
        h, _ = delta_rule(state.h, record)
        return DeltaState(h, self._window(state, record.raw))

    def _window(self, state: DeltaState, raw: Tensor) -> Tensor:
        """The last W-1 conv inputs [W-1, C]: those of ``raw``, completed from the running window if there are fewer."""
        inputs = torch.cat([state.window, raw])
        return inputs[len(inputs) - len(state.window) :]

    def _unit_keys(self, x: Tensor) -> Tensor:
        """[n, Hk * dk] -> [n, Hv, dk] of unit length, each key head repeated for its value heads."""
        x = x.view(len(x), -1, self._m.head_k_dim)
        x = x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        return x.repeat_interleave(self._m.num_v_heads // self._m.num_k_heads, dim=1)

    def _project(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``y`` [n, d] -> conv inputs [n, C], output gate z [n, Hv * dv], b and a [n, Hv]."""
        m = self._m
        return m.in_proj_qkv(y), m.in_proj_z(y), m.in_proj_b(y), m.in_proj_a(y)


class FusedDeltaNet(DeltaNet):
    """The same with Qwen3-Next's two fused projections, whose rows are grouped by key head."""

    def _project(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m, n = self._m, len(y)
        ratio = m.num_v_heads // m.num_k_heads
        qkvz = m.in_proj_qkvz(y).view(n, m.num_k_heads, -1)
        sizes = [m.head_k_dim, m.head_k_dim, ratio * m.head_v_dim, ratio * m.head_v_dim]
        q, k, v, z = (t.reshape(n, -1) for t in qkvz.split(sizes, dim=-1))
        b, a = (t.reshape(n, -1) for t in m.in_proj_ba(y).view(n, m.num_k_heads, -1).split(ratio, dim=-1))
        return torch.cat([q, k, v], dim=-1), z, b, a


def mixer_of(layer: Any, rope: Rope) -> Mixer[Any, Any]:
    """The mixer of one Hugging Face decoder layer. Raises NotImplementedError for a kind the oracle does not know."""
    if hasattr(layer, "self_attn"):
        if getattr(layer.self_attn, "sliding_window", None) is not None:
            raise NotImplementedError("sliding-window attention: the oracle only knows full attention")
        if hasattr(layer.self_attn, "kv_lora_rank"):
            return LatentAttention(layer.self_attn, rope)
        return Attention(layer.self_attn, rope)
    if hasattr(layer, "linear_attn"):
        return (FusedDeltaNet if hasattr(layer.linear_attn, "in_proj_qkvz") else DeltaNet)(layer.linear_attn)
    raise NotImplementedError(f"{type(layer).__name__} has neither self_attn nor linear_attn")
