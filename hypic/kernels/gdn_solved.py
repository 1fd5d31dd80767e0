"""Transition operator T of the interiors of one GDN layer, from what SGLang's own pass over the same tokens has solved.

A chunk of C tokens does T <- e^G T - (T W^T) K' to T as to any state (see gdn_transition), and SGLang's chunk kernels make
W for their own states: with G_t the running sum of log decays since the chunk's first token,

    W = (I + L)^-1 (beta e^(G_t) K),     T <- e^(G_C) T - sum_t e^(G_C - G_t) (T w_t) k_t.

So T costs two products per chunk and nothing else, neither keys nor gates nor the triangular systems. SGLang's chunks begin
where a row does, an interior behind the row's seam. Of the chunk in which a seam of s tokens ends, (I + L)^-1 of the other
tokens is the lower right block of the whole one's, both being triangular, so W is made again from that block, beta, keys and
G_t - G_(s-1). Stock's operands are of the model's 16-bit type, and so are ours: T is the operator that stock's pass applied.
HYPIC, arXiv 2607.01299; Gated DeltaNet, arXiv 2412.06464.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import BLOB_ALIGN, Impl, pick_impl, to_device
from hypic.kernels._triton import block, constexpr, jit, require_triton, tl
from hypic.kernels.gdn_transition import FORGOTTEN
from hypic.kernels.operators import load_operator, read_operator, store_operator, triton_operator, write_operator
from hypic.kernels.wy import CHUNK

_FORGOTTEN = constexpr(FORGOTTEN)


class SolvedChunks(NamedTuple):
    """What SGLang's chunk kernels know of the T tokens of a batch, in chunks of CHUNK that begin anew with each row.

    Attributes:
        k: [T, HK, K], l2-normalised. g: fp32 [T, HV], log decays summed up since the chunk's first token. beta: [T, HV].
        w: [T, HV, K], W. inverse: [T, HV, CHUNK], row t of its chunk's (I + L)^-1. k, w, inverse: the model's type.
    """

    k: Tensor
    g: Tensor
    beta: Tensor
    w: Tensor
    inverse: Tensor


class SolvedLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    tok: list[int]
    length: list[int]
    skip: list[int]
    blob: list[int]
    first: list[bool]


@dataclass(frozen=True, kw_only=True)
class SolvedPlan:
    """Compiling rows of a batch, the same for every layer; built once per batch by :meth:`build`; int64 on the device.

    Attributes:
        tok: [N] first token of row i among those of SolvedChunks. length: [N] its tokens.
        skip: [N] leading tokens that are no part of the interior. blob: [N] byte offset in the arena of its artifact.
        first: [N] 1: T starts as the identity; 0: go on from what the blob holds.
    """

    tok: Tensor
    length: Tensor
    skip: Tensor
    blob: Tensor
    first: Tensor
    lists: SolvedLists

    @classmethod
    def build(
        cls,
        *,
        tok: Sequence[int],
        length: Sequence[int],
        skip: Sequence[int],
        blob: Sequence[int],
        first: Sequence[bool],
        device: torch.device | str,
    ) -> SolvedPlan:
        """All host data travels in one copy. Raises: ValueError if a skip exceeds its length or a blob is not aligned."""
        if any(offset % BLOB_ALIGN for offset in blob):
            raise ValueError(f"blob {list(blob)}: must be multiples of {BLOB_ALIGN} bytes")
        if any(s > n for s, n in zip(skip, length, strict=True)):
            raise ValueError(f"skip {list(skip)} exceeds length {list(length)}")
        on_device = to_device(
            {"tok": tok, "length": length, "skip": skip, "blob": blob, "first": np.asarray(first, np.int64)}, device
        )
        return cls(**on_device, lists=SolvedLists(list(tok), list(length), list(skip), list(blob), list(first)))


def gdn_transition_solved(
    chunks: SolvedChunks,
    *,
    arena: Tensor,
    t_off: int,
    plan: SolvedPlan,
    operator_dtype: torch.dtype = torch.float32,
    impl: Impl | None = None,
) -> None:
    """Write T of every interior into its blob; heads that forget, and calls that go on, as in gdn_transition.

    One launch: 64 rows of T per program over its chunks in order.
    Budget (8,192 tokens, HV = 32, K = 128, bf16): 17 GFLOP of bf16; 64 MiB of W and, per value head, of keys read twice.

    Args:
        arena: uint8 [bytes]. t_off: byte offset inside a blob of this layer's T [HV, K, K].
        operator_dtype: of T in the blob, see hypic.kernels.operators; rounded once per call.
    Raises: ValueError if shapes disagree or a tensor is not contiguous.
    """
    k, g, beta, w, inverse = chunks
    (tokens, _, dk), hv = k.shape, g.shape[1]
    if (
        w.shape != (tokens, hv, dk)
        or inverse.shape != (tokens, hv, CHUNK)
        or not g.shape == beta.shape == (tokens, hv)
        or hv % k.shape[1]
    ):
        raise ValueError(f"shapes of solved chunks disagree: {[tuple(x.shape) for x in chunks]}")
    if not all(x.is_contiguous() for x in chunks) or g.dtype != torch.float32:
        raise ValueError("solved chunks must be contiguous, and g fp32, as SGLang's kernels leave them")
    if pick_impl(impl, k) == "triton":
        _solved_triton(chunks, arena, t_off, plan, operator_dtype)
    else:
        _solved_torch(chunks, arena, t_off, plan, operator_dtype)


# ---------------------------------------------------------------- torch reference


def _solved_torch(
    chunks: SolvedChunks, arena: Tensor, t_off: int, plan: SolvedPlan, operator_dtype: torch.dtype
) -> None:
    (_, hk, dk), hv = chunks.k.shape, chunks.g.shape[1]
    for start, n, seam, blob, fresh in zip(*plan.lists, strict=True):
        if seam >= n and not fresh:
            continue
        total, eye = torch.zeros(hv, device=arena.device), torch.eye(dk, device=arena.device).expand(hv, dk, dk)
        rows = eye if fresh else read_operator(arena, blob + t_off, hv, dk, operator_dtype)
        for at in range(seam // CHUNK * CHUNK, n if seam < n else 0, CHUNK):
            part, cut = slice(start + at, start + min(at + CHUNK, n)), max(seam - at, 0)
            k, g, beta, w, inverse = (x[part].float().transpose(0, 1) for x in chunks)
            k = k.repeat_interleave(hv // hk, 0)
            before = g[:, cut - 1] if cut else torch.zeros_like(g[:, 0])
            k, g, beta = k[:, cut:], g[:, cut:] - before[:, None], beta[:, cut:]
            if cut:
                w = inverse[:, cut:, cut : k.shape[1] + cut] @ (k * (beta * g.exp())[..., None])
            end = g[:, -1:]
            written = rows @ w[:, -k.shape[1] :].mT * (end - g).exp()[:, None]
            rows, total = rows * end.exp()[..., None] - written @ k, total + end[:, 0]
        write_operator(rows.masked_fill((total < FORGOTTEN)[:, None, None], 0.0), arena, blob + t_off, operator_dtype)


# ---------------------------------------------------------------- Triton


def _solved_triton(
    chunks: SolvedChunks, arena: Tensor, t_off: int, plan: SolvedPlan, operator_dtype: torch.dtype
) -> None:
    require_triton(chunks.k)
    (_, hk, dk), hv, rows = chunks.k.shape, chunks.g.shape[1], 64
    if block(dk) > 128:
        raise ValueError(f"head_k_dim {dk}: the Triton kernels take at most 128, as the chain's; use impl='torch'")
    if not len(plan.tok):
        return
    _solved_kernel[(-(-dk // rows), len(plan.tok) * hv)](
        *chunks, arena, plan.tok, plan.length, plan.skip, plan.blob, plan.first, t_off,
        HK=hk, HV=hv, DK=dk, C=CHUNK, BK=block(dk), BR=rows, OPERATOR=triton_operator(operator_dtype), num_warps=4,
    )  # fmt: skip


@jit
def _solved_kernel(
    k,
    g,
    beta,
    w,
    inverse,
    arena,
    toks,
    lengths,
    skips,
    blobs,
    first,
    t_off,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    OPERATOR: tl.constexpr,
):
    """One program: BR rows of T of one interior and value head, over its chunks."""
    r_block, seq, hv = tl.program_id(0), tl.program_id(1) // HV, tl.program_id(1) % HV
    hk = hv // (HV // HK)
    r, d, c = r_block * BR + tl.arange(0, BR), tl.arange(0, BK), tl.arange(0, C)
    ok_d = (d < DK)[None, :]
    ok = (r < DK)[:, None] & ok_d
    tok = tl.load(toks + seq)
    length, skip = tl.load(lengths + seq).to(tl.int32), tl.load(skips + seq).to(tl.int32)
    # from here on tokens count from the row's first, in 32 bits: pointers in 64 would not fit into registers
    k, w = k + (tok * HK + hk) * DK, w + (tok * HV + hv) * DK
    g, beta, inverse = g + tok * HV + hv, beta + tok * HV + hv, inverse + (tok * HV + hv) * C
    fresh = tl.load(first + seq) != 0
    t_at = arena + tl.multiple_of(tl.load(blobs + seq), 16) + t_off
    begin = skip // C * C  # of the first chunk with tokens of the interior
    before = tl.load(g + (skip - 1) * HV, mask=skip > begin, other=0.0)

    total = tl.zeros([C], dtype=tl.float32)
    for at in range(begin, length, C * C):  # C chunks at a time
        last = tl.minimum(at + c * C + C, length) - 1
        total += tl.load(g + last * HV, mask=at + c * C < length, other=0.0)
    if (tl.sum(total, 0) - before < _FORGOTTEN) & (skip < length):
        store_operator(tl.zeros([BR, BK], dtype=tl.float32), t_at, hv, r, d, ok, HV, DK, OPERATOR)
        return

    in_first = begin + c
    live = (in_first >= skip) & (in_first < length)
    cut = (skip > begin) & (skip < length)  # the seam ends inside of a chunk
    first_keys = k + in_first[:, None] * (HK * DK) + d[None, :]
    log_decay = tl.load(g + in_first * HV, mask=live, other=before) - before
    w_c = tl.zeros([C, BK], dtype=w.dtype.element_ty)
    if cut:
        keys = tl.load(first_keys, mask=live[:, None] & ok_d, other=0.0).to(tl.float32)
        strength = tl.load(beta + in_first * HV, mask=live, other=0.0).to(tl.float32) * tl.exp(log_decay)
        inverse_at = inverse + in_first[:, None] * (HV * C) + c[None, :]
        solved = tl.load(inverse_at, mask=live[:, None] & live[None, :], other=0.0)
        w_c = tl.dot(solved, (keys * strength[:, None]).to(solved.dtype), input_precision="ieee").to(w_c.dtype)

    rows = load_operator(t_at, hv, r, d, ok & (fresh == 0), HV, DK, OPERATOR)
    rows = tl.where(fresh & (r[:, None] == d[None, :]), 1.0, rows)
    at = tl.where(skip < length, begin, length)
    if cut:
        keys = tl.load(first_keys, mask=live[:, None] & ok_d, other=0.0)
        end = tl.load(g + (tl.minimum(begin + C, length) - 1) * HV) - before
        written = tl.dot(rows.to(w_c.dtype), tl.trans(w_c), input_precision="ieee")
        written *= -tl.exp(end - log_decay)[None, :]
        rows = tl.dot(written.to(keys.dtype), keys, rows * tl.exp(end), input_precision="ieee")
        at = begin + C
    for start in range(at, length, C):
        m = start + c
        live = m < length
        keys = tl.load(k + m[:, None] * (HK * DK) + d[None, :], mask=live[:, None] & ok_d, other=0.0)
        w_c = tl.load(w + m[:, None] * (HV * DK) + d[None, :], mask=live[:, None] & ok_d, other=0.0)
        end = tl.load(g + (tl.minimum(start + C, length) - 1) * HV)
        log_decay = tl.load(g + m * HV, mask=live, other=0.0)
        factor = -tl.exp(tl.where(live, end - log_decay, 0.0))
        written = tl.dot(rows.to(w_c.dtype), tl.trans(w_c), input_precision="ieee") * factor[None, :]
        rows = tl.dot(written.to(keys.dtype), keys, rows * tl.exp(end), input_precision="ieee")
    if fresh | (length > skip):
        store_operator(rows, t_at, hv, r, d, ok, HV, DK, OPERATOR)
