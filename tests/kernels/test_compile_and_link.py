"""The operations together: compile artifacts, link them, and compare with one ordinary run over all tokens (P1)."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Heads, Target, assert_close

from hypic.kernels.gdn_chain import ChainItem, ChainPlan, chain_scratch, gdn_chain
from hypic.kernels.gdn_transition import InputsPlan, TransitionPlan, gdn_inputs, gdn_transition, transition_scratch


def compile_segment(case: Case, target: Target, blob: int, first: int, length: int, seam: int, chunk: int) -> int:
    """Compile tokens first:first+length into a blob, in chunks that carry the window in slot 0; returns ``own``."""
    back = case.heads.width - 1
    for lo in range(0, length, chunk):
        n = min(chunk, length - lo)
        skip = min(max(seam - lo, 0), n)
        inputs = InputsPlan.build(
            seq_tok=[first + lo],
            seq_len=[n],
            seq_slot=torch.tensor([0], device=case.device),
            seq_fresh=[lo == 0],
            seq_skip=[skip],
            conv_width=case.heads.width,
            device=case.device,
        )
        kvgb = gdn_inputs(case.x, case.a, case.b, **case.layer, conv_pool=case.conv_pool, plan=inputs, impl=target.impl)
        plan = TransitionPlan.build(cu=[0, n - skip], blob=[blob * case.stride], first=[lo == 0], device=case.device)
        scratch = torch.full((transition_scratch(plan, case.heads.hv),), float("nan"), device=case.device)
        gdn_transition(
            *kvgb, arena=case.arena, t_off=case.t_off, s_off=case.s_off, plan=plan, scratch=scratch, **target.dots
        )
        past = torch.cat([torch.zeros(back, case.heads.dim, device=case.device), case.x[first : first + lo + n]])
        case.conv_pool[0] = past[-back:].t()
    own = min(back, length - seam)
    case.c_view(blob)[:, back - own :] = case.x[first + length - own : first + length].t()
    return own


@pytest.mark.parametrize("chunk", [1000, 13], ids=["whole", "chunked"])
@pytest.mark.parametrize("interior", [1, 2, 40], ids=lambda n: f"interior{n}")
def test_one_segment_at_the_start_equals_recompute(interior: int, chunk: int, target: Target) -> None:
    seam, query = 8, 6
    total = seam + interior + query
    case = Case(Heads(), tokens=total, device=target.device)
    own = compile_segment(case, target, 1, 0, seam + interior, seam, chunk)
    rows = [
        [ChainItem(0, seam, case.stride, own), ChainItem(seam + interior, query)],
        [ChainItem(0, total)],
    ]
    outs = []
    for slot, row in enumerate(rows, start=1):
        plan = ChainPlan.build(
            rows=[row],
            slot=torch.tensor([slot], device=case.device),
            fresh=[True],
            conv_width=case.heads.width,
            device=case.device,
        )
        out = torch.full((total, case.heads.hv, case.heads.dv), float("nan"), device=case.device)
        scratch = torch.full((chain_scratch(plan, case.heads.dim, case.heads.hv),), float("nan"), device=case.device)
        gdn_chain(case.x, case.a, case.b, plan=plan, scratch=scratch, **case.chain_args(out), **target.dots)
        outs.append(out)
    linked, recomputed = outs
    assert linked[seam : seam + interior].isnan().all()
    assert_close(linked[:seam], recomputed[:seam], 2e-5)
    assert_close(linked[-query:], recomputed[-query:], 2e-5)
    assert_close(case.ssm_pool[1], case.ssm_pool[2], 2e-5)
    assert torch.equal(case.conv_pool[1], case.conv_pool[2])
