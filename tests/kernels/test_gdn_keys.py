"""gdn_keys against the convolution and gates in float64."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, INTERPRETED, KDA, Case, Heads, Target, assert_close

from hypic.kernels.gdn_keys import Keys, TransitionPlan, gdn_keys


def transition_plan(
    case: Case, tok: list[int], length: list[int], fresh: list[bool], skip: list[int]
) -> TransitionPlan:
    return TransitionPlan.build(
        seq_tok=tok,
        seq_len=length,
        seq_skip=skip,
        seq_slot=list(range(len(tok))),
        seq_fresh=fresh,
        blob=[0] * len(tok),
        first=[True] * len(tok),
        device=case.device,
    )


def keys(case: Case, target: Target, plan: TransitionPlan) -> Keys:
    return gdn_keys(case.x, case.a, case.b, **case.layer, conv_pool=case.conv_pool, plan=plan, impl=target.impl)


def keys_truth(
    case: Case, tok: list[int], length: list[int], fresh: list[bool], skip: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, want = case.heads, []
    for s, (first, n, new, skipped) in enumerate(zip(tok, length, fresh, skip, strict=True)):
        window = torch.zeros(heads.dim, heads.width - 1) if new else case.conv_pool[s].cpu()
        window = window.double()
        for t in range(first, first + n):
            (_, k, _, g, beta), window = case.token_inputs(window, t)
            if t >= first + skipped:
                want.append((k[:, :: heads.hv // heads.hk], g, beta))
    k, g, beta = (torch.cat(column) for column in zip(*want, strict=True))
    return k, g, beta


ROWS = [1, 12, 13, 34], [10, 1, 0, 100], [True, False, False, False], [8, 0, 0, 1]
"""tok, length, fresh, skip: a seam before a short interior, one token, none, and more than a chunk."""


@pytest.mark.parametrize(
    "heads",
    [Heads(), Heads(1, 1, 5, 3), Heads(1, 3, 16, 40, width=5), KDA, Heads(1, 3, 5, 40, width=5, channels=True)],
    ids=str,
)
@pytest.mark.parametrize("rows", [ROWS, ([0, 66], [65, 64], [True, False], [0, 64])], ids=["mixed", "edges"])
def test_keys_and_gates_of_interiors(
    heads: Heads, rows: tuple[list[int], list[int], list[bool], list[int]], target: Target
) -> None:
    case = Case(heads, tokens=140, device=target.device)
    for s, new in enumerate(rows[2]):
        if not new:
            case.fill_slot(s)
    got = keys(case, target, transition_plan(case, *rows))
    for mine, want in zip(got, keys_truth(case, *rows), strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, want, 2e-6)


def test_keys_of_a_16_bit_model_are_rounded_once(target: Target) -> None:
    case = Case(Heads(), tokens=140, pool_dtype=torch.bfloat16, device=target.device)
    case.x, case.a, case.b = case.x.bfloat16(), case.a.bfloat16(), case.b.bfloat16()
    for slot in (1, 2, 3):
        case.fill_slot(slot)
    k, g, beta = keys(case, target, transition_plan(case, *ROWS))
    want_k, want_g, want_beta = keys_truth(case, *ROWS)
    assert (k.dtype, g.dtype, beta.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert ((k.cpu().double() - want_k).abs() <= BF16 * want_k.abs() + 1e-6).all()
    if not INTERPRETED:
        other = k.cpu() != want_k.float().bfloat16()
        assert other.double().mean() < 0.01, "only what lies between two numbers may be rounded the other way"
    assert_close(g, want_g, 2e-6)
    assert_close(beta, want_beta, 2e-6)


def test_keys_of_no_interior(target: Target) -> None:
    case = Case(Heads(), tokens=3, device=target.device)
    assert [len(t) for t in keys(case, target, transition_plan(case, [], [], [], []))] == [0, 0, 0]


def test_wrong_plans_are_refused() -> None:
    case = Case(Heads(), tokens=3)
    with pytest.raises(ValueError, match="seq_skip"):
        transition_plan(case, [0], [3], [True], [4])
