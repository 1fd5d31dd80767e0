"""Transition operator T of the interiors of one GDN layer, straight into their blobs.

T's rows are those of a state that starts as the identity and meets no values (see wy.py), so a chunk of C tokens does

    T <- e^G T - (T W^T) K,     W = e^(G - G_t) (I + L)^-1 (beta e^(G_t) K)     [C, K], G = G_C

where W and G do not depend on T: they are made for all chunks in parallel, and two products per chunk are all that is
done in order. Chunked prefill calls this once per chunk; a call that continues reads T from the blob and moves it on.
The zero-start end-state S follows from T and the state that SGLang computes anyway: see gdn_end_states.
HYPIC, arXiv 2607.01299.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl
from hypic.kernels._triton import Precision, block, constexpr, jit, require_triton, tl, triton_dtype
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.wy import CHUNK, Chunk

__all__ = ["FORGOTTEN", "TransitionPlan", "TransitionScratch", "gdn_transition"]

FORGOTTEN = -20.0
"""A head whose log decay over an interior (or over a call's part of it) sums up to less has T = 0."""
_FORGOTTEN = constexpr(FORGOTTEN)


def gdn_transition(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    arena: Tensor,
    t_off: int,
    plan: TransitionPlan,
    state_dtype: torch.dtype = torch.float32,
    scratch: TransitionScratch | None = None,
    precision: Precision = "tf32",
    impl: Impl | None = None,
) -> None:
    """Write T of every interior into its blob.

    Heads that forget: each token's operator alpha (I - beta k k^T), |k| <= 1, 0 <= beta <= 2, has norm at most alpha,
    so |T| <= e^G with G the log decay in all. Where G < FORGOTTEN = -20, T is written as exact zeros, at no cost: that
    moves h T by at most e^-20 |h| = 2.1e-9 |h|, a thirtieth of the rounding of h in fp32. Zero stays zero in later calls.

    Three launches: which heads forget; W and e^G of all chunks in parallel; 64 (fp32 keys: 32) rows of T per program
    over its chunks in order. Operands of the products are of k's type: bf16 keys meet W and T rounded to bf16 (T itself
    stays in fp32 between chunks), which is what stock SGLang's kernel does to its state.
    Budget (8,192 tokens, HV = 32, K = 128, bf16, nothing forgotten): in the second, per chunk and head 5 MFLOP of tf32
    for the inverse, 1 for W, 1 of bf16 for the keys, and 64 MiB of W written; in the third 4 of bf16, 17 GFLOP in all.

    Args:
        k: [M, HK, K], l2-normalised, fp32 or bf16. g (log decay), beta: fp32 [M, HV]. See gdn_keys.
        arena: uint8 [bytes]. t_off: byte offset inside a blob of this layer's T [HV, K, K].
        state_dtype: of T in the blob, fp32 or bf16; rounded once per call.
        scratch: free to share between layers of one stream; None: allocated.
        precision: of the products of fp32 operands in the Triton kernels.
    Raises: ValueError if shapes disagree.
    """
    if g.shape[1] % k.shape[1] or g.shape != beta.shape or not len(k) == len(g) == plan.total:
        raise ValueError(
            f"k {tuple(k.shape)}, g {tuple(g.shape)}, beta {tuple(beta.shape)} and {plan.total} planned rows disagree"
        )
    if pick_impl(impl, k) == "triton":
        _gdn_transition_triton(k, g, beta, arena, t_off, plan, state_dtype, scratch, precision)
    else:
        _gdn_transition_torch(k, g, beta, arena, t_off, plan, state_dtype)


class TransitionScratch(NamedTuple):
    """What the Triton kernels pass on: w [C, HV, CHUNK, K] (-W), decay [C, HV] (e^G), forgets [N, HV]."""

    w: Tensor
    decay: Tensor
    forgets: Tensor

    @classmethod
    def of(cls, plan: TransitionPlan, num_v_heads: int, k: Tensor) -> TransitionScratch:
        return cls(
            k.new_empty(plan.chunks, num_v_heads, CHUNK, k.shape[2]),
            k.new_empty(plan.chunks, num_v_heads, dtype=torch.float32),
            k.new_empty(len(plan.blob), num_v_heads, dtype=torch.int32),
        )


# ---------------------------------------------------------------- torch reference


def _gdn_transition_torch(
    k: Tensor, g: Tensor, beta: Tensor, arena: Tensor, t_off: int, plan: TransitionPlan, state_dtype: torch.dtype
) -> None:
    hv, dk = g.shape[1], k.shape[2]
    cu, blobs, first = plan.lists
    for i, blob in enumerate(blobs):
        t = blob_view(arena, blob + t_off, (hv, dk, dk), state_dtype)
        if first[i]:
            t.copy_(torch.eye(dk, device=k.device))
        if cu[i + 1] == cu[i]:
            continue
        rows, part = t.float(), slice(cu[i], cu[i + 1])
        for chunk_k, chunk_g, chunk_beta in zip(*(_chunks(x[part]) for x in (k, g, beta)), strict=True):
            chunk = Chunk.of(chunk_k.float().repeat_interleave(hv // k.shape[1], 0), chunk_g, chunk_beta)
            rows, _ = chunk.advance(rows, rows.new_zeros(()).expand(*chunk_beta.shape, dk))
        t.copy_(rows.masked_fill((g[part].sum(0) < FORGOTTEN)[:, None, None], 0.0))


def _chunks(x: Tensor) -> list[Tensor]:
    """[n, H, ...] -> [H, <= CHUNK, ...] pieces in order."""
    return [piece.transpose(0, 1) for piece in x.split(CHUNK)]


# ---------------------------------------------------------------- Triton


def _gdn_transition_triton(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    arena: Tensor,
    t_off: int,
    plan: TransitionPlan,
    state_dtype: torch.dtype,
    scratch: TransitionScratch | None,
    precision: Precision,
) -> None:
    require_triton(k)
    if not all(t.is_contiguous() for t in (k, g, beta)) or not g.dtype == beta.dtype == torch.float32:
        raise ValueError("k, g and beta must be contiguous, the gates fp32, as gdn_keys gives them")
    (_, hk, dk), hv = k.shape, g.shape[1]
    if block(dk) > 128:
        raise ValueError(f"head_k_dim {dk}: the Triton kernels take at most 128, as the chain's; use impl='torch'")
    sequences = len(plan.blob)
    if sequences == 0:
        return
    w, decay, forgets = scratch if scratch is not None else TransitionScratch.of(plan, hv, k)
    _forget_kernel[(sequences, hv)](g, forgets, plan.cu, HV=hv, BLOCK=1024, num_warps=4)
    shape = {"HK": hk, "HV": hv, "DK": dk, "C": CHUNK, "BK": block(dk), "PRECISION": precision}
    if plan.chunks:
        _solve_kernel[(plan.chunks, hv)](
            k, g, beta, w, decay, forgets, plan.cu, plan.chunk_seq, plan.chunk_row, **shape,
            LEVELS=CHUNK.bit_length() - 1, num_warps=4,
        )  # fmt: skip
    rows = 64 if k.dtype == torch.bfloat16 else 32  # a warp group's share of a product; fp32 takes the room of two
    _advance_kernel[(-(-dk // rows), sequences * hv)](
        k, w, decay, forgets, arena, plan.cu, plan.blob, plan.first, plan.chunk_ptr, t_off // state_dtype.itemsize,
        **shape, BR=rows, STATE=triton_dtype(state_dtype), STATE_BYTES=state_dtype.itemsize,
        num_warps=4,
    )  # fmt: skip


@jit
def _forget_kernel(g, forgets, cu, HV: tl.constexpr, BLOCK: tl.constexpr):
    """One program: does one head forget one interior?"""
    seq, hv = tl.program_id(0), tl.program_id(1)
    end = tl.load(cu + seq + 1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.load(cu + seq), end, BLOCK):
        m = row + tl.arange(0, BLOCK)
        total += tl.load(g + m * HV + hv, mask=m < end, other=0.0)
    tl.store(forgets + seq * HV + hv, (tl.sum(total, 0) < _FORGOTTEN).to(tl.int32))


@jit
def _solve_kernel(
    k,
    g,
    beta,
    w_out,
    decay_out,
    forgets,
    cu,
    chunk_seq,
    chunk_row,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One program: -W [C, K] and e^G of one chunk and value head. Rows past the interior's end are zero.

    (I + L)^-1 starts with diagonal blocks of 2, which are their own inverses but for the sign of L, and merges pairs by
    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]], doubling their size. Unlike a product of powers of L this
    stays accurate when all keys are alike.
    """
    chunk, hv = tl.program_id(0), tl.program_id(1)
    seq = tl.load(chunk_seq + chunk)
    if tl.load(forgets + seq * HV + hv) != 0:
        return
    row, end, hk = tl.load(chunk_row + chunk), tl.load(cu + seq + 1), hv // (HV // HK)
    c, d = tl.arange(0, C), tl.arange(0, BK)
    m = row + c
    ok = (m < end)[:, None] & (d < DK)[None, :]
    keys = tl.load(k + (m[:, None] * HK + hk) * DK + d[None, :], mask=ok, other=0.0)
    log_decay = tl.cumsum(tl.load(g + m * HV + hv, mask=m < end, other=0.0), 0)
    strength = tl.load(beta + m * HV + hv, mask=m < end, other=0.0)
    total = tl.sum(tl.where(c == C - 1, log_decay, 0.0), 0)

    i, j = c[:, None], c[None, :]
    between = tl.exp(tl.where(i > j, log_decay[:, None] - log_decay[None, :], 0.0))
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * strength[:, None] * between
    lower = tl.where(i > j, lower, 0.0)
    solved = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1) == (j >> 1), lower, 0.0)
    for level in range(1, LEVELS):  # not unrolled: ten products in IEEE fp32 would compile for minutes
        coupled = ((i >> level) > (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1)))
        step = tl.dot(tl.where(coupled, lower, 0.0), solved, input_precision=PRECISION)
        solved -= tl.dot(solved, step, input_precision=PRECISION)
    strength *= tl.exp(log_decay)
    w = tl.dot(solved, keys.to(tl.float32) * strength[:, None], input_precision=PRECISION)
    w *= -tl.exp(total - log_decay)[:, None]
    at = chunk.to(tl.int64) * HV + hv
    tl.store(w_out + (at * C + c[:, None]) * DK + d[None, :], w.to(w_out.dtype.element_ty), mask=(d < DK)[None, :])
    tl.store(decay_out + at, tl.exp(total))


@jit
def _advance_kernel(
    k,
    w,
    decay,
    forgets,
    arena,
    cu,
    blobs,
    first,
    chunk_ptr,
    t_off,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    BR: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BYTES: tl.constexpr,
):
    """One program: BR rows of T of one interior and value head, over its chunks."""
    r_block, seq, hv = tl.program_id(0), tl.program_id(1) // HV, tl.program_id(1) % HV
    r, d, c = r_block * BR + tl.arange(0, BR), tl.arange(0, BK), tl.arange(0, C)
    ok_d = d < DK
    ok = (r < DK)[:, None] & ok_d[None, :]
    start, end = tl.load(cu + seq), tl.load(cu + seq + 1)
    fresh = tl.load(first + seq) != 0
    blob = tl.multiple_of(tl.load(blobs + seq) // STATE_BYTES, 16 // STATE_BYTES)
    rows_at = arena.to(tl.pointer_type(STATE)) + blob + t_off + hv * DK * DK + r[:, None] * DK + d[None, :]
    if tl.load(forgets + seq * HV + hv) != 0:
        tl.store(rows_at, tl.zeros([BR, BK], dtype=STATE), mask=ok)
        return

    rows = tl.load(rows_at, mask=ok & (fresh == 0), other=0.0).to(tl.float32)
    rows = tl.where(fresh & (r[:, None] == d[None, :]), 1.0, rows)
    begin = tl.load(chunk_ptr + seq)
    for chunk in range(begin, tl.load(chunk_ptr + seq + 1)):
        m = start + (chunk - begin) * C + c
        keys_at = k + (m[:, None] * HK + hv // (HV // HK)) * DK + d[None, :]
        keys = tl.load(keys_at, mask=(m < end)[:, None] & ok_d[None, :], other=0.0)
        at = chunk * HV + hv
        w_c = tl.load(w + (at * C + c[:, None]) * DK + d[None, :], mask=ok_d[None, :], other=0.0)
        written = tl.dot(rows.to(w_c.dtype), tl.trans(w_c), input_precision=PRECISION)
        rows = tl.dot(written.to(keys.dtype), keys, rows * tl.load(decay + at), input_precision=PRECISION)
    if fresh | (end > start):
        tl.store(rows_at, rows.to(STATE), mask=ok)
