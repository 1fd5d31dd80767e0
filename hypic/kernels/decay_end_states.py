"""Zero-start end-states S of compiled interiors where the transition operator is one decay per head.

As gdn_end_states: h_end, which the native kernel leaves in a row's slot, and h_w, the state after the seam, give
S = h_end - e^g h_w, with g as it is stored. What is lost: u |h_end| (u of the pool's type, from the native kernel's own
rounding) plus 2^-24 (|h_end| + 2 |e^g h_w|) in fp32, plus the rounding of S to its type. A slow head (e^g near 1) costs no
more than that: h_w is the state of w tokens that started from zero, and behind any prefix a link has e^g h + S, whose own
rounding is of the same size. A link that stands where the compile stood gives h_end back up to the rounding of S.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl
from hypic.kernels._triton import block, constexpr, jit, require_triton, tl, triton_dtype
from hypic.kernels.compile_plans import IN_BLOB, NO_STATE, EndStatesPlan
from hypic.kernels.gdn_end_states import end_states_torch

_IN_BLOB, _NO_STATE = constexpr(IN_BLOB), constexpr(NO_STATE)


def decay_end_states(
    ssm_pool: Tensor,
    seam_states: Tensor,
    *,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: EndStatesPlan,
    state_dtype: torch.dtype = torch.float32,
    impl: Impl | None = None,
) -> None:
    """Write S of every row that ends, and h_w itself into the S region of every row that does not.

    One launch. Budget (4 rows, H = V = 64, K = 128, fp32): two states and S, 24 MiB: 6 us at 4.3 TB/s.

    Args:
        ssm_pool: [slots, H, V, K], fp32 or bf16; call this *after* the native kernel.
        seam_states: [rows, H, V, K] fp32, the scratch pool that ``plan.seam`` names.
        arena: uint8 [bytes]. t_off, s_off: byte offsets inside a blob of this layer's log decays [H], fp32, and
            S [H, V, K] in state_dtype (fp32 or bf16). h_w waits there in that type between two calls.
    Raises: ValueError if shapes disagree.
    """
    if ssm_pool.shape[1:] != seam_states.shape[1:]:
        raise ValueError(f"ssm_pool {tuple(ssm_pool.shape)} and seam_states {tuple(seam_states.shape)} disagree")
    if pick_impl(impl, ssm_pool) == "triton":
        _decay_end_states_triton(ssm_pool, seam_states, arena, t_off, s_off, plan, state_dtype)
        return

    def carry(h: Tensor, blob: int) -> Tensor:
        return blob_view(arena, blob + t_off, h.shape[:1], torch.float32).exp()[:, None, None] * h

    end_states_torch(ssm_pool, seam_states, arena, s_off, plan, state_dtype, carry)


def _decay_end_states_triton(
    ssm_pool: Tensor,
    seam_states: Tensor,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: EndStatesPlan,
    state_dtype: torch.dtype,
) -> None:
    require_triton(ssm_pool)
    heads, dv, dk = ssm_pool.shape[1:]
    if not ssm_pool[0].is_contiguous() or not seam_states.is_contiguous():
        raise ValueError(f"slots of ssm_pool {ssm_pool.stride()} and seam_states must be contiguous")
    rows, size = len(plan.blob), 2048
    if rows == 0:
        return
    _decay_end_states_kernel[(-(-dv * dk // size), rows * heads)](
        ssm_pool, seam_states, arena, plan.slot, plan.seam, plan.ends, plan.blob, ssm_pool.stride(0), t_off // 4,
        s_off // state_dtype.itemsize, H=heads, N=dv * dk, BLOCK=min(block(dv * dk), size),
        STATE=triton_dtype(state_dtype), STATE_BYTES=state_dtype.itemsize, num_warps=4,
    )  # fmt: skip


@jit
def _decay_end_states_kernel(
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
    H: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE: tl.constexpr,
    STATE_BYTES: tl.constexpr,
):
    """One program: BLOCK entries of S of one row and head."""
    row, head = tl.program_id(1) // H, tl.program_id(1) % H
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok, inner = at < N, head * N + at
    seam, is_end, blob = tl.load(seams + row), tl.load(ends + row) != 0, tl.load(blobs + row)
    s_at = arena.to(tl.pointer_type(STATE)) + blob // STATE_BYTES + s_off + inner
    h = tl.load(s_at, mask=ok & (seam == _IN_BLOB), other=0.0).to(tl.float32)
    h += tl.load(seam_states + tl.maximum(seam, 0) * H * N + inner, mask=ok & (seam >= 0), other=0.0)
    if is_end:
        log_decay = tl.load(
            arena.to(tl.pointer_type(tl.float32)) + blob // 4 + t_off + head, mask=seam != _NO_STATE, other=0.0
        )
        end = tl.load(ssm_pool + tl.load(slots + row) * ssm_stride + inner, mask=ok, other=0.0).to(tl.float32)
        h = end - tl.exp(log_decay) * h
    tl.store(s_at, h.to(STATE), mask=ok)
