"""The triangular systems of gdn_transition, chunk by chunk in parallel, as Triton kernels: W, the keys, and e^G.

Where each key channel has a gate, L_ts = beta_t sum_d k_td k_sd e^(G_td - G_sd) is no product of two matrices that stay
in range: e^(-G_s) overflows. Blocks of SUB tokens keep it in range. Against tokens before its block, a token is measured
from the block's first one, n: e^(G_t - G_n) and e^(G_n - G_s) are both at most 1, and the product is a matrix product.
Inside a block every pair is computed by itself.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hypic.kernels._triton import jit, tl
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.wy import CHUNK

SUB = 16


def launch_solve(
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    w: Tensor,
    keys: Tensor,
    decay: Tensor,
    forgets: Tensor,
    plan: TransitionPlan,
    shape: dict[str, Any],
) -> None:
    """One launch; arguments as in gdn_transition and its scratch, ``shape`` as all its kernels take it."""
    where = plan.cu, plan.chunk_seq, plan.chunk_row
    grid, levels = (plan.chunks, shape["HV"]), CHUNK.bit_length() - 1
    if g.dim() == 2:
        _solve_kernel[grid](k, g, beta, w, decay, forgets, *where, **shape, LEVELS=levels, num_warps=4)
    else:
        _solve_channels_kernel[grid](
            k, g, beta, w, keys, decay, forgets, *where, **shape, LEVELS=levels, SUB=SUB, num_warps=8
        )


@jit
def unit_lower_inverse(lower, C, LEVELS, PRECISION):
    """(I + L)^-1 of the strictly lower triangular L [C, C].

    It starts with diagonal blocks of 2, which are their own inverses but for the sign of L, and merges pairs by
    [[P, 0], [R, Q]]^-1 = [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]], doubling their size. Unlike a product of powers of L this
    stays accurate when all keys are alike.
    """
    c = tl.arange(0, C)
    i, j = c[:, None], c[None, :]
    solved = tl.where(i == j, 1.0, 0.0) - tl.where((i >> 1) == (j >> 1), lower, 0.0)
    for level in range(1, LEVELS):  # not unrolled: ten products in IEEE fp32 would compile for minutes
        coupled = ((i >> level) > (j >> level)) & ((i >> (level + 1)) == (j >> (level + 1)))
        step = tl.dot(tl.where(coupled, lower, 0.0), solved, input_precision=PRECISION)
        solved -= tl.dot(solved, step, input_precision=PRECISION)
    return solved


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
    """One program: -W [C, K] and e^G of one chunk and value head. Rows past the interior's end are zero."""
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
    solved = unit_lower_inverse(tl.where(i > j, lower, 0.0), C, LEVELS, PRECISION)
    strength *= tl.exp(log_decay)
    w = tl.dot(solved, keys.to(tl.float32) * strength[:, None], input_precision=PRECISION)
    w *= -tl.exp(total - log_decay)[:, None]
    at = chunk.to(tl.int64) * HV + hv
    tl.store(w_out + (at * C + c[:, None]) * DK + d[None, :], w.to(w_out.dtype.element_ty), mask=(d < DK)[None, :])
    tl.store(decay_out + at, tl.exp(total))


@jit
def _solve_channels_kernel(
    k,
    g,
    beta,
    w_out,
    keys_out,
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
    SUB: tl.constexpr,
):
    """One program: -W [C, K], K' [C, K] and e^G [K] of one chunk and value head. Rows past the interior's end are zero."""
    chunk, hv = tl.program_id(0), tl.program_id(1)
    seq = tl.load(chunk_seq + chunk)
    if tl.load(forgets + seq * HV + hv) != 0:
        return
    row, end, hk = tl.load(chunk_row + chunk), tl.load(cu + seq + 1), hv // (HV // HK)
    c, d = tl.arange(0, C), tl.arange(0, BK)
    m = row + c
    ok = (m < end)[:, None] & (d < DK)[None, :]
    keys = tl.load(k + (m[:, None] * HK + hk) * DK + d[None, :], mask=ok, other=0.0).to(tl.float32)
    decays = tl.load(g + (m[:, None] * HV + hv) * DK + d[None, :], mask=ok, other=0.0)
    log_decay = tl.cumsum(decays, 0)
    strength = tl.load(beta + m * HV + hv, mask=m < end, other=0.0)
    total = tl.sum(decays, 0)

    i, j = c[:, None], c[None, :]
    lower = tl.zeros([C, C], dtype=tl.float32)
    for first in range(SUB, C, SUB):  # a block of rows against all tokens before it
        origin = tl.sum(tl.where(i == first, log_decay, 0.0), 0)[None, :]
        mine = (i >= first) & (i < first + SUB)
        late = tl.where(mine, keys * tl.exp(tl.where(mine, log_decay - origin, 0.0)), 0.0)
        early = tl.where(i < first, keys * tl.exp(tl.where(i < first, origin - log_decay, 0.0)), 0.0)
        lower = tl.dot(late, tl.trans(early), lower, input_precision=PRECISION)
    keys_of, decay_of = tl.reshape(keys, [C // SUB, SUB, BK]), tl.reshape(log_decay, [C // SUB, SUB, BK])
    place = tl.arange(0, SUB)[None, :, None]
    for column in range(SUB):  # one token of every block against those behind it in the same block
        behind = place > column
        key = tl.sum(tl.where(place == column, keys_of, 0.0), 1)[:, None, :]
        origin = tl.sum(tl.where(place == column, decay_of, 0.0), 1)[:, None, :]
        pairs = tl.where(behind, keys_of * key * tl.exp(tl.where(behind, decay_of - origin, 0.0)), 0.0)
        products = tl.reshape(tl.sum(pairs, 2), [C])
        lower += tl.where(j == i // SUB * SUB + column, products[:, None], 0.0)
    lower *= strength[:, None]

    solved = unit_lower_inverse(tl.where(i > j, lower, 0.0), C, LEVELS, PRECISION)
    w = tl.dot(solved, keys * tl.exp(log_decay) * strength[:, None], input_precision=PRECISION)
    at = chunk.to(tl.int64) * HV + hv
    in_chunk, ok_d = (at * C + c[:, None]) * DK + d[None, :], (d < DK)[None, :]
    tl.store(w_out + in_chunk, (-w).to(w_out.dtype.element_ty), mask=ok_d)
    at_end = keys * tl.exp(total[None, :] - log_decay)
    tl.store(keys_out + in_chunk, at_end.to(keys_out.dtype.element_ty), mask=ok_d)
    tl.store(decay_out + at * DK + d, tl.exp(total), mask=d < DK)
