"""gdn_end_states against S = h_end - h_w T in float64."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, Case, Heads, Target, assert_close, sizes

from hypic.kernels.gdn_end_states import IN_BLOB, NO_STATE, EndStatesPlan, gdn_end_states


@pytest.mark.parametrize(
    ("state_dtype", "operator_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)],
    ids=str,
)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads", sizes([Heads(), Heads(1, 1, 5, 3), Heads(1, 3, 70, 90)], [Heads(), Heads(1, 1, 5, 3)]), ids=str
)
def test_every_kind_of_row(
    heads: Heads,
    pool_dtype: torch.dtype,
    state_dtype: torch.dtype,
    operator_dtype: torch.dtype | None,
    target: Target,
) -> None:
    """All five in one call: seam from scratch, from the blob, none; a seam that waits; an empty interior."""
    case = Case(
        heads, tokens=0, slots=6, blobs=6, pool_dtype=pool_dtype, state_dtype=state_dtype, operator_dtype=operator_dtype,
        device=target.device,
    )  # fmt: skip
    slots, blobs = [5, 2, 0, 4, 3], [3, 0, 1, 5, 2]
    seam, ends = [1, IN_BLOB, NO_STATE, 0, NO_STATE], [True, True, True, False, False]
    seams = case.randn(2, heads.hv, heads.dv, heads.dk).to(case.device)
    for slot, blob in zip(slots[:3], blobs[:3], strict=True):
        case.fill_slot(slot)
        case.fill_artifact(blob, own=0)
    waiting = case.s_view(0).clone()
    case.s_view(3).fill_(float("nan"))
    case.s_view(1).fill_(float("nan"))
    before = case.arena.clone()
    plan = EndStatesPlan.build(
        slot=torch.tensor(slots, device=case.device),
        seam=seam,
        ends=ends,
        blob=[b * case.stride for b in blobs],
        device=case.device,
    )
    gdn_end_states(
        case.ssm_pool, seams, arena=case.arena, t_off=case.t_off, s_off=case.s_off, plan=plan,
        state_dtype=state_dtype, operator_dtype=operator_dtype, **target.dots,
    )  # fmt: skip
    end = case.ssm_pool.cpu().double()
    t = {blob: case.t(blob).cpu().double() for blob in (3, 0)}
    want = {
        3: end[5] - seams[1].cpu().double() @ t[3],
        0: end[2] - waiting.cpu().double() @ t[0],
        1: end[0],
        5: seams[0].cpu().double(),
    }
    for blob, s in want.items():
        assert_close(case.s_view(blob), s, 2e-6 if state_dtype == torch.float32 else BF16 * 1.01)
    assert (case.s_view(2) == 0).all()
    wrong = end[5] - seams[1].cpu().double() @ t[3].mT
    assert (wrong - want[3]).abs().max() > 0.1, "the side of T must matter"
    for blob in blobs:  # nothing else was written
        old = before[blob * case.stride + case.s_off :][: case.s_view(blob).nbytes]
        case.s_view(blob).view(torch.uint8).view(-1).copy_(old)
    assert torch.equal(case.arena, before)


def test_no_rows_and_wrong_shapes(target: Target) -> None:
    case = Case(Heads(), tokens=0, device=target.device)
    plan = EndStatesPlan.build(slot=[], seam=[], ends=[], blob=[], device=case.device)
    offsets = {"arena": case.arena, "t_off": case.t_off, "s_off": case.s_off, "plan": plan, **target.dots}
    gdn_end_states(case.ssm_pool, case.ssm_pool[:0], **offsets)
    with pytest.raises(ValueError, match="disagree"):
        gdn_end_states(case.ssm_pool, case.ssm_pool[..., :3], **offsets)
    with pytest.raises(ValueError, match="multiples of 16"):
        EndStatesPlan.build(slot=[0], seam=[0], ends=[True], blob=[8], device="cpu")
