"""The seam chain of one GDN or KDA layer: runs and artifacts of every request of a batch, in natural order.

For each row, state h and conv window thread through its items; an item is a run (tokens that are computed), then
optionally an artifact (h <- h T + S, its own inputs appended to the window). HYPIC, arXiv 2607.01299.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl
from hypic.kernels._triton import Precision, block, jit, require_triton, tl, triton_dtype
from hypic.kernels.chain_plans import NO_ARTIFACT, ChainItem, ChainPlan
from hypic.kernels.conv_runs import convolve_row_torch, store_row_window
from hypic.kernels.gdn_inputs import (
    GdnLayer,
    gates_torch,
    launch_inputs,
    split_heads_torch,
)
from hypic.kernels.operators import apply_operator, read_operator, triton_operator
from hypic.kernels.wy import delta_rule

__all__ = ["NO_ARTIFACT", "ChainItem", "ChainPlan", "chain_scratch", "gdn_chain"]


def gdn_chain(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    activation: str | None,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_pool: Tensor,
    ssm_pool: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    c_off: int,
    plan: ChainPlan,
    out: Tensor,
    state_dtype: torch.dtype = torch.float32,
    operator_dtype: torch.dtype | None = None,
    scratch: Tensor | None = None,
    precision: Precision = "tf32",
    impl: Impl | None = None,
) -> None:
    """Run every row of the plan through its items; write outputs of run tokens and the rows' end states.

    Two launches. The first prepares q, k, v and gates of all run tokens in parallel; the second holds the state of one
    (row, head, value block) in registers from its first item to its last, with T and S streamed from the arena.
    Budget (one row, 16 artifacts, K = V = 128, HV = 32): 64 MiB of T read once from memory and once per value block
    from L2, 32 MiB of S: about 30 us at 4.3 TB/s; to stay launch-bound the chain must not take over 100 us a layer.

    Args:
        x: [T, D] projections before the convolution of the whole flattened batch, D = 2 HK K + HV V, [q | k | v].
        a, b: [T, HV]. conv_weight: [D, W]; conv_bias: [D] or None; activation: "silu", "swish" or None; A_log, dt_bias:
            [HV]. With a gate per channel (dt_bias [HV, K]) other a and b, see gdn_inputs.GdnLayer.
        conv_pool: [slots, D, W-1], any float type; a slot contiguous, or its transpose.
        ssm_pool: [slots, HV, V, K], fp32 or bf16.
        arena: uint8 [bytes]. t_off, s_off, c_off: byte offsets inside a blob of this layer's T [HV, K, K],
            S [HV, V, K] in state_dtype (fp32 or bf16), and conv tail [D, W-1] as a slot of conv_pool lies.
        operator_dtype: of T, see hypic.kernels.operators; None: state_dtype.
        out: [T, HV, V]; only the rows of run tokens are written.
        scratch: fp32 [>= chain_scratch(plan, D, HV, gates)], free to share between layers of one stream; None: allocated.
        precision: of h T in the Triton kernel.
    All other arithmetic is fp32; the state is rounded once, when it goes back to the pool.

    Raises: ValueError if shapes disagree.
    """
    layer = GdnLayer(
        conv_weight, conv_bias, activation, A_log, dt_bias, num_k_heads, num_v_heads, head_k_dim, head_v_dim
    )
    layer.check(x, conv_pool)
    if tuple(ssm_pool.shape[1:]) != (num_v_heads, head_v_dim, head_k_dim):
        raise ValueError(f"ssm_pool {tuple(ssm_pool.shape)} is not [slots, {num_v_heads}, {head_v_dim}, {head_k_dim}]")
    offsets, dtypes = (t_off, s_off, c_off), (state_dtype, operator_dtype or state_dtype)
    if pick_impl(impl, x) == "triton":
        _gdn_chain_triton(layer, x, a, b, conv_pool, ssm_pool, arena, offsets, plan, out, dtypes, scratch, precision)
    else:
        _gdn_chain_torch(layer, x, a, b, conv_pool, ssm_pool, arena, offsets, plan, out, dtypes)


def chain_scratch(plan: ChainPlan, dim: int, num_v_heads: int, gates: int | None = None) -> int:
    """fp32 elements of scratch that the Triton kernel of :func:`gdn_chain` needs; ``gates`` of a token, if not HV."""
    return plan.total * (dim + num_v_heads + (num_v_heads if gates is None else gates))


# ---------------------------------------------------------------- torch reference


def _gdn_chain_torch(
    layer: GdnLayer,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_pool: Tensor,
    ssm_pool: Tensor,
    arena: Tensor,
    offsets: tuple[int, int, int],
    plan: ChainPlan,
    out: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> None:
    (t_off, s_off, c_off), (state_dtype, operator_dtype) = offsets, dtypes
    hv, dk, dv = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    group = hv // layer.num_k_heads
    windows, states = conv_pool[plan.slot].float(), ssm_pool[plan.slot].float()
    for r, (row, fresh) in enumerate(zip(plan.lists.rows, plan.lists.fresh, strict=True)):
        if fresh:
            windows[r], states[r] = 0.0, 0.0
        y, windows[r] = convolve_row_torch(
            layer.conv_weight, layer.conv_bias, layer.activation, x, windows[r], row, arena, c_off, conv_pool.dtype,
            conv_pool.stride(2),
        )  # fmt: skip
        tokens = torch.cat([torch.arange(i.tok, i.tok + i.length, device=x.device) for i in row] or [plan.slot[:0]])
        q, k, v = split_heads_torch(layer, y)
        q, k = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (q, k))
        v = v.transpose(0, 1)
        g, beta = (t.transpose(0, 1) for t in gates_torch(layer, a[tokens], b[tokens]))
        h, done = states[r], 0
        for item in row:
            if item.length:
                run = slice(done, done + item.length)
                o, h = delta_rule(q[:, run], k[:, run], v[:, run], g[:, run], beta[:, run], h)
                out[item.tok : item.tok + item.length] = o.transpose(0, 1).to(out.dtype)
                done += item.length
            if item.art != NO_ARTIFACT:
                t = read_operator(arena, item.art + t_off, hv, dk, operator_dtype)
                s = blob_view(arena, item.art + s_off, (hv, dv, dk), state_dtype)
                h = h @ t + s.float()
        states[r] = h
    conv_pool[plan.slot] = windows.to(conv_pool.dtype)
    ssm_pool[plan.slot] = states.to(ssm_pool.dtype)


# ---------------------------------------------------------------- Triton


def _gdn_chain_triton(
    layer: GdnLayer,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_pool: Tensor,
    ssm_pool: Tensor,
    arena: Tensor,
    offsets: tuple[int, int, int],
    plan: ChainPlan,
    out: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    scratch: Tensor | None,
    precision: Precision,
) -> None:
    require_triton(x)
    (t_off, s_off, c_off), (state_dtype, operator_dtype) = offsets, dtypes
    hk, hv, dk, dv = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    rows, bk, bv = len(plan.slot), block(dk), min(block(dv), 32)
    if bk > 128:
        raise ValueError(f"head_k_dim {dk}: the Triton kernel keeps T in shared memory, at most 128; use impl='torch'")
    if ssm_pool.stride()[1:] != (dv * dk, dk, 1) or out.stride()[1:] != (dv, 1):
        raise ValueError(f"slots of ssm_pool {ssm_pool.stride()} and rows of out {out.stride()} must be contiguous")
    if rows == 0:
        return
    m, gates = plan.total, layer.dt_bias.numel()
    size = chain_scratch(plan, layer.dim, hv, gates)
    if scratch is None:
        scratch = x.new_empty(size, dtype=torch.float32)
    parts = [m * n for n in (hk * dk, hk * dk, hv * dv, gates, hv)]
    q, k, v, g, beta = scratch[:size].split(parts)
    launch_inputs(layer, x, a, b, conv_pool, plan, q, k, v, g, beta, arena, c_off)
    blocks = -(-dv // bv)
    _chain_kernel[(blocks, rows * hv)](
        x,
        q,
        k,
        v,
        g,
        beta,
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
        conv_pool.stride(0),
        ssm_pool.stride(0),
        out.stride(0),
        t_off,
        s_off,
        c_off // conv_pool.element_size(),
        HK=hk,
        HV=hv,
        DK=dk,
        DV=dv,
        DIM=layer.dim,
        BACK=layer.width - 1,
        ITEM_BYTES=conv_pool.element_size(),
        STATE=triton_dtype(state_dtype),
        OPERATOR=triton_operator(operator_dtype),
        BK=bk,
        BV=bv,
        BC=block(-(-layer.dim // (hv * blocks))),
        BW=1 << (layer.width - 2).bit_length(),
        PRECISION=precision,
        CHANNEL_GATES=layer.channel_gates,
        COLUMN=conv_pool.stride(2),
        num_warps=8,
    )


@jit
def _chain_kernel(
    x,
    q,
    k,
    v,
    g,
    beta,
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
    pool_stride,
    ssm_stride,
    out_stride,
    t_off,
    s_off,
    c_off,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DIM: tl.constexpr,
    BACK: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    STATE: tl.constexpr,
    OPERATOR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    PRECISION: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    COLUMN: tl.constexpr,
):
    """One program: BV rows of the state of one value head of one batch row, through all items."""
    v_block, row, hv = tl.program_id(0), tl.program_id(1) // HV, tl.program_id(1) % HV
    hk = hv // (HV // HK)
    dk, dv = tl.arange(0, BK), v_block * BV + tl.arange(0, BV)
    ok_k, ok_v = dk < DK, dv < DV
    ok_h = ok_v[:, None] & ok_k[None, :]
    slot = tl.load(slots + row)
    in_s = (hv * DV + dv[:, None]) * DK + dk[None, :]
    state = ssm_pool + slot * ssm_stride + in_s

    h = tl.load(state, mask=ok_h & (tl.load(fresh + row) == 0), other=0.0).to(tl.float32)
    for item in range(tl.load(row_ptr + row), tl.load(row_ptr + row + 1)):
        run, token = tl.load(item_run + item), tl.load(item_tok + item)
        for t in range(tl.load(item_len + item)):
            at = (run + t) * HK + hk
            q_t = tl.load(q + at * DK + dk, mask=ok_k, other=0.0)
            k_t = tl.load(k + at * DK + dk, mask=ok_k, other=0.0)
            at = (run + t) * HV + hv
            v_t = tl.load(v + at * DV + dv, mask=ok_v, other=0.0)
            if CHANNEL_GATES:
                h *= tl.exp(tl.load(g + at * DK + dk, mask=ok_k, other=0.0))[None, :]
            else:
                h *= tl.exp(tl.load(g + at))
            written = tl.load(beta + at) * (v_t - tl.sum(h * k_t[None, :], 1))
            h += written[:, None] * k_t[None, :]
            o = tl.sum(h * q_t[None, :], 1)
            tl.store(out + (token + t) * out_stride + hv * DV + dv, o.to(out.dtype.element_ty), mask=ok_v)
        artifact = tl.load(item_art + item)
        if artifact >= 0:
            blob = arena + tl.multiple_of(artifact, 16)
            end_state = tl.load((blob + s_off).to(tl.pointer_type(STATE)) + in_s, mask=ok_h, other=0.0).to(tl.float32)
            h = apply_operator(h, end_state, blob + t_off, hv, dk, HV, DK, OPERATOR, PRECISION)
    tl.store(state, h.to(ssm_pool.dtype.element_ty), mask=ok_h)

    # Each program also moves its share of the channels to the window at the row's end.
    share = hv * tl.num_programs(0) + v_block
    per_program: tl.constexpr = (DIM + HV * ((DV + BV - 1) // BV) - 1) // (HV * ((DV + BV - 1) // BV))
    store_row_window(
        x, conv_pool, arena, row_win, row, slot, share * per_program, tl.minimum(DIM - share * per_program, per_program),
        x_stride, pool_stride, c_off, BACK, ITEM_BYTES, BC, BW, COLUMN,
    )  # fmt: skip
