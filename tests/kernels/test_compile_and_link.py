"""The operations together, as the engine calls them: compile a segment, link it, and compare with one ordinary run."""

from __future__ import annotations

import itertools
from array import array

import pytest
import torch
from cases import BF16, INTERPRETED, Case, Heads, Target, assert_close, sizes, stand_in

from hypic.artifact.layout import LinearShape
from hypic.artifact.store import Artifact
from hypic.engine.batch import CompileRow
from hypic.engine.families.base import Memory
from hypic.engine.families.gdn import GdnLayer
from hypic.engine.linear_compile import CompileStep, completes_seam
from hypic.engine.request import Compile
from hypic.kernels.gdn_chain import ChainItem, ChainPlan, chain_scratch, gdn_chain

HEADS = Heads(1, 2, 16, 24) if INTERPRETED else Heads()
PREFIX, QUERY = (3, 2) if INTERPRETED else (5, 6)
"""Tokens before the segment and behind it."""
LONG = 12 if INTERPRETED else 48


def chain(case: Case, target: Target, slot: int, items: list[ChainItem], fresh: bool = True) -> torch.Tensor:
    plan = ChainPlan.build(rows=[items], slot=[slot], fresh=[fresh], conv_width=case.heads.width, device=case.device)
    out = torch.full((case.tokens, case.heads.hv, case.heads.dv), float("nan"), device=case.device)
    scratch = torch.full((chain_scratch(plan, case.heads.dim, case.heads.hv),), float("nan"), device=case.device)
    gdn_chain(case.x, case.a, case.b, plan=plan, scratch=scratch, **case.chain_args(out), **target.dots)
    return out


def compile_segments(
    case: Case, target: Target, segments: list[tuple[int, int, int, int]], seam: int, cuts: list[int]
) -> None:
    """Compile segments (blob, slot, first token, length) side by side, in forward passes that end at ``cuts``."""
    h = case.heads
    linear = LinearShape(
        (0,), h.hv, h.dk, h.dv, h.dim, h.width - 1, str(case.pool_dtype).removeprefix("torch."),
        str(case.state_dtype).removeprefix("torch."),
    )  # fmt: skip
    at = Memory(
        case.conv_pool, case.ssm_pool, case.arena, case.t_off, case.s_off, case.c_off, case.state_dtype, "ieee",
        case.operator_dtype,
    )  # fmt: skip
    layer = GdnLayer(case.layer, target.impl)
    jobs = [
        Compile(Artifact(b"", array("q", range(n)), "", 0, case.stride, blob * case.stride), seam)
        for blob, _, _, n in segments
    ]
    for lo, hi in itertools.pairwise([0, *cuts, 1 << 20]):
        here = [(s, job) for s, job in zip(segments, jobs, strict=True) if lo < s[3]]
        rows = [CompileRow(job, 0, lo, min(hi, s[3])) for s, job in here]
        slots = torch.tensor([s[1] for s, _ in here], device=case.device)
        step = CompileStep(rows, [s[2] + lo for s, _ in here], slots, linear)
        out = torch.full((case.tokens, h.hv, h.dv), float("nan"), device=case.device)
        step.before(layer, (case.x, case.a, case.b), at, out)
        for (s, _), row in zip(here, rows, strict=True):  # in place of the native kernel
            chain(case, stand_in(target), s[1], [ChainItem(s[2] + lo, row.end - row.begin)], fresh=lo == 0)
        step.after(layer, at)


def assert_links(case: Case, target: Target, blob: int, length: int, seam: int, first: int, tol: float) -> None:
    """Join the segment behind ``first`` other tokens. The interior's inputs are the same, so composing is exact."""
    at, total, inside = PREFIX - first, PREFIX + length + QUERY, max(length - seam, 0)
    own = min(case.heads.width - 1, inside)
    link = [
        ChainItem(at, first),
        ChainItem(PREFIX, length - inside, blob * case.stride, own),
        ChainItem(PREFIX + length, QUERY),
    ]
    linked = chain(case, target, 1, link)
    whole = chain(case, stand_in(target), 2, [ChainItem(at, total - at)])
    assert linked[PREFIX + length - inside : PREFIX + length].isnan().all()
    assert_close(linked[-QUERY:], whole[-QUERY:], tol)
    assert_close(case.ssm_pool[1], case.ssm_pool[2], tol)
    assert torch.equal(case.conv_pool[1], case.conv_pool[2])


BF = torch.bfloat16
CUTS = [[], [13], [3, 5], [8], [4, 8, 9], [7, 30, 31]]
"""Of a segment with a seam of 8: one pass, behind the seam, inside it, at its end, everywhere."""


@pytest.mark.parametrize(
    ("interior", "cuts"),
    sizes(list(itertools.product([1, 2, 40], CUTS)), [(1, [4, 8, 9]), (9, []), (9, [3, 5])]),
    ids=str,
)
def test_a_linked_segment_equals_recompute(interior: int, cuts: list[int], target: Target) -> None:
    """At the start (P1), and behind other tokens, where T carries them over."""
    length = 8 + interior
    case = Case(HEADS, tokens=PREFIX + length + QUERY, device=target.device)
    compile_segments(case, target, [(1, 0, PREFIX, length)], 8, cuts)
    for first in (0, PREFIX):
        assert_links(case, target, 1, length, 8, first, 2e-5)


@pytest.mark.parametrize("seam", sizes([0, 1, 4], [0, 1]), ids=lambda n: f"seam{n}")
@pytest.mark.parametrize("cuts", [[], [2, 6]], ids=str)
def test_other_seams(seam: int, cuts: list[int], target: Target) -> None:
    """Without a seam S is the end state itself; with one shorter than K-1 the interior convolves zeros."""
    case = Case(HEADS, tokens=PREFIX + 20 + QUERY, device=target.device)
    compile_segments(case, target, [(1, 0, PREFIX, 20)], seam, cuts)
    assert_links(case, target, 1, 20, seam, 0, 2e-5)


@pytest.mark.parametrize("cuts", sizes([[], [2, 5], [4]], [[2, 5]]), ids=str)
@pytest.mark.parametrize("length", [8, 5], ids=lambda n: f"length{n}")
def test_an_empty_interior_is_the_identity(length: int, cuts: list[int], target: Target) -> None:
    case = Case(HEADS, tokens=PREFIX + length + QUERY, device=target.device)
    compile_segments(case, target, [(1, 0, PREFIX, length)], 8, cuts)
    eye = torch.eye(case.heads.dk, device=case.device)
    assert (case.t_view(1) == eye).all() and (case.s_view(1) == 0).all()
    assert_links(case, target, 1, length, 8, PREFIX, 2e-6)


@pytest.mark.parametrize("cuts", sizes([[], [6, 20]], [[6, 11]]), ids=str)
def test_rows_of_one_batch_do_not_touch_each_other(cuts: list[int], target: Target) -> None:
    """Short, empty and long segments side by side give what each gives alone; other slots and blobs stay."""
    case = Case(HEADS, tokens=80, slots=6, blobs=6, device=target.device)
    segments = [(1, 3, 0, sizes([30], [15])[0]), (4, 0, 30, 8), (2, 5, 38, 9), (0, 4, 50, 12)]
    compile_segments(case, target, segments, 8, cuts)
    together = {blob: (case.t_view(blob).clone(), case.s_view(blob).clone()) for blob, *_ in segments}
    assert case.ssm_pool[1:3].isnan().all()
    assert all((case.arena[blob * case.stride :][: case.stride] == 0xFF).all() for blob in (3, 5))
    case.arena.fill_(0xFF)
    for segment in segments:
        compile_segments(case, target, [segment], 8, cuts)
    for blob, (t, s) in together.items():
        assert_close(case.t_view(blob), t, 1e-6)
        assert_close(case.s_view(blob), s, 1e-6)


def test_forgetful_heads_beside_remembering_ones(target: Target) -> None:
    case = Case(Heads(), tokens=PREFIX + 60 + QUERY, device=target.device)
    case.layer["A_log"][:] = torch.tensor([-4.0, 1.5, -4.0, 1.5])
    compile_segments(case, target, [(1, 0, PREFIX, 60)], 8, [])
    assert (case.t_view(1)[[1, 3]] == 0).all() and (case.t_view(1)[[0, 2]] != 0).any()
    assert_links(case, target, 1, 60, 8, PREFIX, 2e-5)


@pytest.mark.parametrize(
    ("pool_dtype", "cuts"),
    sizes(list(itertools.product([torch.float32, BF], CUTS)), [(torch.float32, [3, 5]), (BF, []), (BF, [4, 8, 9])]),
    ids=str,
)
@pytest.mark.parametrize("operator_dtype", [BF, torch.int8], ids=str)
def test_T_and_S_in_fewer_bits(
    operator_dtype: torch.dtype, pool_dtype: torch.dtype, cuts: list[int], target: Target
) -> None:
    """Rounding T cancels at the start of a prompt: only what is rounded after T counts, S and a waiting h_w."""
    case = Case(
        HEADS, tokens=PREFIX + LONG + QUERY, pool_dtype=pool_dtype, state_dtype=torch.bfloat16,
        operator_dtype=operator_dtype, device=target.device,
    )  # fmt: skip
    compile_segments(case, target, [(1, 0, PREFIX, LONG)], 8, cuts)
    plan = [ChainItem(PREFIX, 8, case.stride, 3)]
    chain(case, target, 1, plan)
    chain(case, stand_in(target), 2, [ChainItem(PREFIX, LONG)])
    passes = 1 + len(cuts) if pool_dtype == torch.bfloat16 else 1  # states that were rounded between passes
    error = (case.ssm_pool[1].double() - case.ssm_pool[2].double()).abs().max()
    size = case.s_view(1).double().abs().max() + case.ssm_pool[2].double().abs().max()
    assert error <= (passes + len(cuts) + 1) * BF16 * size


def test_which_batch_completes_a_seam() -> None:
    def row(begin: int, end: int, length: int = 20, seam: int = 8) -> CompileRow:
        artifact = Artifact(b"", array("q", range(length)), "", 0, 0, 0)
        return CompileRow(Compile(artifact, seam), 0, begin, end)

    assert completes_seam(row(0, 20)) and completes_seam(row(0, 8)) and completes_seam(row(7, 8))
    assert not completes_seam(row(0, 7)) and not completes_seam(row(8, 20))
    assert not completes_seam(row(0, 8, length=8)) and not completes_seam(row(0, 20, seam=0))
