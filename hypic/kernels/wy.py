"""Chunk math of the gated delta rule (UT/WY transform), batched over any leading dimensions.

With the state h as [V, K] and alpha_t = exp(g_t), one token does

    h_t = alpha_t h_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

Over a chunk that starts from h, with G the running sum of g inside the chunk, the update is rank C:

    h_end = exp(G_C) h + (u - w h^T)^T k_end,     o = exp(G) q h^T + tril(q k^T * D) (u - w h^T)
    (I + tril(beta D * k k^T, -1)) [u | w] = [beta v | beta exp(G) k],   D_ts = exp(G_t - G_s)

so u and w do not depend on h: all chunks get theirs at once, and each row of h moves on its own. That is why the
transition operator T (rows: an identity that meets no values) and the zero-start end-state S come out of one pass.
Sources: Gated DeltaNet, arXiv 2412.06464; DeltaNet, arXiv 2406.06484.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class WY(NamedTuple):
    """One chunk of C tokens, without the state. Leading dimensions (sequences, heads) are free.

    Attributes:
        u: [..., C, V] what the tokens write into a zero state.
        w: [..., C, K] what they read from the state the chunk starts from.
        k_end: [..., C, K] keys, decayed from their token to the end of the chunk.
        log_decay: [..., C] running sum of g inside the chunk.
    """

    u: Tensor
    w: Tensor
    k_end: Tensor
    log_decay: Tensor


def _decay_between(log_decay: Tensor) -> Tensor:
    """[..., C] -> [..., C, C]: exp(G_t - G_s) for s <= t, else 0. Masked before exp, so nothing overflows."""
    gap = log_decay[..., :, None] - log_decay[..., None, :]
    future = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).triu(1)
    return gap.masked_fill(future, float("-inf")).exp()


def wy_transform(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> WY:
    """k [..., C, K] normalised, v [..., C, V], g and beta [..., C]; a token with beta = g = 0 changes nothing."""
    log_decay = g.cumsum(-1)
    k_beta = k * beta[..., None]
    lower = (k_beta @ k.transpose(-1, -2) * _decay_between(log_decay)).tril(-1)
    rhs = torch.cat([v * beta[..., None], k_beta * log_decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(lower, rhs, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    k_end = k * (log_decay[..., -1:] - log_decay).exp()[..., None]
    return WY(u, w, k_end, log_decay)


def advance_rows(chunk: WY, rows: Tensor, u: Tensor) -> Tensor:
    """Move state rows [..., R, K] over the chunk. ``u`` [..., C, R]: what the tokens write into each row."""
    written = u - chunk.w @ rows.transpose(-1, -2)
    return rows * chunk.log_decay[..., -1].exp()[..., None, None] + written.transpose(-1, -2) @ chunk.k_end


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and end state of a run.

    Args:
        q, k: [H, n, K], normalised, q scaled. v: [H, n, V]. g, beta: [H, n]. h: [H, V, K].
    Returns: o [H, n, V] and the state after the last token. n may be 0.
    """
    outputs = []
    for start in range(0, k.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        q_c, k_c = q[:, part], k[:, part]
        chunk = wy_transform(k_c, v[:, part], g[:, part], beta[:, part])
        written = chunk.u - chunk.w @ h.transpose(-1, -2)
        scores = q_c @ k_c.transpose(-1, -2) * _decay_between(chunk.log_decay)
        outputs.append((q_c * chunk.log_decay.exp()[..., None]) @ h.transpose(-1, -2) + scores @ written)
        h = advance_rows(chunk, h, chunk.u)
    return (torch.cat(outputs, 1) if outputs else torch.empty_like(v)), h
