"""Transition operator T of the interiors of one GDN or KDA layer, straight into their blobs.

T's rows are those of a state that starts as the identity and meets no values (see wy.py), so a chunk of C tokens does

    T <- e^G T - (T W^T) K,     W = e^(G - G_t) (I + L)^-1 (beta e^(G_t) K)     [C, K], G = G_C

where W and G do not depend on T: they are made for all chunks in parallel, and two products per chunk are all that is
done in order. Where each key channel has a gate (KDA), e^G scales the columns of T, and what decays inside the chunk
goes into the keys: T <- T e^G - (T W^T) K', with W = (I + L)^-1 (beta e^(G_t) K) and K' = e^(G - G_t) K; see
gdn_solve. Chunked prefill calls this once per chunk; a call that continues reads T from the blob and moves it on.
The zero-start end-state S follows from T and the state that SGLang computes anyway: see gdn_end_states.
HYPIC, arXiv 2607.01299.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hypic.kernels._common import Impl, pick_impl
from hypic.kernels._triton import Precision, block, constexpr, jit, require_triton, tl
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.gdn_solve import launch_solve
from hypic.kernels.operators import load_operator, read_operator, store_operator, triton_operator, write_operator
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
    operator_dtype: torch.dtype = torch.float32,
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
        k: [M, HK, K], l2-normalised, fp32 or bf16. beta: fp32 [M, HV]. g (log decay): fp32 [M, HV], or [M, HV, K] where
            each key channel has a gate. See gdn_keys.
        arena: uint8 [bytes]. t_off: byte offset inside a blob of this layer's T [HV, K, K].
        operator_dtype: of T in the blob, see hypic.kernels.operators; rounded once per call.
        scratch: free to share between layers of one stream; None: allocated.
        precision: of the products of fp32 operands in the Triton kernels.
    Raises: ValueError if shapes disagree.
    """
    gates = beta.shape if g.dim() == 2 else (*beta.shape, k.shape[2])
    if beta.shape[1] % k.shape[1] or g.shape != gates or not len(k) == len(g) == plan.total:
        raise ValueError(
            f"k {tuple(k.shape)}, g {tuple(g.shape)}, beta {tuple(beta.shape)} and {plan.total} planned rows disagree"
        )
    if pick_impl(impl, k) == "triton":
        _gdn_transition_triton(k, g, beta, arena, t_off, plan, operator_dtype, scratch, precision)
    else:
        _gdn_transition_torch(k, g, beta, arena, t_off, plan, operator_dtype)


class TransitionScratch(NamedTuple):
    """What the Triton kernels pass on: w [C, HV, CHUNK, K] (-W), decay [C, HV] or [C, HV, K] (e^G), forgets [N, HV].

    With a gate per channel also keys [C, HV, CHUNK, K] (K').
    """

    w: Tensor
    decay: Tensor
    forgets: Tensor
    keys: Tensor

    @classmethod
    def of(cls, plan: TransitionPlan, k: Tensor, g: Tensor) -> TransitionScratch:
        heads, per_chunk = g.shape[1], (plan.chunks, g.shape[1], CHUNK, k.shape[2])
        return cls(
            k.new_empty(per_chunk),
            g.new_empty(plan.chunks, *g.shape[1:]),
            g.new_empty(len(plan.blob), heads, dtype=torch.int32),
            k.new_empty(per_chunk if g.dim() == 3 else 0),
        )


# ---------------------------------------------------------------- torch reference


def _gdn_transition_torch(
    k: Tensor, g: Tensor, beta: Tensor, arena: Tensor, t_off: int, plan: TransitionPlan, operator_dtype: torch.dtype
) -> None:
    hv, dk = g.shape[1], k.shape[2]
    slowest = g if g.dim() == 2 else g.amax(2)
    cu, blobs, first = plan.lists
    for i, blob in enumerate(blobs):
        part, at = slice(cu[i], cu[i + 1]), blob + t_off
        eye = torch.eye(dk, device=k.device).expand(hv, dk, dk)
        if cu[i + 1] == cu[i]:
            if first[i]:
                write_operator(eye, arena, at, operator_dtype)
            continue
        rows = eye if first[i] else read_operator(arena, at, hv, dk, operator_dtype)
        for chunk_k, chunk_g, chunk_beta in zip(*(_chunks(x[part]) for x in (k, g, beta)), strict=True):
            chunk = Chunk.of(chunk_k.float().repeat_interleave(hv // k.shape[1], 0), chunk_g, chunk_beta)
            rows, _ = chunk.advance(rows, rows.new_zeros(()).expand(*chunk_beta.shape, dk))
        forgotten = (slowest[part].sum(0) < FORGOTTEN)[:, None, None]
        write_operator(rows.masked_fill(forgotten, 0.0), arena, at, operator_dtype)


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
    operator_dtype: torch.dtype,
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
    w, decay, forgets, keys = scratch if scratch is not None else TransitionScratch.of(plan, k, g)
    channel_gates, per_program = g.dim() == 3, 1024
    _forget_kernel[(sequences, hv)](
        g, forgets, plan.cu, HV=hv, DK=dk, BLOCK=per_program // block(dk) if channel_gates else per_program,
        BK=block(dk), CHANNEL_GATES=channel_gates, num_warps=4,
    )  # fmt: skip
    shape = {"HK": hk, "HV": hv, "DK": dk, "C": CHUNK, "BK": block(dk), "PRECISION": precision}
    if plan.chunks:
        launch_solve(k, g, beta, w, keys, decay, forgets, plan, shape)
    rows = 64 if k.dtype == torch.bfloat16 else 32  # a warp group's share of a product; fp32 takes the room of two
    _advance_kernel[(-(-dk // rows), sequences * hv)](
        keys if channel_gates else k, w, decay, forgets, arena, plan.cu, plan.blob, plan.first, plan.chunk_ptr,
        t_off, **shape, BR=rows, OPERATOR=triton_operator(operator_dtype), CHANNEL_GATES=channel_gates, num_warps=4,
    )  # fmt: skip


@jit
def _forget_kernel(
    g,
    forgets,
    cu,
    HV: tl.constexpr,
    DK: tl.constexpr,
    BLOCK: tl.constexpr,
    BK: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
):
    """One program: does one head forget one interior?"""
    seq, hv = tl.program_id(0), tl.program_id(1)
    end = tl.load(cu + seq + 1)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.load(cu + seq), end, BLOCK):
        m = row + tl.arange(0, BLOCK)
        if CHANNEL_GATES:  # a token's operator is at most as large as its slowest channel decays
            d = tl.arange(0, BK)
            at = g + (m[:, None] * HV + hv) * DK + d[None, :]
            slowest = tl.max(tl.load(at, mask=(m < end)[:, None] & (d < DK)[None, :], other=-float("inf")), 1)
            total += tl.where(m < end, slowest, 0.0)
        else:
            total += tl.load(g + m * HV + hv, mask=m < end, other=0.0)
    tl.store(forgets + seq * HV + hv, (tl.sum(total, 0) < _FORGOTTEN).to(tl.int32))


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
    OPERATOR: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
):
    """One program: BR rows of T of one interior and value head, over its chunks."""
    r_block, seq, hv = tl.program_id(0), tl.program_id(1) // HV, tl.program_id(1) % HV
    r, d, c = r_block * BR + tl.arange(0, BR), tl.arange(0, BK), tl.arange(0, C)
    ok_d = d < DK
    ok = (r < DK)[:, None] & ok_d[None, :]
    start, end = tl.load(cu + seq), tl.load(cu + seq + 1)
    fresh = tl.load(first + seq) != 0
    t_at = arena + tl.multiple_of(tl.load(blobs + seq), 16) + t_off
    if tl.load(forgets + seq * HV + hv) != 0:
        store_operator(tl.zeros([BR, BK], dtype=tl.float32), t_at, hv, r, d, ok, HV, DK, OPERATOR)
        return

    rows = load_operator(t_at, hv, r, d, ok & (fresh == 0), HV, DK, OPERATOR)
    rows = tl.where(fresh & (r[:, None] == d[None, :]), 1.0, rows)
    begin = tl.load(chunk_ptr + seq)
    for chunk in range(begin, tl.load(chunk_ptr + seq + 1)):
        at = chunk * HV + hv
        in_chunk = (at * C + c[:, None]) * DK + d[None, :]
        if CHANNEL_GATES:
            keys = tl.load(k + in_chunk, mask=ok_d[None, :], other=0.0)
            factor = tl.load(decay + at * DK + d, mask=ok_d, other=0.0)[None, :]
        else:
            m = start + (chunk - begin) * C + c
            keys_at = k + (m[:, None] * HK + hv // (HV // HK)) * DK + d[None, :]
            keys = tl.load(keys_at, mask=(m < end)[:, None] & ok_d[None, :], other=0.0)
            factor = tl.load(decay + at)
        w_c = tl.load(w + in_chunk, mask=ok_d[None, :], other=0.0)
        written = tl.dot(rows.to(w_c.dtype), tl.trans(w_c), input_precision=PRECISION)
        rows = tl.dot(written.to(keys.dtype), keys, rows * factor, input_precision=PRECISION)
    if fresh | (end > start):
        store_operator(rows, t_at, hv, r, d, ok, HV, DK, OPERATOR)
