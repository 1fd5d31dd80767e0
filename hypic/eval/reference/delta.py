"""The gated delta rule of one sequence, by chunks: everything within a chunk at once, a product of matrices per chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h <- e^g h; h <- h + k (beta (v - h^T k))^T; o = h^T q K^-1/2, token by token, in float32.

    Args:
        q, k: [n, H, K], k of unit length. v: [n, H, V].
        g, beta: [n, H], log decay and write strength.
        h: the state before the first token [H, K, V]; zeros if None.
    Returns:
        the state after the last token, and o [n, H, V].
    """
    n, heads, dk = k.shape
    size = min(CHUNK, n)
    count = -(-n // size)

    def chunks(x: Tensor) -> Tensor:  # [n, H, ...] -> [count, H, size, ...]; padding neither decays nor writes
        x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, count * size - n))
        return x.unflatten(0, (count, size)).transpose(1, 2)

    q, k, v, g, beta = chunks(q) * dk**-0.5, chunks(k), chunks(v), chunks(g).cumsum(-1), chunks(beta)[..., None]
    upto, rest = g.exp()[..., None], (g[..., -1:] - g).exp()[..., None]
    past = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~past, -torch.inf).exp()
    # What token i writes is u_i = beta_i (v_i - sum of what earlier ones wrote along k_i - what the state holds along k_i).
    system = (beta * (k @ k.mT) * decay).tril(-1) + torch.eye(size, device=k.device)
    both = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * upto * k], dim=-1), upper=False, unitriangular=True
    )
    fresh, of_state = both.split([v.shape[-1], dk], dim=-1)
    read, inside, out_keys = q * upto, (q @ k.mT) * decay, (k * rest).mT
    state = k.new_zeros(heads, dk, v.shape[-1]) if h is None else h
    outputs = []
    for i in range(count):
        written = fresh[i] - of_state[i] @ state
        outputs.append(read[i] @ state + inside[i] @ written)
        state = upto[i, :, -1:] * state + out_keys[i] @ written
    return state, torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:n]
