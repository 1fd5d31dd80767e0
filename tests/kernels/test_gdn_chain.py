"""gdn_chain against the token recurrence in float64."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETED, KDA, Case, Heads, Target, assert_close, sizes

from hypic.kernels.gdn_chain import ChainItem, gdn_chain

RUN = sizes([1, 7, 63, 64, 65, 500, 1000], [1, 7, 65])
PLAIN = sizes([Heads()], [Heads(1, 2)])[0]


def check(
    case: Case, target: Target, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool], tol: float = 2e-5
) -> None:
    for s, new in zip(slot, fresh, strict=True):
        if not new:
            case.fill_slot(s)
    out_truth, conv_truth, ssm_truth = case.chain_truth(rows, slot, fresh)
    out = torch.full((case.tokens, case.heads.hv, case.heads.dv), float("nan"), device=case.device)
    before = case.arena.clone()
    gdn_chain(case.x, case.a, case.b, plan=case.chain_plan(rows, slot, fresh), **case.chain_args(out), **target.dots)
    assert_close(out, out_truth, tol)
    assert_close(case.conv_pool, conv_truth, tol)
    assert_close(case.ssm_pool, ssm_truth, tol)
    assert torch.equal(case.arena, before)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "continued"])
@pytest.mark.parametrize(("length", "heads"), [(n, PLAIN) for n in RUN] + [(n, KDA) for n in sizes(RUN, [7])], ids=str)
def test_one_run(length: int, fresh: bool, heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=length + 3, seed=length, device=target.device)
    check(case, target, [[ChainItem(2, length)]], [3], [fresh])


def rag(case: Case) -> tuple[list[list[ChainItem]], list[int], list[bool]]:
    """Three rows: seams and artifacts with every ``own``, runs of length 0, one empty row; tokens between unused."""
    for blob in range(case.blobs):
        case.fill_artifact(blob, own=blob)
    art = [blob * case.stride for blob in range(case.blobs)]
    rows = [
        [
            ChainItem(1, 5),
            ChainItem(6, 3, art[3], 3),
            ChainItem(9, 1, art[1], 1),
            ChainItem(10, 0, art[2], 2),
            ChainItem(12, 2),
        ],
        [ChainItem(16, 0, art[1], 1), ChainItem(16, 0, art[0], 0)],
        [ChainItem(20, 1, art[1], 1), ChainItem(21, 0), ChainItem(23, 1, art[3], 3)],
    ]
    return rows, [4, 0, 2], [True, False, False]


@pytest.mark.parametrize(
    "heads",
    [
        Heads(),
        Heads(1, 1, 5, 3),
        Heads(2, 2, 24, 16, width=2),
        Heads(1, 3, 16, 40, width=5),
        KDA,
        Heads(1, 3, 5, 40, width=5, channels=True),
    ],
    ids=str,
)
def test_rows_of_seams_and_artifacts(heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=26, blobs=4 if heads.width == 4 else 2, device=target.device)
    if heads.width == 4:
        check(case, target, *rag(case))
        return
    for blob in range(2):
        case.fill_artifact(blob, own=blob)
    art = case.stride
    check(case, target, [[ChainItem(0, 8, art, 1), ChainItem(9, 8, 0, 0), ChainItem(17, 1, art, 1)]], [1], [False])


@pytest.mark.skipif(INTERPRETED, reason="it is about the data, which are those of the torch reference")
def test_the_side_of_T_matters(target: Target) -> None:
    """The data of these tests is not easy: with T on the wrong side (its transpose) the result is far off."""
    case = Case(Heads(), tokens=26, device=target.device)
    rows, slot, fresh = rag(case)
    for s in slot:
        case.fill_slot(s)
    _, _, ssm_truth = case.chain_truth(rows, slot, fresh)
    for blob in range(case.blobs):
        case.t_view(blob).copy_(case.t_view(blob).mT.clone())
    out = torch.empty(case.tokens, case.heads.hv, case.heads.dv, device=case.device)
    gdn_chain(case.x, case.a, case.b, plan=case.chain_plan(rows, slot, fresh), **case.chain_args(out), **target.dots)
    assert ((case.ssm_pool.cpu() - ssm_truth).abs().amax((1, 2, 3))[slot] > 0.1).all()


@pytest.mark.parametrize("heads", [PLAIN, KDA], ids=str)
def test_pools_in_bf16_are_rounded_once(heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=26, pool_dtype=torch.bfloat16, device=target.device)
    check(case, target, *rag(case), tol=1e-2)


@pytest.mark.parametrize("operator_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("heads", [PLAIN, Heads(1, 1, 5, 3)], ids=str)
def test_artifacts_in_fewer_bits_are_read_as_they_are(
    heads: Heads, operator_dtype: torch.dtype | None, target: Target
) -> None:
    """The truth reads the same rounded T and S: nothing else may be rounded."""
    case = Case(heads, tokens=26, state_dtype=torch.bfloat16, operator_dtype=operator_dtype, device=target.device)
    check(case, target, *rag(case))


@pytest.mark.parametrize("heads", [PLAIN, KDA], ids=str)
def test_model_in_bf16(heads: Heads, target: Target) -> None:
    """Projections, parameters and outputs in bf16, as on a GPU: only the output is rounded."""
    case = Case(heads, tokens=26, device=target.device)
    case.x, case.a, case.b = case.x.bfloat16(), case.a.bfloat16(), case.b.bfloat16()
    case.layer |= {name: case.layer[name].bfloat16() for name in ("conv_weight", "conv_bias", "dt_bias")}
    rows, slot, fresh = rag(case)
    for s in slot:
        case.fill_slot(s)
    out_truth, conv_truth, ssm_truth = case.chain_truth(rows, slot, fresh)
    out = torch.full((26, case.heads.hv, case.heads.dv), float("nan"), dtype=torch.bfloat16, device=case.device)
    gdn_chain(case.x, case.a, case.b, plan=case.chain_plan(rows, slot, fresh), **case.chain_args(out), **target.dots)
    assert_close(out, out_truth, 5e-3)
    assert_close(case.conv_pool, conv_truth, 2e-5)
    assert_close(case.ssm_pool, ssm_truth, 2e-5)


def test_no_rows(target: Target) -> None:
    case = Case(Heads(), tokens=3, device=target.device)
    check(case, target, [], [], [])


def test_wrong_shapes_are_refused() -> None:
    case = Case(Heads(), tokens=3)
    out = torch.empty(3, case.heads.hv, case.heads.dv)
    args = case.chain_args(out) | {"ssm_pool": case.ssm_pool.transpose(-1, -2)}
    with pytest.raises(ValueError, match="ssm_pool"):
        gdn_chain(case.x, case.a, case.b, plan=case.chain_plan([], [], []), **args)
    with pytest.raises(ValueError, match="own"):
        case.chain_plan([[ChainItem(0, 1, 0, 4)]], [0], [True])
    with pytest.raises(ValueError, match="multiple of 16"):
        case.chain_plan([[ChainItem(0, 1, 8, 3)]], [0], [True])
