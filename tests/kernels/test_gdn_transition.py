"""gdn_inputs and gdn_transition against the token recurrence in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import Case, Heads, Target, assert_close, sizes

from hypic.algebra import families, fold, naive
from hypic.kernels.gdn_transition import InputsPlan, TransitionPlan, gdn_inputs, gdn_transition

LENGTHS = sizes([0, 1, 7, 63, 64, 65, 500, 1000], [0, 1, 7, 65, 130])


def inputs_plan(case: Case, tok: list[int], length: list[int], fresh: list[bool], skip: list[int]) -> InputsPlan:
    return InputsPlan.build(
        seq_tok=tok,
        seq_len=length,
        seq_slot=list(range(len(tok))),
        seq_fresh=fresh,
        seq_skip=skip,
        conv_width=case.heads.width,
        device=case.device,
    )


@pytest.mark.parametrize("heads", [Heads(), Heads(1, 1, 5, 3), Heads(1, 3, 16, 40, width=5)], ids=str)
def test_inputs_of_whole_subsequences(heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=40, device=target.device)
    tok, length, fresh, skip = [1, 12, 13, 14], [10, 1, 0, 20], [True, False, False, False], [8, 0, 0, 1]
    for s, new in enumerate(fresh):
        if not new:
            case.fill_slot(s)
    want = []
    for s, (first, n, new, skipped) in enumerate(zip(tok, length, fresh, skip, strict=True)):
        window = torch.zeros(heads.dim, heads.width - 1) if new else case.conv_pool[s].cpu()
        window = window.double()
        for t in range(first, first + n):
            (_, *inputs), window = case.token_inputs(window, t)
            if t >= first + skipped:
                want.append(inputs)
    got = gdn_inputs(
        case.x,
        case.a,
        case.b,
        **case.layer,
        conv_pool=case.conv_pool,
        plan=inputs_plan(case, tok, length, fresh, skip),
        impl=target.impl,
    )
    k, v, g, beta = (torch.cat(column) for column in zip(*want, strict=True))
    for mine, truth in zip(got, (k[:, :: heads.hv // heads.hk], v, g, beta), strict=True):
        assert mine.dtype == torch.float32
        assert_close(mine, truth, 2e-6)


def test_inputs_of_no_subsequence(target: Target) -> None:
    case = Case(Heads(), tokens=3, device=target.device)
    k, v, g, beta = gdn_inputs(
        case.x,
        case.a,
        case.b,
        **case.layer,
        conv_pool=case.conv_pool,
        plan=inputs_plan(case, [], [], [], []),
        impl=target.impl,
    )
    assert [len(t) for t in (k, v, g, beta)] == [0, 0, 0, 0]


def random_inputs(case: Case, n: int, forgetful: bool = False) -> tuple[torch.Tensor, ...]:
    """k, v, g, beta. Unless ``forgetful``, T stays of order 1 over all n tokens, so that its errors are seen."""
    h = case.heads
    k = torch.nn.functional.normalize(case.randn(n, h.hk, h.dk), dim=-1)
    g, beta = -case.randn(n, h.hv).abs(), case.randn(n, h.hv).sigmoid()
    if not forgetful:
        g, beta = g / max(n, 10), beta * min(1.0, 1.5 * h.dk / max(n, 1))
    return tuple(t.to(case.device) for t in (k, case.randn(n, h.hv, h.dv), g, beta))


def truth(case: Case, inputs: tuple[torch.Tensor, ...], part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    k, v, g, beta = (t[part].cpu().double() for t in inputs)
    steps = families.gated_delta_net(k.repeat_interleave(case.heads.hv // case.heads.hk, 1), v, g, beta)
    whole = fold(steps) if len(steps) else type(steps).identity(case.s_view(0).cpu().double())
    return whole.T, whole.S


def run(
    case: Case, target: Target, inputs: tuple[torch.Tensor, ...], cu: list[int], blobs: list[int], first: list[bool]
) -> None:
    plan = TransitionPlan.build(cu=cu, blob=[b * case.stride for b in blobs], first=first, device=case.device)
    states = {"t_off": case.t_off, "s_off": case.s_off, "state_dtype": case.state_dtype}
    gdn_transition(*inputs, arena=case.arena, **states, plan=plan, **target.dots)


def assert_only_written(case: Case, blobs: list[int]) -> None:
    """The arena is untouched outside of T and S of these blobs."""
    for blob in blobs:
        case.t_view(blob).fill_(float("nan"))
        case.s_view(blob).fill_(float("nan"))
        for view in (case.t_view(blob), case.s_view(blob)):
            view.view(torch.uint8).fill_(0xFF)
    assert (case.arena == 0xFF).all()


@pytest.mark.parametrize("forgetful", [False, True], ids=["remembers", "forgets"])
@pytest.mark.parametrize("length", LENGTHS)
def test_one_subsequence(length: int, forgetful: bool, target: Target) -> None:
    case = Case(Heads(), tokens=0, seed=length, device=target.device)
    inputs = random_inputs(case, length + 5, forgetful)
    run(case, target, inputs, [2, 2 + length], [1], [True])
    t, s = truth(case, inputs, slice(2, 2 + length))
    assert_close(case.t_view(1), t, 2e-5)
    assert_close(case.s_view(1), s, 2e-5)
    assert_only_written(case, [1])


def test_repeated_tokens_stay_accurate(target: Target) -> None:
    """All keys alike, no decay, beta near 1: where a product of powers of the triangular matrix would blow up."""
    case, n = Case(Heads(), tokens=0, device=target.device), 100
    k, v, g, beta = random_inputs(case, n)
    inputs = (k[:1].expand_as(k).contiguous(), v, torch.zeros_like(g), torch.full_like(beta, 0.98))
    run(case, target, inputs, [0, n], [1], [True])
    t, s = truth(case, inputs, slice(0, n))
    assert_close(case.t_view(1), t, 2e-5)
    assert_close(case.s_view(1), s, 2e-5)


@pytest.mark.parametrize("heads", [Heads(1, 1, 5, 3), Heads(2, 2, 24, 16), Heads(1, 2, 70, 90)], ids=str)
def test_many_subsequences(heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=0, device=target.device)
    cu, blobs = [0, 9, 9, 74, 140], [2, 0, 3, 1]
    inputs = random_inputs(case, cu[-1])
    run(case, target, inputs, cu, blobs, [True] * 4)
    for blob, part in zip(blobs, itertools.pairwise(cu), strict=True):
        t, s = truth(case, inputs, slice(*part))
        assert_close(case.t_view(blob), t, 2e-5)
        assert_close(case.s_view(blob), s, 2e-5)
    assert_only_written(case, blobs)


@pytest.mark.parametrize("cuts", [[], [1], [64], [7, 70, 70, 129]], ids=str)
def test_chunked_compile_accumulates(cuts: list[int], target: Target) -> None:
    """A segment that is compiled in pieces, beside another one that changes its neighbours, equals one pass."""
    case, n = Case(Heads(), tokens=0, device=target.device), 200
    inputs = random_inputs(case, n)
    for i, (lo, hi) in enumerate(itertools.pairwise([0, *cuts, n])):
        run(case, target, inputs, [lo, hi, hi], [2, 0], [i == 0, True])
    t, s = truth(case, inputs, slice(0, n))
    assert_close(case.t_view(2), t, 2e-5)
    assert_close(case.s_view(2), s, 2e-5)


@pytest.mark.parametrize("cuts", [[], [7, 70]], ids=["whole", "chunked"])
def test_states_in_bf16_are_rounded_once_per_call(cuts: list[int], target: Target) -> None:
    case, n = Case(Heads(), tokens=0, state_dtype=torch.bfloat16, device=target.device), 200
    inputs = random_inputs(case, n)
    for i, (lo, hi) in enumerate(itertools.pairwise([0, *cuts, n])):
        run(case, target, inputs, [lo, hi], [2], [i == 0])
    t, s = truth(case, inputs, slice(0, n))
    bound = 2**-9 * (len(cuts) + 1) * 1.2  # of the scale: half a unit in the last place for each call
    assert_close(case.t_view(2), t, bound)
    assert_close(case.s_view(2), s, bound)
    assert_only_written(case, [2])


def test_state_after_a_segment_is_h_T_plus_S(target: Target) -> None:
    """End to end: what compile writes, applied on the right, is what the recurrence does to any state."""
    case = Case(Heads(), tokens=0, device=target.device)
    inputs = random_inputs(case, 12)
    run(case, target, inputs, [0, 12], [0], [True])
    k, v, g, beta = (t.cpu().double() for t in inputs)
    k = k.repeat_interleave(2, 1)
    h = case.randn(4, 24, 16).double()
    _, end = naive.gated_delta_net(k, k, v, g, beta, h)
    assert_close(h @ case.t_view(0).cpu().double() + case.s_view(0).cpu(), end, 2e-5)
    assert (h @ case.t_view(0).cpu().double().mT + case.s_view(0).cpu() - end).abs().max() > 0.1, (
        "the side of T must matter"
    )


def test_wrong_shapes_are_refused(target: Target) -> None:
    case = Case(Heads(), tokens=0, device=target.device)
    k, v, g, beta = random_inputs(case, 4)
    with pytest.raises(ValueError, match="disagree"):
        run(case, target, (k, v[:3], g, beta), [0, 4], [0], [True])
    with pytest.raises(ValueError, match="decreases"):
        TransitionPlan.build(cu=[0, 4, 2], blob=[0, 0], first=[True, True], device="cpu")
    with pytest.raises(ValueError, match="multiples of 16"):
        TransitionPlan.build(cu=[0, 4], blob=[4], first=[True], device="cpu")
    with pytest.raises(ValueError, match="seq_skip"):
        inputs_plan(case, [0], [3], [True], [4])
