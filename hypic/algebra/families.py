"""One token of each family as a transition: leading dimensions [n, H], ready for ``fold`` or any split of it.

Arguments as in naive.py. docs/SEMANTICS.md: T <- T A_t with A_t = alpha_t (I - beta_t k_t k_t^T) for the delta rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.algebra.monoid import DenseTransition, DiagonalTransition, ScalarTransition


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x[..., :, None] * y[..., None, :]


def retention(k: Tensor, v: Tensor, decay: Tensor) -> ScalarTransition:
    """RetNet, Lightning attention: constant log decay [H]."""
    return ScalarTransition(decay.exp().expand(k.shape[:2]), _outer(v, k))


def mamba2(b: Tensor, x: Tensor, dt: Tensor, a: Tensor) -> ScalarTransition:
    """Mamba-2: key b [n, H, K], value x [n, H, V], dt [n, H], a [H]."""
    return ScalarTransition((dt * a).exp(), _outer(dt[..., None] * x, b))


def gla(k: Tensor, v: Tensor, g: Tensor) -> DiagonalTransition:
    """Gated linear attention: g [n, H, K]."""
    return DiagonalTransition(g.exp(), _outer(v, k))


def kimi_delta(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> DenseTransition:
    """Kimi delta attention: diag(alpha) (I - beta k k^T), g [n, H, K], beta [n, H]."""
    k_beta = k * beta[..., None]
    return DenseTransition(torch.diag_embed(g.exp()) - _outer(g.exp() * k_beta, k), _outer(v, k_beta))


def gated_delta_net(k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> DenseTransition:
    """Gated DeltaNet: alpha (I - beta k k^T), g and beta [n, H]."""
    return kimi_delta(k, v, g[..., None].expand(k.shape), beta)


def delta_net(k: Tensor, v: Tensor, beta: Tensor) -> DenseTransition:
    """DeltaNet: I - beta k k^T, beta [n, H]."""
    return kimi_delta(k, v, torch.zeros_like(k), beta)


def rwkv7(g: Tensor, k: Tensor, v: Tensor, kk: Tensor, a: Tensor) -> DenseTransition:
    """RWKV-7: diag(alpha) - kk (a kk)^T, a diagonal plus a rank-one matrix that is not symmetric."""
    return DenseTransition(torch.diag_embed(g.exp()) - _outer(kk, a * kk), _outer(v, k))
