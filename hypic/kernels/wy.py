"""Chunk math of the gated delta rule (UT transform), batched over any leading dimensions.

With the state h as [V, K] and alpha_t = exp(g_t), one token does

    h_t = h_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T.

alpha_t is one number per head in Gated DeltaNet, and a diagonal (one per key channel) in Kimi delta attention. Over a
chunk of C tokens that starts from h, with G the running sum of g inside the chunk and D_tsd = exp(G_td - G_sd):

    (I + L) written = beta (v - (exp(G) k) h^T),   L = tril(beta_t sum_d D_tsd k_td k_sd, -1)
    h_end = h exp(G_C) + written^T k_end,          k_end = exp(G_C - G) k
    o = (exp(G) q) h^T + tril(sum_d D_tsd q_td k_sd) written

L does not depend on h, and each row of h moves on its own. That is why the transition operator T is a state too: rows
of an identity that meet no values.
Sources: Gated DeltaNet, arXiv 2412.06464; DeltaNet, arXiv 2406.06484; Kimi Linear, arXiv 2510.26692.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64


class Chunk(NamedTuple):
    """One chunk of C tokens, without the state. Leading dimensions (sequences, heads) are free.

    Attributes:
        k: [..., C, K]. beta: [..., C]. log_decay: [..., C, 1 or K], G. lower: [..., C, C], L.
        between: [..., C, C, 1 or K], D (0 above the diagonal).
    """

    k: Tensor
    beta: Tensor
    log_decay: Tensor
    between: Tensor
    lower: Tensor

    @classmethod
    def of(cls, k: Tensor, g: Tensor, beta: Tensor) -> Chunk:
        """k [..., C, K] normalised; g [..., C] or [..., C, K]; beta [..., C]. A token with g = beta = 0 changes nothing."""
        log_decay = (g if g.dim() == k.dim() else g[..., None]).cumsum(-2)
        gap = log_decay[..., :, None, :] - log_decay[..., None, :, :]
        future = torch.ones(gap.shape[-3:-1], dtype=torch.bool, device=gap.device).triu(1)
        between = gap.masked_fill(future[..., None], float("-inf")).exp()  # masked first: the future would overflow
        lower = decayed_products(beta[..., None] * k, k, between).tril(-1)
        return cls(k, beta, log_decay, between, lower)

    def read(self, x: Tensor, rows: Tensor) -> Tensor:
        """What x [..., C, K] finds in the state rows [..., R, K] that the chunk starts from: [..., C, R]."""
        return (x * self.log_decay.exp()) @ rows.transpose(-1, -2)

    def advance(self, rows: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """State rows [..., R, K] that meet values v [..., C, R] -> (rows at the end, what was written [..., C, R])."""
        rhs = self.beta[..., None] * (v - self.read(self.k, rows))
        written = torch.linalg.solve_triangular(self.lower, rhs, upper=False, unitriangular=True)
        end = self.log_decay[..., -1:, :]
        k_end = self.k * (end - self.log_decay).exp()
        return rows * end.exp() + written.transpose(-1, -2) @ k_end, written


def decayed_products(x: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """sum_d D_tsd x_td k_sd, [..., C, C]."""
    if between.shape[-1] == 1:
        return x @ k.transpose(-1, -2) * between[..., 0]
    return (x[..., :, None, :] * k[..., None, :, :] * between).sum(-1)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and end state of a run.

    Args:
        q, k: [H, n, K], normalised, q scaled. v: [H, n, V]. g: [H, n] or [H, n, K]. beta: [H, n]. h: [H, V, K].
    Returns: o [H, n, V] and the state after the last token. n may be 0.
    """
    outputs = []
    for start in range(0, k.shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        chunk, q_c = Chunk.of(k[:, part], g[:, part], beta[:, part]), q[:, part]
        from_start = chunk.read(q_c, h)
        h, written = chunk.advance(h, v[:, part])
        outputs.append(from_start + decayed_products(q_c, chunk.k, chunk.between) @ written)
    return (torch.cat(outputs, 1) if outputs else torch.empty_like(v)), h
