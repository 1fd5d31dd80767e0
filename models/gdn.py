"""The gated delta rule in chunks, in plain torch with few launches, for training.

fla's backward kernel is wrong on Hopper GPUs with Triton 3.4 to 3.7.0 (it refuses to run there), so this one uses batched
matrix products only. Within a chunk everything is parallel; a chunk acts on the state as h <- M h + S, and those steps
are a loop of one product per chunk (:class:`_Scan`), with a loop of its own for the gradient.

Layout [key, value] as in the paper. Shapes: B sequences of T tokens, H value heads, K and V head sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h <- e^g h; h <- h + k (beta (v - h^T k))^T; o = h^T q K^-1/2, token by token, computed by chunks in float32.

    Args:
        q, k: [B, T, H, K], unit length.
        v: [B, T, H, V].
        g, beta: [B, T, H], log decay and write strength.
        state: h before the first token [B, H, K, V]; zeros if None.
    Returns:
        o [B, T, H, V] and h after the last token.
    """
    with torch.autocast(k.device.type, enabled=False):
        return _by_chunks(q, k, v, g, beta, state)


def _by_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    b, t, h, dk = k.shape
    n = -(-t // CHUNK)

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [N, B * H, CHUNK, ...]
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, n * CHUNK - t))
        x = x.unflatten(1, (n, CHUNK)).movedim(1, 0).movedim(3, 2)
        return x.reshape(n, b * h, CHUNK, *x.shape[4:])

    q, k, v = chunks(q) * dk**-0.5, chunks(k), chunks(v)
    beta, g = chunks(beta)[..., None], chunks(g).cumsum(-1)
    upto, last = g.exp()[..., None], g[..., -1:]
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=k.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~past, -torch.inf).exp()
    k_t = k.mT
    inverse = _UnitInverse.apply((beta * (k @ k_t) * decay).tril(-1))
    u, w = inverse @ (beta * v), inverse @ (beta * upto * k)
    out_t = (k * (last - g).exp()[..., None]).mT
    move = last.exp()[..., None] * torch.eye(dk, device=k.device) - out_t @ w
    start = k.new_zeros(b * h, dk, v.shape[-1]) if state is None else state.float().flatten(0, 1)
    states = _Scan.apply(move, out_t @ u, start)
    before = states[:-1]
    written = u - w @ before
    o = (q * upto) @ before + ((q @ k_t) * decay) @ written
    o = o.unflatten(1, (b, h)).movedim(0, 1).movedim(2, 3)  # [B, N, CHUNK, H, V]
    return o.flatten(1, 2)[:, :t], states[-1].unflatten(0, (b, h))


class _UnitInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular matrices."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
        x = torch.linalg.solve_triangular(a + eye, eye.expand_as(a), upper=False, unitriangular=True)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -(x.mT @ grads[0] @ x.mT)


class _Scan(torch.autograd.Function):
    """States before, between and after steps h <- M h + S: [N, X, K, K], [N, X, K, V], [X, K, V] -> [N + 1, X, K, V]."""

    @staticmethod
    def forward(ctx: Any, move: Tensor, add: Tensor, start: Tensor) -> Tensor:
        states = torch.empty(len(move) + 1, *start.shape, device=start.device, dtype=start.dtype)
        states[0] = start
        for i in range(len(move)):
            torch.baddbmm(add[i], move[i], states[i], out=states[i + 1])
        ctx.save_for_backward(move, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        move, states = ctx.saved_tensors
        total = grads[0].clone()
        move_t = move.mT
        for i in range(len(move) - 1, -1, -1):
            total[i].baddbmm_(move_t[i], total[i + 1])
        return total[1:] @ states[:-1].mT, total[1:], total[0]
