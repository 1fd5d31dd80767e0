"""State-space duality: one run of a scalar-decay recurrence as a few matrix products (plain torch).

With the state h as [V, K] and one decay per head and token, h_t = e^{g_t} h_{t-1} + v_t k_t^T and o_t = h_t q_t. With G
the running sum of g inside the run,

    o = tril(e^{G_t - G_s} q k^T) v + e^{G} q h^T,     h_end = e^{G_n} h + v^T (e^{G_n - G} k)

Mamba-2 (arXiv 2405.21060): q = C, k = B, v = dt x, g = dt A.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ssd(q: Tensor, k: Tensor, v: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """q, k [n, H, K], v [n, H, V], g [n, H] <= 0, h [H, V, K]: outputs [n, H, V] and the state after the run.

    The work is quadratic in n: cut long runs. G is summed in float64: a head that forgets fast has sums of hundreds, whose
    differences would lose what its own last tokens need.
    """
    q, k, v, total = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), g.t().double().cumsum(-1)
    future = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=g.device).triu(1)
    between = (total[:, :, None] - total[:, None, :]).masked_fill(future, -torch.inf).exp().to(v.dtype)
    to_end = (total[:, -1:] - total).exp().to(v.dtype)
    total = total.exp().to(v.dtype)
    o = (q @ k.mT * between) @ v + total[..., None] * (q @ h.mT)
    return o.transpose(0, 1), total[:, -1, None, None] * h + v.mT @ (to_end[..., None] * k)
