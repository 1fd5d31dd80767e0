"""The seam chain of one Mamba2 layer: runs and artifacts of every request of a batch, in natural order.

As gdn_chain, with one decay per head and token. An artifact holds the logarithm of its decay, and h <- decay h + S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl
from hypic.kernels._triton import block, jit, require_triton, tl, triton_dtype
from hypic.kernels.chain_plans import NO_ARTIFACT, ChainPlan
from hypic.kernels.conv_runs import convolve_row_torch, launch_convolve_runs, store_row_window
from hypic.kernels.mamba2_layer import Mamba2Layer
from hypic.kernels.ssd import ssd


def mamba2_chain(
    x: Tensor,
    dt: Tensor,
    *,
    layer: Mamba2Layer,
    conv_pool: Tensor,
    ssm_pool: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    c_off: int,
    plan: ChainPlan,
    out: Tensor,
    state_dtype: torch.dtype = torch.float32,
    impl: Impl | None = None,
) -> None:
    """Run every row of the plan through its items; write outputs of run tokens and the rows' end states.

    Two launches: the convolution of all run tokens in parallel, then one program for each (row, head, block of V) that
    holds its part of the state in registers from the row's first item to its last. Budget (one row, 16 artifacts,
    H = V = 64, K = 128): 32 MiB of S read once, 8 us at 4.3 TB/s; the chain must stay launch-bound.

    Args:
        x: [T, D] projections before the convolution of the whole flattened batch, [x | B | C].
        dt: [T, H], as projected.
        conv_pool: [slots, D, W-1], any float type. ssm_pool: [slots, H, V, K], fp32 or bf16.
        arena: uint8 [bytes]. t_off, s_off, c_off: byte offsets inside a blob of this layer's log decay [H] in fp32,
            S [H, V, K] in state_dtype (fp32 or bf16), and conv tail [D, W-1] in the type of conv_pool.
        out: [T, H, V]; only the rows of run tokens are written: h C + D x, before gate and norm.
    Arithmetic is fp32; the state is rounded once, when it goes back to the pool.

    Raises: ValueError if shapes disagree.
    """
    layer.check(x, dt, conv_pool)
    if tuple(ssm_pool.shape[1:]) != (layer.heads, layer.d_v, layer.d_k):
        raise ValueError(f"ssm_pool {tuple(ssm_pool.shape)} is not [slots, {layer.heads}, {layer.d_v}, {layer.d_k}]")
    run = _mamba2_chain_triton if pick_impl(impl, x) == "triton" else _mamba2_chain_torch
    run(layer, x, dt, conv_pool, ssm_pool, arena, (t_off, s_off, c_off), plan, out, state_dtype)


# ---------------------------------------------------------------- torch reference


def _mamba2_chain_torch(
    layer: Mamba2Layer,
    x: Tensor,
    dt: Tensor,
    conv_pool: Tensor,
    ssm_pool: Tensor,
    arena: Tensor,
    offsets: tuple[int, int, int],
    plan: ChainPlan,
    out: Tensor,
    state_dtype: torch.dtype,
) -> None:
    t_off, s_off, c_off = offsets
    windows, states = conv_pool[plan.slot].float(), ssm_pool[plan.slot].float()
    for r, (row, fresh) in enumerate(zip(plan.lists.rows, plan.lists.fresh, strict=True)):
        if fresh:
            windows[r], states[r] = 0.0, 0.0
        y, windows[r] = convolve_row_torch(
            layer.conv_weight, layer.conv_bias, layer.activation, x, windows[r], row, arena, c_off, conv_pool.dtype
        )
        h, done = states[r], 0
        for item in row:
            if item.length:
                tokens = slice(item.tok, item.tok + item.length)
                values, b, c = layer.split(y[done : done + item.length])
                step, log_decay = layer.steps(dt[tokens])
                o, h = ssd(c, b, step[..., None] * values, log_decay, h)
                out[tokens] = (o + layer.skip.float()[:, None] * values).to(out.dtype)
                done += item.length
            if item.art != NO_ARTIFACT:
                decay = blob_view(arena, item.art + t_off, (layer.heads,), torch.float32).exp()
                s = blob_view(arena, item.art + s_off, h.shape, state_dtype)
                h = decay[:, None, None] * h + s.float()
        states[r] = h
    conv_pool[plan.slot] = windows.to(conv_pool.dtype)
    ssm_pool[plan.slot] = states.to(ssm_pool.dtype)


# ---------------------------------------------------------------- Triton


def _mamba2_chain_triton(
    layer: Mamba2Layer,
    x: Tensor,
    dt: Tensor,
    conv_pool: Tensor,
    ssm_pool: Tensor,
    arena: Tensor,
    offsets: tuple[int, int, int],
    plan: ChainPlan,
    out: Tensor,
    state_dtype: torch.dtype,
) -> None:
    require_triton(x)
    t_off, s_off, c_off = offsets
    rows, heads, dv, dk = len(plan.slot), layer.heads, layer.d_v, layer.d_k
    bk, bv = block(dk), min(block(dv), 32)
    if ssm_pool.stride()[1:] != (dv * dk, dk, 1) or out.stride()[1:] != (dv, 1):
        raise ValueError(f"slots of ssm_pool {ssm_pool.stride()} and rows of out {out.stride()} must be contiguous")
    if rows == 0:
        return
    y = x.new_empty(plan.total, layer.dim, dtype=torch.float32)
    launch_convolve_runs(
        layer.conv_weight, layer.conv_bias, layer.activation, x, conv_pool, arena, c_off, plan, y
    )  # fmt: skip
    blocks = -(-dv // bv)
    share = -(-layer.dim // (heads * blocks))
    _chain_kernel[(blocks, rows * heads)](
        x,
        y,
        dt,
        layer.A,
        layer.dt_bias,
        layer.skip,
        conv_pool,
        ssm_pool,
        arena,
        out,
        plan.row_ptr,
        plan.slot,
        plan.fresh,
        plan.item_tok,
        plan.item_len,
        plan.item_art,
        plan.item_run,
        plan.row_win,
        x.stride(0),
        dt.stride(0),
        conv_pool.stride(0),
        ssm_pool.stride(0),
        out.stride(0),
        t_off // 4,
        s_off // state_dtype.itemsize,
        c_off // conv_pool.element_size(),
        H=heads,
        G=layer.groups,
        DK=dk,
        DV=dv,
        DIM=layer.dim,
        BACK=layer.width - 1,
        ITEM_BYTES=conv_pool.element_size(),
        STATE=triton_dtype(state_dtype),
        STATE_BYTES=state_dtype.itemsize,
        BK=bk,
        BV=bv,
        SHARE=share,
        BC=block(share),
        BW=1 << (layer.width - 2).bit_length(),
        num_warps=4,
    )


@jit
def _chain_kernel(
    x,
    y,
    dt,
    A,
    dt_bias,
    skip,
    conv_pool,
    ssm_pool,
    arena,
    out,
    row_ptr,
    slots,
    fresh,
    item_tok,
    item_len,
    item_art,
    item_run,
    row_win,
    x_stride,
    dt_stride,
    pool_stride,
    ssm_stride,
    out_stride,
    t_off,
    s_off,
    c_off,
    H: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DIM: tl.constexpr,
    BACK: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BYTES: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SHARE: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
):
    """One program: BV rows of the state of one head of one batch row, through all items."""
    v_block, row, head = tl.program_id(0), tl.program_id(1) // H, tl.program_id(1) % H
    group = head // (H // G)
    dk, dv = tl.arange(0, BK), v_block * BV + tl.arange(0, BV)
    ok_k, ok_v = dk < DK, dv < DV
    ok_h = ok_v[:, None] & ok_k[None, :]
    slot = tl.load(slots + row)
    state = ssm_pool + slot * ssm_stride + (head * DV + dv[:, None]) * DK + dk[None, :]
    log_decays = arena.to(tl.pointer_type(tl.float32)) + t_off + head
    s_rows = arena.to(tl.pointer_type(STATE)) + s_off + (head * DV + dv[:, None]) * DK + dk[None, :]
    a, bias, d = tl.load(A + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32), tl.load(skip + head)

    h = tl.load(state, mask=ok_h & (tl.load(fresh + row) == 0), other=0.0).to(tl.float32)
    for item in range(tl.load(row_ptr + row), tl.load(row_ptr + row + 1)):
        run, token = tl.load(item_run + item), tl.load(item_tok + item)
        for t in range(tl.load(item_len + item)):
            inputs = y + (run + t) * DIM
            x_t = tl.load(inputs + head * DV + dv, mask=ok_v, other=0.0)
            b_t = tl.load(inputs + H * DV + group * DK + dk, mask=ok_k, other=0.0)
            c_t = tl.load(inputs + H * DV + (G + group) * DK + dk, mask=ok_k, other=0.0)
            pre = tl.load(dt + (token + t) * dt_stride + head).to(tl.float32) + bias
            step = tl.where(pre > 20.0, pre, tl.log(1.0 + tl.exp(tl.minimum(pre, 20.0))))
            h = tl.exp(step * a) * h + (step * x_t)[:, None] * b_t[None, :]
            o = tl.sum(h * c_t[None, :], 1) + d.to(tl.float32) * x_t
            tl.store(out + (token + t) * out_stride + head * DV + dv, o.to(out.dtype.element_ty), mask=ok_v)
        artifact = tl.load(item_art + item)
        if artifact >= 0:
            end_state = tl.load(s_rows + artifact // STATE_BYTES, mask=ok_h, other=0.0).to(tl.float32)
            h = tl.exp(tl.load(log_decays + artifact // 4)) * h + end_state
    tl.store(state, h.to(ssm_pool.dtype.element_ty), mask=ok_h)

    # Each program also moves its share of the channels to the window at the row's end.
    first = (head * tl.num_programs(0) + v_block) * SHARE
    store_row_window(
        x, conv_pool, arena, row_win, row, slot, first, tl.minimum(DIM - first, SHARE), x_stride, pool_stride, c_off,
        BACK, ITEM_BYTES, BC, BW,
    )  # fmt: skip
