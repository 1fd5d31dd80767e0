"""Causal attention of the computed tokens of linked requests: a few query tiles over one long KV, KV split.

A link computes few tokens that stand all over a long prompt. As one row per run over its prefix (SGLang's extend
kernel) the same KV is read once per run, with a handful of rows per tensor-core tile. Here the tokens of a request
share tiles of tokens x GQA group, in order of position, and the KV ranges of all tiles are dealt out evenly to the SMs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.kernels._common import Impl, pick_impl
from hypic.kernels._triton import Precision, block, jit, require_triton, tl
from hypic.kernels.seam_plan import SeamPlan

__all__ = ["SeamPlan", "seam_attention", "seam_scratch"]

LOG2E = 1.4426950408889634  # softmax in powers of two


def seam_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    *,
    plan: SeamPlan,
    scale: float,
    logit_cap: float = 0.0,
    out: Tensor,
    scratch: Tensor | None = None,
    impl: Impl | None = None,
    precision: Precision = "tf32",
) -> None:
    """The plan's token at natural position p of a request attends to the request's KV at positions 0..p, p included.

    Two launches, one if no tile's KV is split. Scores, softmax and accumulation are fp32; probabilities go through the
    tensor cores in the type of V, as in SGLang's kernels. K and V at 0..p, those of the computed tokens included, must
    be in the pools already; slots and columns of ``req_to_token`` beyond are never read.

    Budget (32,864 tokens, 224 computed: 16 seams of 8, 32 system, 64 query; 16 query and 2 KV heads of 256, bf16):
    4.1 M query-key pairs, 67 GFLOP: 0.10 ms at the 650 TFLOP/s that dense attention reaches on an H200. Memory: 67 MB
    of KV once (16 us at 4.3 TB/s); L2: 540 MB, as each of 28 tiles (14 a head) reads its own prefix; partial results
    21 MB, written and read once. Rows whose tile reaches beyond their position cost 3% more than the pairs above.

    Args:
        q: [T, Hq, Dk] of the whole flattened batch, after RoPE: fp32, bf16 or fp16.
        k_pool, v_pool: [slots, Hkv, Dk] and [slots, Hkv, Dv] of the same type. Hq is a multiple of Hkv.
        req_to_token: integer [rows, max context]: the slot of each position.
        plan: built for these heads, dims and this type.
        scale: factor on the scores, > 0. logit_cap: if > 0, scores become ``cap tanh(score / cap)``.
        out: [T, Hq, Dv]; only the plan's tokens are written.
        scratch: fp32 [>= seam_scratch(plan)], free to share between layers of one stream; None: allocated.
        precision: of the Triton kernel's products, for fp32 inputs.
    For Triton the rows of all tensors are contiguous.

    Raises: ValueError if shapes, types or the plan disagree, or a tensor's rows are not contiguous (Triton).
    """
    (_, hq, dk), (_, hkv, dv) = q.shape, v_pool.shape
    if tuple(k_pool.shape[1:]) != (hkv, dk) or tuple(out.shape) != (*q.shape[:2], dv):
        raise ValueError(f"q {tuple(q.shape)}, k_pool {tuple(k_pool.shape)}, v_pool {tuple(v_pool.shape)}, out "
                         f"{tuple(out.shape)} disagree")  # fmt: skip
    if k_pool.dtype != q.dtype or v_pool.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype}, the pools are {k_pool.dtype} and {v_pool.dtype}: they must be of one type")
    if plan.shape != (hq, hkv, dk, dv, q.dtype):
        raise ValueError(f"the plan is for (Hq, Hkv, Dk, Dv, type) {plan.shape}, not {(hq, hkv, dk, dv, q.dtype)}")
    if scale <= 0 or logit_cap < 0:
        raise ValueError(f"scale={scale} must be positive and logit_cap={logit_cap} at least 0")
    if pick_impl(impl, q) == "triton":
        _seam_triton(q, k_pool, v_pool, req_to_token, plan, scale, logit_cap, out, scratch, precision)
    else:
        _seam_torch(q, k_pool, v_pool, req_to_token, plan, scale, logit_cap, out)


def seam_scratch(plan: SeamPlan) -> int:
    """fp32 elements of scratch that the Triton kernels of :func:`seam_attention` need."""
    return plan.parts * plan.shape.kv_heads * plan.tiling.rows * (plan.shape.v_dim + 1)


# ---------------------------------------------------------------- torch reference


def _seam_torch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    plan: SeamPlan,
    scale: float,
    logit_cap: float,
    out: Tensor,
) -> None:
    hq, hkv, group = plan.shape.q_heads, plan.shape.kv_heads, plan.shape.group
    start = 0
    for request, count, last in zip(*plan.lists, strict=True):
        tokens, positions = plan.tok[start : start + count], plan.pos[start : start + count]
        start += count
        slots = req_to_token[plan.rows[request], : last + 1].to(torch.int64)
        k, v = k_pool[slots].float(), v_pool[slots].float()
        heads = q[tokens].float().view(count, hkv, group, -1)
        scores = torch.einsum("thgd,nhd->hgtn", heads, k) * scale
        if logit_cap > 0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        future = torch.arange(last + 1, device=q.device)[None, :] > positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[tokens] = torch.einsum("hgtn,nhd->thgd", weights, v).reshape(count, hq, -1).to(out.dtype)


# ---------------------------------------------------------------- Triton


def _seam_triton(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    req_to_token: Tensor,
    plan: SeamPlan,
    scale: float,
    logit_cap: float,
    out: Tensor,
    scratch: Tensor | None,
    precision: Precision,
) -> None:
    require_triton(q)
    shape, tiling = plan.shape, plan.tiling
    for name, tensor in {"q": q, "k_pool": k_pool, "v_pool": v_pool, "out": out}.items():
        if tensor.stride()[1:] != (tensor.shape[2], 1):
            raise ValueError(f"rows of {name} {tuple(tensor.shape)} must be contiguous, strides are {tensor.stride()}")
    if req_to_token.stride(1) != 1:
        raise ValueError(f"rows of req_to_token must be contiguous, strides are {req_to_token.stride()}")
    if plan.workers == 0:
        return
    if scratch is None:
        scratch = q.new_empty(seam_scratch(plan), dtype=torch.float32)
    if scratch.dtype != torch.float32 or scratch.numel() < seam_scratch(plan):
        raise ValueError(f"scratch: {scratch.numel()} x {scratch.dtype}, needs {seam_scratch(plan)} x float32")
    partial = scratch
    lse = scratch[plan.parts * shape.kv_heads * tiling.rows * shape.v_dim :]
    _seam_kernel[(plan.workers, shape.kv_heads)](
        q,
        k_pool,
        v_pool,
        req_to_token,
        out,
        partial,
        lse,
        plan.rows,
        plan.tok,
        plan.pos,
        plan.segments,
        plan.worker_ptr,
        float(scale if logit_cap > 0 else scale * LOG2E),
        float(logit_cap),
        q.stride(0),
        k_pool.stride(0),
        v_pool.stride(0),
        req_to_token.stride(0),
        out.stride(0),
        GROUP=shape.group,
        HKV=shape.kv_heads,
        DK=shape.k_dim,
        DV=shape.v_dim,
        CAPPED=logit_cap > 0,
        BM=tiling.rows,
        BN=tiling.columns,
        BK=block(shape.k_dim),
        BV=block(shape.v_dim),
        PRECISION=precision,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if plan.merged:
        rows = 4
        _merge_kernel[(plan.merged * (tiling.rows // rows), shape.kv_heads)](
            partial,
            lse,
            out,
            plan.tok,
            plan.merges,
            out.stride(0),
            GROUP=shape.group,
            HKV=shape.kv_heads,
            DV=shape.v_dim,
            BM=tiling.rows,
            ROWS=rows,
            PARTS=4,
            BV=block(shape.v_dim),
            num_warps=4,
        )


@jit
def _seam_kernel(
    q,
    k_pool,
    v_pool,
    req_to_token,
    out,
    partial,
    lse,
    rows,
    tok,
    pos,
    segments,
    worker_ptr,
    scale,
    cap,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    out_stride,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    CAPPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the share of one worker, for one KV head. Row m of a tile: token m // GROUP, head m % GROUP."""
    worker, head = tl.program_id(0), tl.program_id(1)
    m, n, dk, dv = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BV)
    for segment in range(tl.load(worker_ptr + worker), tl.load(worker_ptr + worker + 1)):
        fields = segments + segment * 6
        first, count, request = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
        lo, hi, part = tl.load(fields + 3).to(tl.int32), tl.load(fields + 4).to(tl.int32), tl.load(fields + 5)
        ok_m = m // GROUP < count
        token = tl.load(tok + first + m // GROUP, mask=ok_m, other=0)
        last = tl.load(pos + first + m // GROUP, mask=ok_m, other=-1).to(tl.int32)
        q_head = head * GROUP + m % GROUP
        q_at = q + (token * q_stride + q_head * DK)[:, None] + dk[None, :]
        queries = tl.load(q_at, mask=ok_m[:, None] & (dk < DK)[None, :], other=0.0)
        table = req_to_token + tl.load(rows + request) * table_stride

        # Beyond hi the last slot is read again: never garbage, and the causal mask drops it. The next block's slots
        # are loaded a block ahead, so that K and V depend on no load of their own iteration and can be pipelined.
        slot = tl.load(table + tl.minimum(lo + n, hi - 1))
        best = tl.full([BM], float("-inf"), tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BV], tl.float32)
        for start in range(lo, hi, BN):
            k_at = k_pool + head * DK + (slot.to(tl.int64) * k_stride)[None, :] + dk[:, None]
            v_at = v_pool + head * DV + (slot.to(tl.int64) * v_stride)[:, None] + dv[None, :]
            if BK == DK:
                keys = tl.load(k_at)
            else:
                keys = tl.load(k_at, mask=(dk < DK)[:, None], other=0.0)
            if BV == DV:
                values = tl.load(v_at)
            else:
                values = tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
            slot = tl.load(table + tl.minimum(start + BN + n, hi - 1))
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
            if CAPPED:
                scores = (cap * 1.4426950408889634) * (2 * tl.sigmoid(2 * scores / cap) - 1)
            scores = tl.where((start + n)[None, :] <= last[:, None], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - shift[:, None])
            keep = tl.exp2(best - shift)
            total = total * keep + tl.sum(weights, 1)
            acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision=PRECISION)
            best = higher

        seen = total > 0.0
        acc = acc / tl.where(seen, total, 1.0)[:, None]
        ok = ok_m[:, None] & (dv < DV)[None, :]
        if part < 0:
            out_at = out + (token * out_stride + q_head * DV)[:, None] + dv[None, :]
            tl.store(out_at, acc.to(out.dtype.element_ty), mask=ok)
        else:
            at = (part * HKV + head) * BM + m
            tl.store(partial + (at * DV)[:, None] + dv[None, :], acc, mask=ok)
            log_total = tl.where(seen, best + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
            tl.store(lse + at, log_total, mask=ok_m)


@jit
def _merge_kernel(
    partial,
    lse,
    out,
    tok,
    merges,
    out_stride,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    DV: tl.constexpr,
    BM: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BV: tl.constexpr,
):
    """One program: ROWS rows of one tile and KV head, PARTS partial results at a time."""
    head, fields = tl.program_id(1), merges + tl.program_id(0) // (BM // ROWS) * 4
    first, count = tl.load(fields), tl.load(fields + 1)
    part, parts = tl.load(fields + 2), tl.load(fields + 3)
    m = tl.program_id(0) % (BM // ROWS) * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, BV)
    ok_m, ok_v = m // GROUP < count, dv < DV
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BV], tl.float32)
    for done in range(0, parts, PARTS):
        one = done + tl.arange(0, PARTS)
        ok = (one < parts)[:, None] & ok_m[None, :]
        at = ((part + one) * HKV + head)[:, None] * BM + m[None, :]
        logs = tl.load(lse + at, mask=ok, other=float("-inf"))
        results = tl.load(
            partial + at[:, :, None] * DV + dv[None, None, :], mask=ok[:, :, None] & ok_v[None, None, :], other=0.0
        )
        higher = tl.maximum(best, tl.max(logs, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights, keep = tl.exp2(logs - shift[None, :]), tl.exp2(best - shift)
        total = total * keep + tl.sum(weights, 0)
        acc = acc * keep[:, None] + tl.sum(results * weights[:, :, None], 0)
        best = higher
    token = tl.load(tok + first + m // GROUP, mask=ok_m, other=0)
    out_at = out + (token * out_stride + (head * GROUP + m % GROUP) * DV)[:, None] + dv[None, :]
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=ok_m[:, None] & ok_v[None, :])
