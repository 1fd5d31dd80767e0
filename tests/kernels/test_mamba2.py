"""The Mamba2 operations against the token recurrence in float64, one by one and together as the engine calls them."""

from __future__ import annotations

import itertools
from array import array

import pytest
import torch
from cases import BF16, INTERPRETED, Target, assert_close, sizes, stand_in
from mamba2_cases import Case, Heads

from hypic.artifact.layout import LinearShape
from hypic.artifact.store import Artifact
from hypic.engine.batch import CompileRow
from hypic.engine.families.mamba2 import MixerLayer
from hypic.engine.linear_compile import CompileStep
from hypic.engine.request import Compile
from hypic.kernels.chain_plans import ChainItem
from hypic.kernels.compile_plans import IN_BLOB, NO_STATE, EndStatesPlan, TransitionPlan
from hypic.kernels.decay_end_states import decay_end_states
from hypic.kernels.mamba2_decay import mamba2_log_decay

ODD = sizes(
    [Heads(), Heads(1, 1, 3, 5), Heads(6, 3, 40, 16, width=2), Heads(3, 1, 16, 70, width=5)],
    [Heads(2, 1, 40, 5, width=2)],
)

SMALL = Heads(2, 1, 24, 16) if INTERPRETED else Heads()

# ---------------------------------------------------------------- the chain


def check(
    case: Case, target: Target, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool], tol: float = 2e-5
) -> None:
    for s, new in zip(slot, fresh, strict=True):
        if not new:
            case.fill_slot(s)
    out_truth, conv_truth, ssm_truth = case.truth(rows, slot, fresh)
    before = case.arena.clone()
    assert_close(case.chain(target, rows, slot, fresh), out_truth, tol)
    assert_close(case.conv_pool, conv_truth, tol)
    assert_close(case.ssm_pool, ssm_truth, tol)
    assert torch.equal(case.arena, before)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "continued"])
@pytest.mark.parametrize("length", sizes([1, 7, 64, 128], [1, 7]))
def test_one_run(length: int, fresh: bool, target: Target) -> None:
    case = Case(Heads(), tokens=length + 3, seed=length, device=target.device)
    check(case, target, [[ChainItem(2, length)]], [3], [fresh])


def rag(case: Case) -> tuple[list[list[ChainItem]], list[int], list[bool]]:
    """Three rows: seams and artifacts with every ``own``, runs of length 0, one empty row; tokens between unused."""
    back = case.heads.width - 1
    for blob in range(case.blobs):
        case.fill_artifact(blob, own=min(blob, back))

    def item(tok: int, length: int, blob: int) -> ChainItem:
        return ChainItem(tok, length, blob * case.stride, min(blob, back))

    rows = [
        [ChainItem(1, 5), item(6, 3, 3), item(9, 1, 1), item(10, 0, 2), ChainItem(12, 2)],
        [item(16, 0, 1), item(16, 0, 0)],
        [item(20, 1, 1), ChainItem(21, 0), item(23, 1, 3)],
    ]
    return rows, [4, 0, 2], [True, False, False]


@pytest.mark.parametrize("heads", ODD, ids=str)
def test_rows_of_seams_and_artifacts(heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=26, device=target.device)
    check(case, target, *rag(case))


@pytest.mark.parametrize("which", ["pools", "artifacts", "model"])
def test_types(which: str, target: Target) -> None:
    """Pools in bf16 are rounded once, artifacts are read as they are, of a 16-bit model only the output is rounded."""
    bf16 = torch.bfloat16
    kinds = {"pools": {"pool_dtype": bf16}, "artifacts": {"state_dtype": bf16}, "model": {}}
    case = Case(SMALL, tokens=26, device=target.device, **kinds[which])
    if which == "model":
        case.projected = case.projected.to(bf16)
    check(case, target, *rag(case), tol={"pools": 1e-2, "artifacts": 2e-5, "model": 5e-3}[which])


def test_no_rows_and_wrong_shapes(target: Target) -> None:
    case = Case(Heads(), tokens=3, device=target.device)
    check(case, target, [], [], [])
    case.ssm_pool = case.ssm_pool.transpose(-1, -2)
    with pytest.raises(ValueError, match="ssm_pool"):
        case.chain(target, [], [], [])
    for change, says in ({"groups": 3}, "no multiple of 3 groups"), ({"d_v": 8}, "expected 96 channels"):
        with pytest.raises(ValueError, match=says):
            case.layer._replace(**change).check(case.x, case.dt, case.conv_pool)


# ---------------------------------------------------------------- log decays and end states


@pytest.mark.parametrize("heads", [Heads(), Heads(20, 4, 4, 4)], ids=str)
def test_log_decays_add_up_over_passes(heads: Heads, target: Target) -> None:
    """An interior in two passes, one behind a seam, one that is empty, and one that forgets everything."""
    case = Case(heads, tokens=200, device=target.device)
    case.layer.A[1] = -100.0
    args = {"layer": case.layer, "arena": case.arena, "t_off": case.t_off, "impl": target.impl}
    for tok, length, skip, blobs, first in [
        ([0, 90, 98], [90, 8, 70], [8, 8, 0], [0, 1, 3], [True, True, True]),
        ([170], [30], [0], [3], [False]),
    ]:
        plan = TransitionPlan.build(
            seq_tok=tok, seq_len=length, seq_skip=skip, seq_slot=[0] * len(tok), seq_fresh=[True] * len(tok),
            blob=[b * case.stride for b in blobs], first=first, device=case.device,
        )  # fmt: skip
        mamba2_log_decay(case.dt, plan=plan, **args)
    step = torch.log1p((case.dt.cpu().double() + case.layer.dt_bias.cpu().double()).exp())
    for blob, tokens in {0: [*range(8, 90)], 1: [], 3: [*range(98, 168), *range(170, 200)]}.items():
        want = (step[tokens] * case.layer.A.cpu().double()).sum(0)
        torch.testing.assert_close(case.t_view(blob).cpu().double(), want, rtol=3e-6, atol=1e-7)
    assert (case.t_view(0).exp() == 0)[1] and case.t_view(0)[1] < -1000
    written = [(b * case.stride + case.t_off, case.t_view(b).nbytes) for b in (0, 1, 3)]
    for start, nbytes in written:
        case.arena[start : start + nbytes] = 0xFF
    assert (case.arena == 0xFF).all(), "nothing else was written"


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads", sizes([Heads(), Heads(1, 1, 3, 5), Heads(2, 1, 40, 70)], [Heads(2, 1, 40, 70)]), ids=str
)
def test_every_kind_of_end_state(
    heads: Heads, pool_dtype: torch.dtype, state_dtype: torch.dtype, target: Target
) -> None:
    """All five in one call: seam from scratch, from the blob, none; a seam that waits; an empty interior."""
    case = Case(heads, tokens=0, slots=6, blobs=6, pool_dtype=pool_dtype, state_dtype=state_dtype, device=target.device)
    slots, blobs = [5, 2, 0, 4, 3], [3, 0, 1, 5, 2]
    seams = case.randn(2, heads.h, heads.dv, heads.dk).to(case.device)
    for slot, blob in zip(slots[:3], blobs[:3], strict=True):
        case.fill_slot(slot)
        case.fill_artifact(blob, own=0)
    case.t_view(1).fill_(float("nan"))  # without a seam the operator plays no part
    waiting = case.s_view(0).clone()
    before = case.arena.clone()
    plan = EndStatesPlan.build(
        slot=slots, seam=[1, IN_BLOB, NO_STATE, 0, NO_STATE], ends=[True, True, True, False, False],
        blob=[b * case.stride for b in blobs], device=case.device,
    )  # fmt: skip
    decay_end_states(
        case.ssm_pool, seams, arena=case.arena, t_off=case.t_off, s_off=case.s_off, plan=plan,
        state_dtype=state_dtype, impl=target.impl,
    )  # fmt: skip
    end = case.ssm_pool.cpu().double()
    decay = {blob: case.t_view(blob).cpu().double().exp()[:, None, None] for blob in (3, 0)}
    want = {
        3: end[5] - decay[3] * seams[1].cpu().double(),
        0: end[2] - decay[0] * waiting.cpu().double(),
        1: end[0],
        5: seams[0].cpu().double(),
    }
    for blob, s in want.items():
        assert_close(case.s_view(blob), s, 2e-6 if state_dtype == torch.float32 else BF16 * 1.01)
    assert (case.s_view(2) == 0).all()
    for blob in blobs:  # nothing else was written
        old = before[blob * case.stride + case.s_off :][: case.s_view(blob).nbytes]
        case.s_view(blob).view(torch.uint8).view(-1).copy_(old)
    assert torch.equal(case.arena, before)


# ---------------------------------------------------------------- compile and link

PREFIX, QUERY = (3, 2) if INTERPRETED else (5, 6)
"""Tokens before the segment and behind it."""
LONG = 14 if INTERPRETED else 60


def compile_segments(
    case: Case, target: Target, segments: list[tuple[int, int, int, int]], seam: int, cuts: list[int]
) -> None:
    """Compile segments (blob, slot, first token, length) side by side, in forward passes that end at ``cuts``."""
    h, layer = case.heads, MixerLayer(case.layer, target.impl)
    linear = LinearShape(
        (0,), h.h, h.dk, h.dv, h.dim, h.width - 1, str(case.pool_dtype).removeprefix("torch."),
        str(case.state_dtype).removeprefix("torch."), "mamba2", "log_decay",
    )  # fmt: skip
    jobs = [
        Compile(Artifact(b"", array("q", range(n)), "", 0, case.stride, blob * case.stride), seam)
        for blob, _, _, n in segments
    ]
    for lo, hi in itertools.pairwise([0, *cuts, 1 << 20]):
        here = [(s, job) for s, job in zip(segments, jobs, strict=True) if lo < s[3]]
        rows = [CompileRow(job, 0, lo, min(hi, s[3])) for s, job in here]
        slots = torch.tensor([s[1] for s, _ in here], device=case.device)
        step = CompileStep(rows, [s[2] + lo for s, _ in here], slots, linear)
        out = torch.empty(case.tokens, h.h, h.dv, device=case.device)
        step.before(layer, (case.projected,), case.memory(), out)
        for (s, _), row in zip(here, rows, strict=True):  # in place of the native kernel
            case.chain(stand_in(target), [[ChainItem(s[2] + lo, row.end - row.begin)]], [s[1]], [lo == 0])
        step.after(layer, case.memory())


def assert_links(case: Case, target: Target, length: int, seam: int, first: int, tol: float) -> None:
    """Join blob 1 behind ``first`` other tokens. The interior's inputs are the same, so composing is exact."""
    at, total, inside = PREFIX - first, PREFIX + length + QUERY, max(length - seam, 0)
    own = min(case.heads.width - 1, inside)
    link = [
        ChainItem(at, first),
        ChainItem(PREFIX, length - inside, case.stride, own),
        ChainItem(PREFIX + length, QUERY),
    ]
    linked = case.chain(target, [link], [1], [True])
    whole = case.chain(stand_in(target), [[ChainItem(at, total - at)]], [2], [True])
    assert linked[PREFIX + length - inside : PREFIX + length].isnan().all()
    assert_close(linked[-QUERY:], whole[-QUERY:], tol)
    assert_close(case.ssm_pool[1], case.ssm_pool[2], tol)
    assert torch.equal(case.conv_pool[1], case.conv_pool[2])


CUTS = [[], [13], [3, 5], [8], [4, 8, 9], [7, 30, 31]]
"""Of a segment with a seam of 8: one pass, behind the seam, inside it, at its end, everywhere."""


@pytest.mark.parametrize(
    ("interior", "cuts"),
    sizes(list(itertools.product([0, 1, 2, 40], CUTS)), [(1, [4, 8, 9]), (9, []), (9, [3, 5])]),
    ids=str,
)
def test_a_linked_segment_equals_recompute(interior: int, cuts: list[int], target: Target) -> None:
    """At the start (P1), and behind other tokens, where the decay carries them over."""
    length = 8 + interior
    case = Case(SMALL, tokens=PREFIX + length + QUERY, device=target.device)
    compile_segments(case, target, [(1, 0, PREFIX, length)], 8, cuts)
    for first in (0, PREFIX):
        assert_links(case, target, length, 8, first, 2e-5)


@pytest.mark.parametrize("seam", [0, 1], ids=lambda n: f"seam{n}")
def test_short_seams(seam: int, target: Target) -> None:
    """Without a seam S is the end state itself; with one shorter than K-1 the interior convolves zeros."""
    case = Case(SMALL, tokens=PREFIX + 20 + QUERY, device=target.device)
    compile_segments(case, target, [(1, 0, PREFIX, 20)], seam, [2, 6])
    assert_links(case, target, 20, seam, 0, 2e-5)


def test_forgetful_heads_beside_remembering_ones(target: Target) -> None:
    """S = h_end - e^g h_w with e^g from 0 to 1 - 1e-6, where h_w all but cancels against S's own part of it."""
    case = Case(Heads(), tokens=PREFIX + LONG + QUERY, device=target.device)
    case.layer.A.copy_(torch.tensor([-1e-8, -1e-3, -1.0, -1e4]))
    compile_segments(case, target, [(1, 0, PREFIX, LONG)], 8, [])
    decays = case.t_view(1).exp()
    assert decays[3] == 0 and decays[0] > 1 - 1e-5
    assert_links(case, target, LONG, 8, PREFIX, 2e-5)


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_S_in_bf16(pool_dtype: torch.dtype, target: Target) -> None:
    """At the start of a prompt a link gives the compile's end state up to the rounding of S and of the pool."""
    case = Case(
        SMALL, tokens=PREFIX + LONG + QUERY, pool_dtype=pool_dtype, state_dtype=torch.bfloat16, device=target.device
    )
    compile_segments(case, target, [(1, 0, PREFIX, LONG)], 8, [])
    case.chain(target, [[ChainItem(PREFIX, 8, case.stride, 3)]], [1], [True])
    case.chain(stand_in(target), [[ChainItem(PREFIX, LONG)]], [2], [True])
    error = (case.ssm_pool[1].double() - case.ssm_pool[2].double()).abs().max()
    size = case.s_view(1).double().abs().max() + case.ssm_pool[2].double().abs().max()
    assert error <= (1 + (pool_dtype == torch.bfloat16)) * BF16 * size
