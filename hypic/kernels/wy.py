"""Chunk math of the gated delta rule (UT transform), batched over any leading dimensions.

With the state h as [V, K] and alpha_t = exp(g_t), one token does

    h_t = alpha_t h_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

Over a chunk of C tokens that starts from h, with G the running sum of g inside the chunk and D_ts = exp(G_t - G_s):

    (I + L) written = beta (v - exp(G) k h^T),     L = tril(beta D * k k^T, -1)
    h_end = exp(G_C) h + written^T k_end,          k_end = exp(G_C - G) k
    o = exp(G) q h^T + tril(D * q k^T) written

L does not depend on h, and each row of h moves on its own. That is why the transition operator T is a state too: rows
of an identity that meet no values.
Sources: Gated DeltaNet, arXiv 2412.06464; DeltaNet, arXiv 2406.06484.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Chunk(NamedTuple):
    """One chunk of C tokens, without the state. Leading dimensions (sequences, heads) are free.

    Attributes:
        k: [..., C, K]. beta: [..., C]. log_decay: [..., C], G. between: [..., C, C], D (0 above the diagonal).
        lower: [..., C, C], L.
    """

    k: Tensor
    beta: Tensor
    log_decay: Tensor
    between: Tensor
    lower: Tensor

    @classmethod
    def of(cls, k: Tensor, g: Tensor, beta: Tensor) -> Chunk:
        """k [..., C, K] normalised; g, beta [..., C]. A token with g = beta = 0 changes nothing."""
        log_decay = g.cumsum(-1)
        gap = log_decay[..., :, None] - log_decay[..., None, :]
        future = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).triu(1)
        between = gap.masked_fill(future, float("-inf")).exp()  # masked first: the future would overflow
        lower = (beta[..., None] * k @ k.transpose(-1, -2) * between).tril(-1)
        return cls(k, beta, log_decay, between, lower)

    def advance(self, rows: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """State rows [..., R, K] that meet values v [..., C, R] -> (rows at the end, what was written [..., C, R])."""
        read = self.log_decay.exp()[..., None] * (self.k @ rows.transpose(-1, -2))
        rhs = self.beta[..., None] * (v - read)
        written = torch.linalg.solve_triangular(self.lower, rhs, upper=False, unitriangular=True)
        end = self.log_decay[..., -1:]
        k_end = self.k * (end - self.log_decay).exp()[..., None]
        return rows * end.exp()[..., None] + written.transpose(-1, -2) @ k_end, written


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and end state of a run.

    Args:
        q, k: [H, n, K], normalised, q scaled. v: [H, n, V]. g, beta: [H, n]. h: [H, V, K].
    Returns: o [H, n, V] and the state after the last token. n may be 0.
    """
    outputs = []
    for start in range(0, k.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        chunk, q_c = Chunk.of(k[:, part], g[:, part], beta[:, part]), q[:, part]
        from_start = chunk.log_decay.exp()[..., None] * (q_c @ h.transpose(-1, -2))
        h, written = chunk.advance(h, v[:, part])
        outputs.append(from_start + (q_c @ chunk.k.transpose(-1, -2) * chunk.between) @ written)
    return (torch.cat(outputs, 1) if outputs else torch.empty_like(v)), h
