"""gdn_transition against the token recurrence in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import INT8, KDA, Case, Heads, Target, assert_close, sizes

from hypic.algebra import families, fold
from hypic.kernels.gdn_transition import FORGOTTEN, TransitionPlan, TransitionScratch, gdn_transition

HALF = torch.bfloat16
LENGTHS = sizes([0, 1, 7, 63, 64, 65, 500, 1000], [0, 1, 65, 130])

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_inputs(case: Case, n: int, forgetful: bool = False) -> Inputs:
    """k, g, beta. Unless ``forgetful``, T stays of order 1 over all n tokens, so that its errors are seen."""
    h = case.heads
    k = torch.nn.functional.normalize(case.randn(n, h.hk, h.dk), dim=-1)
    g, beta = -case.randn(n, *h.gates).abs(), case.randn(n, h.hv).sigmoid()
    if not forgetful:
        g, beta = g / max(n, 10), beta * min(1.0, 1.5 * h.dk / max(n, 1))
    return k.to(case.device), g.to(case.device), beta.to(case.device)


def truth(case: Case, inputs: Inputs, part: slice = slice(None)) -> torch.Tensor:
    """T without any shortcut for heads that forget."""
    k, g, beta = (t[part].cpu().double() for t in inputs)
    no_values = torch.zeros(*beta.shape, case.heads.dv, dtype=torch.float64)
    one_token = families.kimi_delta if case.heads.channels else families.gated_delta_net
    steps = one_token(k.repeat_interleave(case.heads.hv // case.heads.hk, 1), no_values, g, beta)
    whole = fold(steps) if len(steps) else type(steps).identity(case.s_view(0).cpu().double())
    return whole.T


def run(
    case: Case,
    target: Target,
    inputs: Inputs,
    lengths: list[int],
    blobs: list[int],
    first: list[bool],
    precision: str = "ieee",
) -> None:
    n = len(lengths)
    plan = TransitionPlan.build(
        seq_tok=[0] * n,
        seq_len=lengths,
        seq_skip=[0] * n,
        seq_slot=[0] * n,
        seq_fresh=[True] * n,
        blob=[b * case.stride for b in blobs],
        first=first,
        device=case.device,
    )
    scratch = TransitionScratch.of(plan, *inputs[:2])
    for part in scratch:
        part.view(torch.uint8).fill_(0xFF)
    options = target.dots | {"precision": precision}
    gdn_transition(
        *inputs,
        arena=case.arena,
        t_off=case.t_off,
        operator_dtype=case.t_dtype,
        plan=plan,
        scratch=scratch,
        **options,
    )


def assert_only_written(case: Case, blobs: list[int]) -> None:
    """The arena is untouched outside of T of these blobs."""
    for blob in blobs:
        case.erase_t(blob)
    assert (case.arena == 0xFF).all()


@pytest.mark.parametrize("forgetful", [False, True], ids=["remembers", "forgets"])
@pytest.mark.parametrize(
    ("length", "heads"), [(n, Heads()) for n in LENGTHS] + [(n, KDA) for n in sizes(LENGTHS, [65])], ids=str
)
def test_one_interior(length: int, forgetful: bool, heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=0, seed=length, device=target.device)
    inputs = random_inputs(case, length, forgetful)
    run(case, target, inputs, [length], [1], [True])
    assert_close(case.t_view(1), truth(case, inputs), 2e-5)
    assert_only_written(case, [1])


def test_channels_that_decay_at_once(target: Target) -> None:
    """Some channels forget within a token, others never: e^-G is out of range, but every factor of T stays in it."""
    case, n = Case(KDA, tokens=0, device=target.device), 130
    k, g, beta = random_inputs(case, n)
    g[:, :, ::3] = -60.0
    g[:, 1, 1] = -1e4
    run(case, target, (k, g, beta), [n], [1], [True])
    t = truth(case, (k, g, beta))
    assert t.norm() > 0.5
    assert_close(case.t_view(1), t, 2e-5)


@pytest.mark.parametrize("heads", [Heads(), KDA], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_repeated_tokens_stay_accurate(dtype: torch.dtype, heads: Heads, target: Target) -> None:
    """All keys alike, no decay, beta near 1: where a product of powers of the triangular matrix would blow up."""
    case, n = Case(heads, tokens=0, device=target.device), 100
    k, g, beta = random_inputs(case, n)
    inputs = k[:1].expand_as(k).contiguous().to(dtype), torch.zeros_like(g), torch.full_like(beta, 0.98)
    run(case, target, inputs, [n], [1], [True])
    assert_close(case.t_view(1), truth(case, inputs), 2e-5 if dtype == torch.float32 else 2**-8)


@pytest.mark.parametrize(
    "heads",
    [Heads(1, 1, 5, 3), Heads(2, 2, 24, 16), Heads(1, 2, 70, 90), Heads(1, 2, 5, 3, channels=True)],
    ids=str,
)
def test_many_interiors(heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=0, device=target.device)
    lengths, blobs = [9, 0, 65, 66], [2, 0, 3, 1]
    inputs = random_inputs(case, sum(lengths))
    run(case, target, inputs, lengths, blobs, [True] * 4)
    for blob, part in zip(blobs, itertools.pairwise([0, 9, 9, 74, 140]), strict=True):
        assert_close(case.t_view(blob), truth(case, inputs, slice(*part)), 2e-5)
    assert_only_written(case, blobs)


@pytest.mark.parametrize("heads", [Heads(), KDA], ids=str)
@pytest.mark.parametrize("cuts", sizes([[], [1], [64], [7, 70, 70, 129]], [[64], [7, 70, 70, 129]]), ids=str)
def test_chunked_compile_accumulates(cuts: list[int], heads: Heads, target: Target) -> None:
    """A segment that is compiled in pieces, beside another one that changes its neighbours, equals one pass."""
    case, n = Case(heads, tokens=0, device=target.device), sizes([200], [140])[0]
    inputs = random_inputs(case, n)
    for i, (lo, hi) in enumerate(itertools.pairwise([0, *cuts, n])):
        k, g, beta = (t[lo:hi] for t in inputs)
        run(case, target, (k, g, beta), [hi - lo, 0], [2, 0], [i == 0, True])
    assert_close(case.t_view(2), truth(case, inputs), 2e-5)


@pytest.mark.parametrize("cuts", [[], [7, 70]], ids=["whole", "chunked"])
def test_T_in_bf16_is_rounded_once_per_call(cuts: list[int], target: Target) -> None:
    case, n = Case(Heads(), tokens=0, state_dtype=torch.bfloat16, device=target.device), 200
    inputs = random_inputs(case, n)
    for i, (lo, hi) in enumerate(itertools.pairwise([0, *cuts, n])):
        k, g, beta = (t[lo:hi] for t in inputs)
        run(case, target, (k, g, beta), [hi - lo], [2], [i == 0])
    bound = 2**-9 * (len(cuts) + 1) * 1.2  # of the scale: half a unit in the last place for each call
    assert_close(case.t_view(2), truth(case, inputs), bound)
    assert_only_written(case, [2])


@pytest.mark.parametrize("cuts", [[], [7, 70]], ids=["whole", "chunked"])
@pytest.mark.parametrize("heads", sizes([Heads(), KDA, Heads(1, 2, 5, 3)], [Heads(1, 2, 5, 3)]), ids=str)
def test_T_in_int8_is_rounded_once_per_call(heads: Heads, cuts: list[int], target: Target) -> None:
    """Each row by its own scale; what a head forgets is exactly zero, and nothing is written beside T."""
    case, n = Case(heads, tokens=0, operator_dtype=torch.int8, device=target.device), sizes([200], [140])[0]
    k, g, beta = random_inputs(case, n)
    g[:, 0] = FORGOTTEN / 5
    inputs = k, g, beta
    for i, (lo, hi) in enumerate(itertools.pairwise([0, *cuts, n])):
        run(case, target, (k[lo:hi], g[lo:hi], beta[lo:hi]), [hi - lo, 0], [2, 0], [i == 0, True])
    t, expected = case.t(2).cpu().double(), truth(case, inputs)
    assert (t[0] == 0).all()
    error = (t - expected)[1:]
    if cuts:  # a call that goes on multiplies what was rounded by contractions: it keeps its length, but not the row's largest
        assert (error.norm(dim=-1) <= 1.01 * (len(cuts) + 1) * INT8 * heads.dk**0.5 + 2e-5).all()
    else:
        beside = expected.masked_fill(torch.eye(heads.dk, dtype=torch.bool), 0.0)[1:]
        assert (error.abs() <= 1.01 * INT8 * beside.abs().amax(-1, keepdim=True) + 2e-5).all()
    assert (case.t(0).cpu() == torch.eye(heads.dk)).all(), "an empty interior is the identity, exactly"
    assert_only_written(case, [2, 0])


def test_int8_hides_no_NaN(target: Target) -> None:
    case = Case(Heads(), tokens=0, operator_dtype=torch.int8, device=target.device)
    k, g, beta = random_inputs(case, 9)
    beta[4, 1] = float("nan")
    run(case, target, (k, g, beta), [9], [1], [True])
    t = case.t(1)
    assert t[1].isnan().all() and t[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("length", "heads"),
    [(n, Heads()) for n in sizes([1, 7, 63, 64, 65, 500, 1000], [7, 130])]
    + [(n, KDA) for n in sizes([1, 7, 63, 64, 65, 500, 1000], [65])],
    ids=str,
)
def test_keys_of_16_bits(length: int, heads: Heads, target: Target) -> None:
    """Operands are rounded, T stays in fp32 between chunks: off by no more than rounding the keys makes it, times two."""
    case = Case(heads, tokens=0, seed=length, device=target.device)
    exact = random_inputs(case, length)
    inputs = exact[0].to(HALF), *exact[1:]
    run(case, target, inputs, [length], [1], [True])
    t, of_rounded_keys = truth(case, exact), truth(case, inputs)
    stock = (of_rounded_keys - t).norm()
    error = (case.t_view(1).cpu().double() - t).norm()
    assert 0 < error <= 2 * stock + 2**-9 * t.norm()


def test_T_is_not_rounded_between_chunks(target: Target) -> None:
    """Tokens that write nothing leave the identity times the decay, exactly so also with keys in 16 bits."""
    case, n = Case(Heads(), tokens=0, device=target.device), 200
    k, g, beta = random_inputs(case, n)
    inputs = k.to(HALF), g, torch.zeros_like(beta)
    run(case, target, inputs, [n], [1], [True])
    assert_close(case.t_view(1), truth(case, inputs), 2e-6)


def test_a_head_that_forgets_is_zero_beside_one_that_remembers(target: Target) -> None:
    """Just past the bound T is exactly zero, just before it T is what the recurrence gives; per interior and head."""
    case = Case(Heads(1, 4, 16, 24), tokens=0, device=target.device)
    lengths = [130, 70]
    k, g, beta = random_inputs(case, sum(lengths))
    g[:130, 1] = (FORGOTTEN - 0.01) / 130
    g[130:, 1] = -1e-3
    g[:130, 2] = (FORGOTTEN + 0.01) / 130
    g[130:, 3] = -50.0
    run(case, target, (k, g, beta), lengths, [2, 0], [True, True])
    first, second = truth(case, (k, g, beta), slice(0, 130)), truth(case, (k, g, beta), slice(130, None))
    assert 0 < first[1].norm() < 4.0 * 2.1e-9 and first[0].norm() > 0.1, "what is dropped is within the stated bound"
    for head in (1,):
        assert (case.t_view(2)[head] == 0).all()
        assert_close(case.t_view(0)[head], second[head], 2e-5)
    assert (case.t_view(0)[3] == 0).all()
    assert (case.t_view(2)[2] != 0).any()
    torch.testing.assert_close(case.t_view(2)[2].cpu().double(), first[2], rtol=1e-3, atol=1e-13)
    for head in (0, 2, 3):
        assert_close(case.t_view(2)[head], first[head], 2e-5)
    for head in (0, 2):
        assert_close(case.t_view(0)[head], second[head], 2e-5)
    assert_only_written(case, [0, 2])


def test_a_head_forgets_only_if_all_its_channels_do(target: Target) -> None:
    """The bound is the sum of each token's slowest channel, whichever that is."""
    case, n = Case(KDA, tokens=0, device=target.device), 130
    k, g, beta = random_inputs(case, n)
    g[:] = -1.0
    g[:, 0, 3] = (FORGOTTEN + 0.01) / n
    g[::2, 1, 3] = g[1::2, 1, 4] = (FORGOTTEN - 0.01) / n
    run(case, target, (k, g, beta), [n], [2], [True])
    t = truth(case, (k, g, beta))
    assert (case.t_view(2)[1] == 0).all() and 0 < t[1].norm() < 4.0 * 2.1e-9
    assert (case.t_view(2)[0] != 0).any()
    torch.testing.assert_close(case.t_view(2)[0].cpu().double(), t[0], rtol=1e-3, atol=1e-13)


@pytest.mark.parametrize("when", [0, 1])
def test_what_is_forgotten_in_one_call_stays_forgotten(when: int, target: Target) -> None:
    case, n = Case(Heads(), tokens=0, device=target.device), 80
    inputs = random_inputs(case, n)
    inputs[1][40 * when : 40 * (when + 1), 2] = -1.0
    for i, lo in enumerate((0, 40)):
        k, g, beta = (t[lo : lo + 40] for t in inputs)
        run(case, target, (k, g, beta), [40], [2], [i == 0])
    assert (case.t_view(2)[2] == 0).all()
    assert_close(case.t_view(2), truth(case, inputs), 2e-5)


def test_wrong_shapes_are_refused(target: Target) -> None:
    case = Case(Heads(), tokens=0, device=target.device)
    k, g, beta = random_inputs(case, 4)
    with pytest.raises(ValueError, match="disagree"):
        run(case, target, (k, g[:3], beta), [4], [0], [True])
    with pytest.raises(ValueError, match="disagree"):
        run(case, target, (k, g[..., None].expand(-1, -1, 3).contiguous(), beta), [4], [0], [True])
    with pytest.raises(ValueError, match="disagree"):
        run(case, target, (k, g, beta), [3], [0], [True])
    if target.impl == "triton":
        wide = Case(Heads(1, 1, 130, 3), tokens=0, device=target.device)
        with pytest.raises(ValueError, match="at most 128"):
            run(wide, target, random_inputs(wide, 4), [4], [0], [True])
    with pytest.raises(ValueError, match="multiples of 16"):
        TransitionPlan.build(
            seq_tok=[0], seq_len=[4], seq_skip=[0], seq_slot=[0], seq_fresh=[True], blob=[4], first=[True], device="cpu"
        )
