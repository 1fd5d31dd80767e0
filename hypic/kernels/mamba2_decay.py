"""Transition operators of compiled interiors of one Mamba2 layer: a number per head.

The operator of an interior is e^g, g the sum of its tokens' log decays. What is stored is g, in fp32: e^g of a long
interior is 0 in any float type, while g still adds up when a segment takes several forward passes. The sum of n terms of
one sign is off by at most n u |g| (u = 2^-24, token by token; blocks make it less), so e^g is off by n u |g| e^g <= n u / e
of the state that it multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl
from hypic.kernels._triton import block, jit, require_triton, tl
from hypic.kernels.gdn_transition import TransitionPlan
from hypic.kernels.mamba2_layer import Mamba2Layer


def mamba2_log_decay(
    dt: Tensor,
    *,
    layer: Mamba2Layer,
    arena: Tensor,
    t_off: int,
    plan: TransitionPlan,
    impl: Impl | None = None,
) -> None:
    """Write the log decay of every interior of the plan, or add to it where a segment goes on.

    Args:
        dt: [T, H], as projected. arena: uint8 [bytes]. t_off: of this layer's log decays [H], fp32, inside a blob.
    """
    if pick_impl(impl, dt) == "triton":
        _log_decay_triton(dt, layer, arena, t_off, plan)
        return
    starts = plan.tok.tolist() if plan.lists.blob else []
    for i, (blob, first) in enumerate(zip(plan.lists.blob, plan.lists.first, strict=True)):
        length = plan.lists.cu[i + 1] - plan.lists.cu[i]
        total = layer.steps(dt[starts[i] : starts[i] + length])[1].sum(0)
        stored = blob_view(arena, blob + t_off, (layer.heads,), torch.float32)
        stored.copy_(total if first else stored + total)


def _log_decay_triton(dt: Tensor, layer: Mamba2Layer, arena: Tensor, t_off: int, plan: TransitionPlan) -> None:
    require_triton(dt)
    interiors, heads = len(plan.blob), min(block(layer.heads), 16)
    if interiors == 0:
        return
    _log_decay_kernel[(interiors, -(-layer.heads // heads))](
        dt, layer.A, layer.dt_bias, arena, plan.tok, plan.cu, plan.blob, plan.first, dt.stride(0), t_off // 4,
        H=layer.heads, BH=heads, BM=64, num_warps=4,
    )  # fmt: skip


@jit
def _log_decay_kernel(
    dt,
    A,
    dt_bias,
    arena,
    toks,
    cu,
    blobs,
    firsts,
    dt_stride,
    t_off,
    H: tl.constexpr,
    BH: tl.constexpr,
    BM: tl.constexpr,
):
    """One program: BH heads of one interior."""
    i, head = tl.program_id(0), tl.program_id(1) * BH + tl.arange(0, BH)
    ok_h = head < H
    bias = tl.load(dt_bias + head, mask=ok_h, other=0.0).to(tl.float32)
    first_token, length = tl.load(toks + i), tl.load(cu + i + 1) - tl.load(cu + i)
    steps = tl.zeros([BH], dtype=tl.float32)
    for start in range(0, length, BM):
        m = start + tl.arange(0, BM)
        ok = (m < length)[:, None] & ok_h[None, :]
        at = dt + (first_token + m[:, None]) * dt_stride + head[None, :]
        pre = tl.load(at, mask=ok, other=0.0).to(tl.float32) + bias[None, :]
        step = tl.where(pre > 20.0, pre, tl.log(1.0 + tl.exp(tl.minimum(pre, 20.0))))
        steps += tl.sum(tl.where(ok, step, 0.0), 0)
    log_decay = steps * tl.load(A + head, mask=ok_h, other=0.0).to(tl.float32)
    stored = arena.to(tl.pointer_type(tl.float32)) + tl.load(blobs + i) // 4 + t_off + head
    log_decay += tl.load(stored, mask=ok_h & (tl.load(firsts + i) == 0), other=0.0)
    tl.store(stored, log_decay, mask=ok_h)
