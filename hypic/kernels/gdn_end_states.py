"""Zero-start end-states S of compiled interiors, from states that are computed anyway.

The native kernel leaves a compiling row's end state h_end in its slot, and with h_w the state after the seam
h_end = h_w T + S. So S = h_end - h_w T: no second pass over the values. T is read as it is stored: in a link whose seam
also ends in h_w, what rounding did to T cancels, and h_w T + S is h_end up to the rounding of S.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl
from hypic.kernels._triton import Precision, block, constexpr, jit, require_triton, tl, triton_dtype
from hypic.kernels.compile_plans import IN_BLOB, NO_STATE, EndStatesPlan
from hypic.kernels.operators import apply_operator, read_operator, triton_operator

__all__ = ["IN_BLOB", "NO_STATE", "EndStatesPlan", "gdn_end_states"]

_IN_BLOB = constexpr(IN_BLOB)


def gdn_end_states(
    ssm_pool: Tensor,
    seam_states: Tensor,
    *,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: EndStatesPlan,
    state_dtype: torch.dtype = torch.float32,
    operator_dtype: torch.dtype | None = None,
    precision: Precision = "tf32",
    impl: Impl | None = None,
) -> None:
    """Write S = h_end - h_w T of every row that ends, and h_w itself into the S region of every row that does not.

    One launch. Budget (4 rows, HV = 32, K = V = 128, bf16): T 4 MiB, two states in fp32 and S 20 MiB: 6 us at 4.3 TB/s.

    Args:
        ssm_pool: [slots, HV, V, K], fp32 or bf16; call this *after* the native kernel.
        seam_states: [rows, HV, V, K] fp32, the scratch pool that ``plan.seam`` names.
        arena: uint8 [bytes]. t_off, s_off: byte offsets inside a blob of this layer's T [HV, K, K] and S [HV, V, K].
        state_dtype: of S in the blob, fp32 or bf16. h_w waits there in that type between two calls.
        operator_dtype: of T, see hypic.kernels.operators; None: state_dtype.
        precision: of h_w T in the Triton kernel; let it be that of gdn_chain.
    Raises: ValueError if shapes disagree.
    """
    if ssm_pool.shape[1:] != seam_states.shape[1:]:
        raise ValueError(f"ssm_pool {tuple(ssm_pool.shape)} and seam_states {tuple(seam_states.shape)} disagree")
    operator = operator_dtype or state_dtype
    if pick_impl(impl, ssm_pool) == "triton":
        _gdn_end_states_triton(ssm_pool, seam_states, arena, t_off, s_off, plan, state_dtype, operator, precision)
    else:
        _gdn_end_states_torch(ssm_pool, seam_states, arena, t_off, s_off, plan, state_dtype, operator)


def _gdn_end_states_torch(
    ssm_pool: Tensor,
    seam_states: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: EndStatesPlan,
    state_dtype: torch.dtype,
    operator_dtype: torch.dtype,
) -> None:
    hv, _, dk = ssm_pool.shape[1:]

    def carry(h: Tensor, blob: int) -> Tensor:
        return h @ read_operator(arena, blob + t_off, hv, dk, operator_dtype)

    end_states_torch(ssm_pool, seam_states, arena, s_off, plan, state_dtype, carry)


def end_states_torch(
    ssm_pool: Tensor,
    seam_states: Tensor,
    arena: Tensor,
    s_off: int,
    plan: EndStatesPlan,
    state_dtype: torch.dtype,
    carry: Callable[[Tensor, int], Tensor],
) -> None:
    """The reference of every family: ``carry(h, blob)`` is h [H, V, K] behind the interior whose blob starts there."""
    shape, ends = ssm_pool.shape[1:], ssm_pool[plan.slot].float()
    for i, (seam, is_end, blob) in enumerate(zip(*plan.lists, strict=True)):
        s = blob_view(arena, blob + s_off, shape, state_dtype)
        if seam == NO_STATE:
            s.copy_(ends[i]) if is_end else s.zero_()
            continue
        h = s.float() if seam == IN_BLOB else seam_states[seam]
        s.copy_(ends[i] - carry(h, blob) if is_end else h)


def _gdn_end_states_triton(
    ssm_pool: Tensor,
    seam_states: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: EndStatesPlan,
    state_dtype: torch.dtype,
    operator_dtype: torch.dtype,
    precision: Precision,
) -> None:
    require_triton(ssm_pool)
    hv, dv, dk = ssm_pool.shape[1:]
    if block(dk) > 128:
        raise ValueError(f"head_k_dim {dk}: the Triton kernel keeps T in shared memory, at most 128; use impl='torch'")
    if ssm_pool.stride()[1:] != (dv * dk, dk, 1) or not seam_states.is_contiguous():
        raise ValueError(f"slots of ssm_pool {ssm_pool.stride()} and seam_states must be contiguous")
    rows, bv = len(plan.blob), min(block(dv), 32)
    if rows == 0:
        return
    _end_states_kernel[(-(-dv // bv), rows * hv)](
        ssm_pool, seam_states, arena, plan.slot, plan.seam, plan.ends, plan.blob, ssm_pool.stride(0),
        t_off, s_off, HV=hv, DK=dk, DV=dv, BK=block(dk), BV=bv,
        STATE=triton_dtype(state_dtype), OPERATOR=triton_operator(operator_dtype),
        PRECISION=precision, num_warps=8,
    )  # fmt: skip


@jit
def _end_states_kernel(
    ssm_pool,
    seam_states,
    arena,
    slots,
    seams,
    ends,
    blobs,
    ssm_stride,
    t_off,
    s_off,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    STATE: tl.constexpr,
    OPERATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BV rows of S of one row and value head."""
    v_block, row, hv = tl.program_id(0), tl.program_id(1) // HV, tl.program_id(1) % HV
    d, v = tl.arange(0, BK), v_block * BV + tl.arange(0, BV)
    ok_d = d < DK
    ok = (v < DV)[:, None] & ok_d[None, :]
    inner = (hv * DV + v[:, None]) * DK + d[None, :]
    seam, is_end = tl.load(seams + row), tl.load(ends + row) != 0
    blob = arena + tl.multiple_of(tl.load(blobs + row), 16)

    s_at = (blob + s_off).to(tl.pointer_type(STATE)) + inner
    h = tl.load(s_at, mask=ok & (seam == _IN_BLOB), other=0.0).to(tl.float32)
    h += tl.load(seam_states + tl.maximum(seam, 0) * HV * DV * DK + inner, mask=ok & (seam >= 0), other=0.0)
    if is_end:
        nothing = tl.zeros([BV, BK], dtype=tl.float32)
        carried = apply_operator(h, nothing, blob + t_off, hv, d, HV, DK, OPERATOR, PRECISION)
        end = tl.load(ssm_pool + tl.load(slots + row) * ssm_stride + inner, mask=ok, other=0.0).to(tl.float32)
        h = end - carried
    tl.store(s_at, h.to(STATE), mask=ok)
