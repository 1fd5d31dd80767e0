"""Transition operator T and zero-start end-state S of many subsequences of one GDN layer, in one pass.

T and S are rows of one stacked state [K + V, K]: T's start as the identity and meet no values, S's start at zero and
meet v (see wy.py). Chunked prefill calls this once per chunk; a call that continues reads the rows from the artifact
blob and moves them on, which is the monoid's composition (T1 T2, S1 T2 + S2). HYPIC, arXiv 2607.01299.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import BLOB_ALIGN, Impl, blob_view, pick_impl, to_device
from hypic.kernels._triton import Precision, block, jit, require_triton, tl, triton_dtype
from hypic.kernels.gdn_inputs import InputsPlan, gdn_inputs
from hypic.kernels.wy import CHUNK, Chunk

__all__ = ["InputsPlan", "TransitionPlan", "gdn_inputs", "gdn_transition", "transition_scratch"]


class TransitionLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    cu: list[int]
    blob: list[int]
    first: list[bool]


@dataclass(frozen=True, kw_only=True)
class TransitionPlan:
    """N subsequences, the same for every layer; built once per batch by :meth:`build`; int64 on the device.

    Attributes:
        cu: [N+1] rows cu[i]:cu[i+1] of k, v, g, beta belong to subsequence i (none is fine).
        blob: [N] byte offset in the arena of the artifact under construction.
        first: [N] 1: start from (identity, 0); 0: go on from what the blob holds.
        chunk_seq, chunk_row: [C] subsequence and first row of every chunk of up to CHUNK rows.
        chunk_ptr: [N+1] chunks of subsequence i.
    """

    cu: Tensor
    blob: Tensor
    first: Tensor
    chunk_seq: Tensor
    chunk_row: Tensor
    chunk_ptr: Tensor
    lists: TransitionLists

    @classmethod
    def build(
        cls, *, cu: Sequence[int], blob: Sequence[int], first: Sequence[bool], device: torch.device | str
    ) -> TransitionPlan:
        """Plan the subsequences; all host data travels in one copy.

        Raises: ValueError if ``cu`` decreases or a blob is not aligned to BLOB_ALIGN bytes.
        """
        if any(offset % BLOB_ALIGN for offset in blob):
            raise ValueError(f"blob {list(blob)}: must be multiples of {BLOB_ALIGN} bytes")
        edges = np.asarray(cu, np.int64)
        starts, lengths = edges[:-1], edges[1:] - edges[:-1]
        if (lengths < 0).any():
            raise ValueError(f"cu {list(cu)} decreases")
        chunks = -(-lengths // CHUNK)
        chunk_seq = np.repeat(np.arange(len(lengths)), chunks)
        chunk_ptr = np.concatenate([[0], chunks.cumsum()])
        chunk_row = starts[chunk_seq] + (np.arange(len(chunk_seq)) - chunk_ptr[chunk_seq]) * CHUNK
        on_device = to_device(
            {
                "cu": cu,
                "blob": blob,
                "first": np.asarray(first, np.int64),
                "chunk_seq": chunk_seq,
                "chunk_row": chunk_row,
                "chunk_ptr": chunk_ptr,
            },
            device,
        )
        return cls(**on_device, lists=TransitionLists(list(cu), list(blob), list(first)))


def gdn_transition(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: TransitionPlan,
    state_dtype: torch.dtype = torch.float32,
    scratch: Tensor | None = None,
    precision: Precision = "tf32",
    impl: Impl | None = None,
) -> None:
    """Write T and S of every subsequence into its blob.

    Two launches: (I + L)^-1 of all chunks in parallel, then 64 (bf16: 32) rows of [T; S] per program over its chunks in order.
    Budget per chunk and head at K = V = 128: 8 MFLOP in the second, 6 in the first (times 3 for tf32x3): for 8,192
    tokens and 32 heads 60 GFLOP, about 0.4 ms a layer at 150 TFLOP/s of effective tf32.

    Args:
        k: fp32 [M, HK, K], l2-normalised. v: fp32 [M, HV, V]. g (log decay), beta: fp32 [M, HV]. See gdn_inputs.
        arena: uint8 [bytes]. t_off, s_off: byte offsets inside a blob of this layer's T [HV, K, K], S [HV, V, K].
        state_dtype: of T and S in the blob, fp32 or bf16; rounded once per call.
        scratch: fp32 [>= transition_scratch(plan, HV)], free to share between layers of one stream; None: allocated.
        precision: of the matrix products in the Triton kernels; between chunks the state rows are fp32.
    Raises: ValueError if shapes disagree.
    """
    if v.shape[1] % k.shape[1] or not k.shape[0] == v.shape[0] == g.shape[0] == beta.shape[0]:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, g {tuple(g.shape)}, beta {tuple(beta.shape)} disagree"
        )
    if pick_impl(impl, k) == "triton":
        _gdn_transition_triton(k, v, g, beta, arena, t_off, s_off, plan, state_dtype, scratch, precision)
    else:
        _gdn_transition_torch(k, v, g, beta, arena, t_off, s_off, plan, state_dtype)


def transition_scratch(plan: TransitionPlan, num_v_heads: int) -> int:
    """fp32 elements of scratch that the Triton kernel of :func:`gdn_transition` needs."""
    return len(plan.chunk_seq) * num_v_heads * CHUNK * CHUNK


# ---------------------------------------------------------------- torch reference


def _gdn_transition_torch(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: TransitionPlan,
    state_dtype: torch.dtype,
) -> None:
    hv, dk, dv = v.shape[1], k.shape[2], v.shape[2]
    cu, blobs, first = plan.lists
    for i, blob in enumerate(blobs):
        t = blob_view(arena, blob + t_off, (hv, dk, dk), state_dtype)
        s = blob_view(arena, blob + s_off, (hv, dv, dk), state_dtype)
        if first[i]:
            t.copy_(torch.eye(dk, device=k.device))
            s.zero_()
        if cu[i + 1] == cu[i]:
            continue
        rows = torch.cat([t, s], 1).float()
        part = slice(cu[i], cu[i + 1])
        for chunk_k, chunk_v, chunk_g, chunk_beta in zip(*(_chunks(x[part]) for x in (k, v, g, beta)), strict=True):
            chunk = Chunk.of(chunk_k.repeat_interleave(hv // k.shape[1], 0), chunk_g, chunk_beta)
            no_values = chunk_v.new_zeros(*chunk_v.shape[:-1], dk)
            rows, _ = chunk.advance(rows, torch.cat([no_values, chunk_v], -1))
        t.copy_(rows[:, :dk])
        s.copy_(rows[:, dk:])


def _chunks(x: Tensor) -> list[Tensor]:
    """[n, H, ...] -> [H, <= CHUNK, ...] pieces in order."""
    return [piece.transpose(0, 1) for piece in x.split(CHUNK)]


# ---------------------------------------------------------------- Triton


def _gdn_transition_triton(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: TransitionPlan,
    state_dtype: torch.dtype,
    scratch: Tensor | None,
    precision: Precision,
) -> None:
    require_triton(k)
    if not all(t.is_contiguous() and t.dtype == torch.float32 for t in (k, v, g, beta)):
        raise ValueError("k, v, g and beta must be contiguous fp32, as gdn_inputs gives them")
    (_, hk, dk), (_, hv, dv) = k.shape, v.shape
    if block(dk) > 256:
        raise ValueError(f"head_k_dim {dk}: the Triton kernel takes at most 256; use impl='torch'")
    chunks, sequences = len(plan.chunk_seq), len(plan.blob)
    if sequences == 0:
        return
    if scratch is None:
        scratch = k.new_empty(transition_scratch(plan, hv))
    shape = {"HK": hk, "HV": hv, "DK": dk, "C": CHUNK, "BK": block(dk), "PRECISION": precision}
    if chunks:
        _solve_kernel[(chunks, hv)](
            k, g, beta, scratch, plan.cu, plan.chunk_seq, plan.chunk_row, **shape, LEVELS=CHUNK.bit_length() - 1,
            num_warps=4,
        )  # fmt: skip
    rows = 64 if dk <= 128 and state_dtype == torch.float32 else 32  # more would spill registers
    blocks = -(-dk // rows) + -(-dv // rows)
    _advance_kernel[(blocks, sequences * hv)](
        k, v, g, beta, scratch, arena, plan.cu, plan.blob, plan.first, plan.chunk_row, plan.chunk_ptr,
        t_off // state_dtype.itemsize, s_off // state_dtype.itemsize, **shape, DV=dv, BR=rows,
        STATE=triton_dtype(state_dtype), STATE_BYTES=state_dtype.itemsize, num_warps=8,
    )  # fmt: skip


@jit
def _chunk_inputs(
    k, g, beta, row, end, hk, hv,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k [C, BK], log_decay [C] and beta [C] of a chunk; rows past its end are zero and change nothing."""
    m, d = row + tl.arange(0, C), tl.arange(0, BK)
    keys = tl.load(k + (m[:, None] * HK + hk) * DK + d[None, :], mask=(m < end)[:, None] & (d < DK)[None, :], other=0.0)
    log_decay = tl.cumsum(tl.load(g + m * HV + hv, mask=m < end, other=0.0), 0)
    return keys, log_decay, tl.load(beta + m * HV + hv, mask=m < end, other=0.0)


@jit
def _solve_kernel(
    k,
    g,
    beta,
    inverse,
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
    """One program: (I + L)^-1 [C, C] of one chunk and value head.

    Diagonal blocks of 16 by forward substitution, all at once; then pairs of blocks are merged by
    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]], doubling their size. Unlike a product of powers of L this
    stays accurate when all keys are alike.
    """
    chunk, hv = tl.program_id(0), tl.program_id(1)
    row, end = tl.load(chunk_row + chunk), tl.load(cu + tl.load(chunk_seq + chunk) + 1)
    keys, log_decay, strength = _chunk_inputs(k, g, beta, row, end, hv // (HV // HK), hv, HK, HV, DK, C, BK)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    between = tl.exp(tl.where(i > j, log_decay[:, None] - log_decay[None, :], 0.0))
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * strength[:, None] * between
    lower = tl.where(i > j, lower, 0.0)
    in_block = (i >> 4) == (j >> 4)
    solved = tl.where(i == j, 1.0, 0.0)
    upper = tl.where(in_block, tl.trans(lower), 0.0)
    for r in range(1, 16):
        row_r = tl.sum(tl.where((j & 15) == r, upper, 0.0), 1)
        known = tl.sum(row_r[:, None] * solved, 0)
        solved -= tl.where(in_block & ((i & 15) == r), known[None, :], 0.0)
    for level in tl.static_range(4, LEVELS):
        coupled = ((i >> level) > (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1)))
        step = tl.dot(tl.where(coupled, lower, 0.0), solved, input_precision=PRECISION)
        solved -= tl.dot(solved, step, input_precision=PRECISION)
    tl.store(inverse + ((chunk.to(tl.int64) * HV + hv) * C + i) * C + j, solved)


@jit
def _advance_kernel(
    k,
    v,
    g,
    beta,
    inverse,
    arena,
    cu,
    blobs,
    first,
    chunk_row,
    chunk_ptr,
    t_off,
    s_off,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    DV: tl.constexpr,
    BR: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BYTES: tl.constexpr,
):
    """One program: BR rows of T or S of one subsequence and value head, over its chunks."""
    T_BLOCKS: tl.constexpr = (DK + BR - 1) // BR
    r_block, seq, hv = tl.program_id(0), tl.program_id(1) // HV, tl.program_id(1) % HV
    is_t = r_block < T_BLOCKS
    r = (r_block - tl.where(is_t, 0, T_BLOCKS)) * BR + tl.arange(0, BR)
    d, c = tl.arange(0, BK), tl.arange(0, C)
    ok_r = r < tl.where(is_t, DK, DV)
    ok = ok_r[:, None] & (d < DK)[None, :]
    start, end = tl.load(cu + seq), tl.load(cu + seq + 1)
    fresh = tl.load(first + seq) != 0

    blob = tl.multiple_of(tl.load(blobs + seq) // STATE_BYTES, 16 // STATE_BYTES)
    head = tl.where(is_t, t_off + hv * DK * DK, s_off + hv * DV * DK)
    rows_at = arena.to(tl.pointer_type(STATE)) + blob + head + r[:, None] * DK + d[None, :]
    identity = tl.where(is_t & (r[:, None] == d[None, :]), 1.0, 0.0)
    rows = tl.where(fresh, identity, tl.load(rows_at, mask=ok & (fresh == 0), other=0.0).to(tl.float32))

    for chunk in range(tl.load(chunk_ptr + seq), tl.load(chunk_ptr + seq + 1)):
        m = tl.load(chunk_row + chunk)
        keys, log_decay, strength = _chunk_inputs(k, g, beta, m, end, hv // (HV // HK), hv, HK, HV, DK, C, BK)
        total = tl.sum(tl.where(c == C - 1, log_decay, 0.0), 0)
        token = m + c
        values_at = v + (token[:, None] * HV + hv) * DV + r[None, :]
        values = tl.load(values_at, mask=(token < end)[:, None] & ok_r[None, :] & (is_t == 0), other=0.0)
        read = tl.dot(keys, tl.trans(rows), input_precision=PRECISION) * tl.exp(log_decay)[:, None]
        solved = tl.load(inverse + ((chunk * HV + hv) * C + c[:, None]) * C + c[None, :])
        written = tl.dot(solved, strength[:, None] * (values - read), input_precision=PRECISION)
        keys_end = keys * tl.exp(total - log_decay)[:, None]
        rows = tl.dot(tl.trans(written), keys_end, rows * tl.exp(total), input_precision=PRECISION)
    if fresh | (end > start):
        tl.store(rows_at, rows.to(STATE), mask=ok)
