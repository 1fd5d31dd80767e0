"""The seam chain of one Lightning (SegLA) layer: runs and artifacts of every request of a batch, in natural order.

As mamba2_chain without a convolution: h <- e^-slope h + k v^T, read as scale q h, with one constant slope per head. SGLang
keeps these states as [key, value]. Keys carry RoPE: an artifact compiled at positions 0, 1, ... holds sums of R(j) k_j v_j^T,
and where its segment stands ``shift`` tokens further on every key needs R(shift) more, the same for all. So S is turned as
a whole along its key axis: h <- e^(-slope n) h + R(shift) S.

What that costs: the model's table rounds each angle to fp32, so its rotations compose only up to about 2^-24 times the angle;
4e-6 of S at position 100, 2e-4 at 4,000, 4e-3 (what bf16 loses) at 100,000. Relocated K is free of it, being turned token
by token; a sum of keys cannot be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl
from hypic.kernels._triton import block, jit, require_triton, tl, triton_dtype
from hypic.kernels.chain_plans import NO_ARTIFACT, ChainPlan
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.relocate import rotate
from hypic.kernels.ssd import ssd


class KeyRotation(NamedTuple):
    """RoPE of keys, half-split pairs.

    Attributes:
        table: [positions, dim] = [cos | sin], as SGLang has it. dim: how many leading key channels rotate.
        scale: factor that yarn multiplies into cos and sin; S holds it once already.
    """

    table: Tensor
    dim: int
    scale: float

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, H, K] at those positions, as the model rotates q and k."""
        cos, sin = (t[:, None] for t in self.table[positions].float().chunk(2, -1))
        x1, x2 = x[..., : self.dim].chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., self.dim :]], -1)

    def turn(self, s: Tensor, shift: int) -> Tensor:
        """S [H, K, V], every key moved by shift."""
        keys = s.mT.reshape(1, -1, s.shape[1])
        return rotate(keys, 0, shift, self.table, self.dim, True, self.scale).view(s.mT.shape).mT


class LightningLayer(NamedTuple):
    """One layer as a rank has it. slope: [H] fp32, > 0. scale: of q. rotation: None where the model rotates no keys."""

    slope: Tensor
    scale: float
    rotation: KeyRotation | None


def lightning_log_decay(layer: LightningLayer, *, arena: Tensor, t_off: int, plan: TransitionPlan) -> None:
    """Write the log decay -slope n of every interior of n tokens, [H] in fp32, or add to it where a segment goes on."""
    if not len(plan.blob):
        return
    heads = torch.arange(len(layer.slope), device=arena.device)
    at = (plan.blob + t_off)[:, None] // 4 + heads
    stored = arena.view(torch.float32)
    before = stored[at].masked_fill((plan.first != 0)[:, None], 0.0)
    stored[at] = before - plan.cu.diff()[:, None] * layer.slope


def lightning_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: LightningLayer,
    state_pool: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: ChainPlan,
    out: Tensor,
    state_dtype: torch.dtype = torch.float32,
    impl: Impl | None = None,
) -> None:
    """Run every row of the plan through its items; write outputs of run tokens and the rows' end states.

    One launch, a program for each (row, head, block of V). Budget (one row, 16 artifacts, H = 16, K = V = 128, fp32):
    16 MiB of S read once, 4 us at 4.3 TB/s; the chain must stay launch-bound.

    Args:
        q, k: [T, H, K] of the whole flattened batch, rotated at natural positions; v: [T, H, V]. Any float type.
        state_pool: [slots, H, K, V], fp32 or bf16.
        arena: uint8 [bytes]. t_off, s_off: byte offsets inside a blob of this layer's log decay [H] in fp32 and of
            S [H, K, V] in state_dtype (fp32 or bf16).
        out: [T, H, V]; only the rows of run tokens are written.
    Arithmetic is fp32; the state is rounded once, when it goes back to the pool.

    Raises: ValueError if shapes disagree.
    """
    heads, dk, dv = len(layer.slope), k.shape[2], v.shape[2]
    if tuple(state_pool.shape[1:]) != (heads, dk, dv):
        raise ValueError(f"state_pool {tuple(state_pool.shape)} is not [slots, {heads}, {dk}, {dv}]")
    if layer.rotation is not None and not layer.rotation.dim == layer.rotation.table.shape[1] <= dk:
        raise ValueError(f"table {tuple(layer.rotation.table.shape)} rotates {layer.rotation.dim} of {dk} channels")
    run = _chain_triton if pick_impl(impl, q) == "triton" else _chain_torch
    run(layer, q, k, v, state_pool, arena, t_off, s_off, plan, out, state_dtype)


def _chain_torch(
    layer: LightningLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: ChainPlan,
    out: Tensor,
    state_dtype: torch.dtype,
) -> None:
    states = state_pool[plan.slot].float()
    for r, (row, fresh) in enumerate(zip(plan.lists.rows, plan.lists.fresh, strict=True)):
        h = torch.zeros_like(states[r]) if fresh else states[r]
        for item in row:
            if item.length:
                t = slice(item.tok, item.tok + item.length)
                log_decay = -layer.slope.expand(item.length, -1)
                o, end = ssd(q[t].float() * layer.scale, k[t].float(), v[t].float(), log_decay, h.mT)
                out[t], h = o.to(out.dtype), end.mT
            if item.art != NO_ARTIFACT:
                decay = blob_view(arena, item.art + t_off, (len(layer.slope),), torch.float32).exp()
                s = blob_view(arena, item.art + s_off, h.shape, state_dtype).float()
                h = decay[:, None, None] * h + (s if layer.rotation is None else layer.rotation.turn(s, item.shift))
        states[r] = h
    state_pool[plan.slot] = states.to(state_pool.dtype)


def _chain_triton(
    layer: LightningLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state_pool: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: ChainPlan,
    out: Tensor,
    state_dtype: torch.dtype,
) -> None:
    require_triton(q)
    rows, (heads, dk, dv) = len(plan.slot), state_pool.shape[1:]
    inner = {"q": (q, dk), "k": (k, dk), "v": (v, dv), "out": (out, dv)}
    if strided := [name for name, (x, d) in inner.items() if x.stride()[1:] != (d, 1)]:
        raise ValueError(f"tokens of {', '.join(strided)} must be contiguous")
    if state_pool.stride()[1:] != (dk * dv, dv, 1):
        raise ValueError(f"slots of state_pool {state_pool.stride()} must be contiguous")
    table = layer.slope if layer.rotation is None else layer.rotation.table
    if layer.rotation is not None and table.stride() != (layer.rotation.dim, 1):
        raise ValueError(f"table {table.stride()} must be contiguous")
    if rows == 0:
        return
    bv = min(block(dv), 32)
    _lightning_chain_kernel[(-(-dv // bv), rows * heads)](
        q,
        k,
        v,
        layer.slope,
        table,
        state_pool,
        arena,
        out,
        plan.row_ptr,
        plan.slot,
        plan.fresh,
        plan.item_tok,
        plan.item_len,
        plan.item_art,
        plan.item_shift,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        state_pool.stride(0),
        t_off // 4,
        s_off // state_dtype.itemsize,
        layer.scale,
        1.0 if layer.rotation is None else 1.0 / layer.rotation.scale,
        H=heads,
        DK=dk,
        DV=dv,
        ROTARY=0 if layer.rotation is None else layer.rotation.dim,
        STATE=triton_dtype(state_dtype),
        STATE_BYTES=state_dtype.itemsize,
        BK=block(dk),
        BV=bv,
        num_warps=4,
    )


@jit
def _lightning_chain_kernel(
    q,
    k,
    v,
    slopes,
    table,
    state_pool,
    arena,
    out,
    row_ptr,
    slots,
    fresh,
    item_tok,
    item_len,
    item_art,
    item_shift,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    state_stride,
    t_off,
    s_off,
    scale,
    inv_table_scale,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ROTARY: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BYTES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program: BV columns of the state of one head of one batch row, through all items."""
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    dk, dv = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    ok_k, ok_v = dk < DK, dv < DV
    ok_h = ok_k[:, None] & ok_v[None, :]
    state = state_pool + tl.load(slots + row) * state_stride + (head * DK + dk[:, None]) * DV + dv[None, :]
    log_decays = arena.to(tl.pointer_type(tl.float32)) + t_off + head
    s_head = arena.to(tl.pointer_type(STATE)) + s_off + head * DK * DV + dv[None, :]
    decay = tl.exp(-tl.load(slopes + head).to(tl.float32))

    h = tl.load(state, mask=ok_h & (tl.load(fresh + row) == 0), other=0.0).to(tl.float32)
    for item in range(tl.load(row_ptr + row), tl.load(row_ptr + row + 1)):
        token = tl.load(item_tok + item)
        for t in range(token, token + tl.load(item_len + item)):
            q_t = tl.load(q + t * q_stride + head * DK + dk, mask=ok_k, other=0.0).to(tl.float32) * scale
            k_t = tl.load(k + t * k_stride + head * DK + dk, mask=ok_k, other=0.0).to(tl.float32)
            v_t = tl.load(v + t * v_stride + head * DV + dv, mask=ok_v, other=0.0).to(tl.float32)
            h = decay * h + k_t[:, None] * v_t[None, :]
            o = tl.sum(h * q_t[:, None], 0)
            tl.store(out + t * out_stride + head * DV + dv, o.to(out.dtype.element_ty), mask=ok_v)
        artifact = tl.load(item_art + item)
        if artifact >= 0:
            s_at = s_head + artifact // STATE_BYTES
            s = tl.load(s_at + dk[:, None] * DV, mask=ok_h, other=0.0).to(tl.float32)
            if ROTARY > 0:
                half: tl.constexpr = ROTARY // 2
                turns = dk < ROTARY
                angle = table + tl.load(item_shift + item) * ROTARY + dk % half
                cos = tl.load(angle, mask=turns, other=0.0).to(tl.float32) * inv_table_scale
                sin = tl.load(angle + half, mask=turns, other=0.0).to(tl.float32) * inv_table_scale
                cos, sin = tl.where(turns, cos, 1.0), tl.where(dk < half, -sin, sin)
                partner = tl.where(dk < half, dk + half, dk - half)[:, None] * DV
                other = tl.load(s_at + partner, mask=ok_h & turns[:, None], other=0.0).to(tl.float32)
                s = cos[:, None] * s + sin[:, None] * other
            h = tl.exp(tl.load(log_decays + artifact // 4)) * h + s
    tl.store(state, h.to(state_pool.dtype.element_ty), mask=ok_h)
