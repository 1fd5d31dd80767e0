"""Token by token: the readable truth for every family. Slow on purpose; any dtype, tests use float64.

Shapes: n tokens, H heads (already repeated for grouped ones); q, k [n, H, K], v [n, H, V], state h [H, V, K].
Gates are logarithms of the decay, <= 0. Queries come scaled, keys normalised. Each function returns the outputs
[n, H, V] and the state after the last token, and leaves its arguments alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _outer(v: Tensor, k: Tensor) -> Tensor:
    """[H, V], [H, K] -> [H, V, K]."""
    return v[:, :, None] * k[:, None, :]


def _read(h: Tensor, q: Tensor) -> Tensor:
    """[H, V, K], [H, K] -> [H, V]."""
    return (h @ q[:, :, None])[..., 0]


def retention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """RetNet (arXiv 2307.08621) and Lightning attention (2401.04658): one constant log decay [H] per head."""
    out = torch.empty_like(v)
    for t in range(len(k)):
        h = h * decay.exp()[:, None, None] + _outer(v[t], k[t])
        out[t] = _read(h, q[t])
    return out, h


def mamba2(c: Tensor, b: Tensor, x: Tensor, dt: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba-2 (arXiv 2405.21060). c, b [n, H, K] are query and key, x [n, H, V] the value, dt [n, H], a [H] < 0."""
    out = torch.empty_like(x)
    for t in range(len(b)):
        h = h * (dt[t] * a).exp()[:, None, None] + _outer(dt[t][:, None] * x[t], b[t])
        out[t] = _read(h, c[t])
    return out, h


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Gated linear attention (arXiv 2312.06635): g [n, H, K], one log decay per key channel."""
    out = torch.empty_like(v)
    for t in range(len(k)):
        h = h * g[t].exp()[:, None, :] + _outer(v[t], k[t])
        out[t] = _read(h, q[t])
    return out, h


def delta_net(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """DeltaNet (arXiv 2406.06484): overwrite what the state holds under k; beta [n, H]."""
    return gated_delta_net(q, k, v, torch.zeros_like(beta), beta, h)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet (arXiv 2412.06464; Qwen3-Next, Qwen3.5): g, beta [n, H]."""
    return kimi_delta(q, k, v, g[..., None].expand(*g.shape, k.shape[-1]), beta, h)


def kimi_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Kimi delta attention (arXiv 2510.26692): gated delta rule with a log decay per key channel, g [n, H, K]."""
    out = torch.empty_like(v)
    for t in range(len(k)):
        h = h * g[t].exp()[:, None, :]
        correction = beta[t][:, None] * (v[t] - _read(h, k[t]))
        h = h + _outer(correction, k[t])
        out[t] = _read(h, q[t])
    return out, h


def rwkv7(r: Tensor, g: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """RWKV-7 (arXiv 2503.14456): decay g, removal key kk (normalised) and in-context rate a, all [n, H, K]."""
    out = torch.empty_like(v)
    for t in range(len(k)):
        removed = _outer(_read(h, kk[t]), a[t] * kk[t])
        h = h * g[t].exp()[:, None, :] - removed + _outer(v[t], k[t])
        out[t] = _read(h, r[t])
    return out, h
