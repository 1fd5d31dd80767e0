"""The Lightning operations against the token recurrence in float64, one by one and together as the engine calls them."""

from __future__ import annotations

import itertools
from array import array

import pytest
import torch
from cases import INTERPRETED, Target, assert_close, sizes, stand_in
from lightning_cases import Case, Heads, rotate

from hypic.artifact.layout import LinearShape
from hypic.artifact.store import Artifact
from hypic.engine.batch import CompileRow
from hypic.engine.linear_compile import CompileStep
from hypic.engine.request import Compile
from hypic.kernels.chain_plans import ChainItem
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.lightning_chain import KeyRotation, lightning_log_decay

ODD = sizes([Heads(), Heads(1, 5, 3, 4), Heads(2, 70, 16, 70), Heads(4, 16, 33, 0)], [Heads(2, 5, 33, 4)])

# ---------------------------------------------------------------- the chain


def check(
    case: Case,
    target: Target,
    rows: list[list[ChainItem]],
    slot: list[int],
    fresh: list[bool],
    tol: float = 2e-5,
    dtype: torch.dtype = torch.float32,
) -> None:
    for s, new in zip(slot, fresh, strict=True):
        if not new:
            case.fill_slot(s)
    out_truth, pool_truth = case.truth(rows, slot, fresh)
    before = case.arena.clone()
    assert_close(case.chain(target, rows, slot, fresh, dtype), out_truth, tol)
    assert_close(case.pool, pool_truth, tol)
    assert torch.equal(case.arena, before)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "continued"])
@pytest.mark.parametrize("length", sizes([1, 7, 64, 128], [7]))
def test_one_run(length: int, fresh: bool, target: Target) -> None:
    case = Case(Heads(), tokens=length + 3, seed=length, device=target.device)
    check(case, target, [[ChainItem(2, length)]], [3], [fresh])


def rag(case: Case) -> tuple[list[list[ChainItem]], list[int], list[bool]]:
    """Three rows: seams and artifacts at several shifts, runs of length 0; tokens between unused."""
    for blob in range(case.blobs):
        case.fill_artifact(blob)

    def item(tok: int, length: int, blob: int, shift: int) -> ChainItem:
        return ChainItem(tok, length, blob * case.stride, shift=shift)

    rows = [
        [ChainItem(1, 5), item(6, 3, 3, 700), item(9, 1, 1, 0), item(10, 0, 2, 1), ChainItem(12, 2)],
        [item(16, 0, 1, 33), item(16, 0, 0, 1023)],
        [item(20, 1, 1, 5), ChainItem(21, 0), item(23, 1, 3, 8)],
    ]
    return rows, [4, 0, 2], [True, False, False]


@pytest.mark.parametrize("heads", ODD, ids=str)
def test_rows_of_seams_and_artifacts(heads: Heads, target: Target) -> None:
    case = Case(heads, tokens=26, device=target.device)
    check(case, target, *rag(case))


@pytest.mark.parametrize("which", ["pools", "artifacts", "model", "yarn"])
def test_types(which: str, target: Target) -> None:
    """Pools in bf16 are rounded once, artifacts are read as they are, of a 16-bit model only the output is rounded. The
    factor of yarn is in S already: the rotation must be a pure one."""
    bf16 = torch.bfloat16
    kinds = {"pools": {"pool_dtype": bf16}, "artifacts": {"state_dtype": bf16}, "model": {}, "yarn": {"scale": 1.3}}
    case = Case(Heads(), tokens=26, device=target.device, **kinds[which])
    if which == "model":
        case.q, case.k, case.v = (x.to(bf16) for x in (case.q, case.k, case.v))
    tol = {"pools": 1e-2, "model": 5e-3}.get(which, 2e-5)
    check(case, target, *rag(case), tol=tol, dtype=bf16 if which == "model" else torch.float32)


def test_no_rows_and_wrong_shapes(target: Target) -> None:
    case = Case(Heads(), tokens=3, device=target.device)
    check(case, target, [], [], [])
    rotation = case.layer.rotation
    assert rotation is not None
    case.layer = case.layer._replace(rotation=KeyRotation(rotation.table, 10, 1.0))
    with pytest.raises(ValueError, match="rotates 10 of 24"):
        case.chain(target, [], [], [], torch.float32)
    case.pool = case.pool.mT
    with pytest.raises(ValueError, match="state_pool"):
        case.chain(target, [], [], [], torch.float32)


def test_log_decays_add_up_over_passes(target: Target) -> None:
    """An interior in two passes, one behind a seam, one that is empty; nothing else is written."""
    case = Case(Heads(20, 4, 4, 4), tokens=0, device=target.device)
    for length, skip, blobs, first in [
        ([90, 8, 70], [8, 8, 0], [0, 1, 3], [True, True, True]),
        ([30], [0], [3], [False]),
    ]:
        plan = TransitionPlan.build(
            seq_tok=[0] * len(length), seq_len=length, seq_skip=skip, seq_slot=[0] * len(length),
            seq_fresh=[True] * len(length), blob=[b * case.stride for b in blobs], first=first, device=case.device,
        )  # fmt: skip
        lightning_log_decay(case.layer, arena=case.arena, t_off=case.t_off, plan=plan)
    for blob, n in {0: 82, 1: 0, 3: 100}.items():
        want = -case.layer.slope.cpu().double() * n
        torch.testing.assert_close(case.t_view(blob).cpu().double(), want, rtol=1e-6, atol=0)
        case.arena[blob * case.stride + case.t_off :][: case.t_view(blob).nbytes] = 0xFF
    assert (case.arena == 0xFF).all()


# ---------------------------------------------------------------- compile and link

SQUARE = Heads(2, 24, 24, 12)
PREFIX, QUERY = (2, 1) if INTERPRETED else (5, 3)
CUTS = [[], [4, 8, 9]] if INTERPRETED else [[], [13], [3, 5], [8], [4, 8, 9], [7, 30, 31]]
"""Of a segment with a seam of 8: one pass, behind the seam, inside it, at its end, everywhere."""


def compile_segment(case: Case, target: Target, length: int, seam: int, cuts: list[int]) -> None:
    """Compile tokens [PREFIX, PREFIX + length) into blob 1 on slot 0, in forward passes that end at ``cuts``."""
    h, layer = case.heads, case.bound(target)
    linear = LinearShape((0,), h.h, h.dk, h.dv, 0, 0, "float32", "float32", "lightning", "log_decay")
    job = Compile(Artifact(b"", array("q", range(length)), "", 0, case.stride, case.stride), seam)
    for lo, hi in itertools.pairwise([0, *[c for c in cuts if c < length], length]):
        step = CompileStep([CompileRow(job, 0, lo, hi)], [PREFIX + lo], torch.tensor([0], device=case.device), linear)
        out = torch.empty(case.tokens, h.h, h.dv, device=case.device)
        step.before(layer, (case.q, case.k, case.v), case.memory(), out)
        case.chain(stand_in(target), [[ChainItem(PREFIX + lo, hi - lo)]], [0], [lo == 0], torch.float32)
        step.after(layer, case.memory())


@pytest.mark.parametrize("start", sizes([PREFIX, 900], [900]), ids=lambda n: f"at{n}")
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("interior", sizes([0, 1, 2, 40], [9]), ids=lambda n: f"interior{n}")
def test_a_segment_compiled_at_0_joins_where_it_stands(
    interior: int, cuts: list[int], start: int, target: Target
) -> None:
    """Compiled at positions 0.., linked at ``start``, where q and k of all other tokens are rotated to begin with."""
    length = 8 + interior
    case = Case(SQUARE, tokens=PREFIX + length + QUERY, device=target.device)
    q, k = case.q.cpu(), case.k.cpu()
    places = torch.arange(case.tokens) - PREFIX

    def stand_at(positions: torch.Tensor) -> None:
        case.q, case.k = (rotate(SQUARE, x, positions).float().to(case.device) for x in (q, k))

    stand_at(places.clamp(min=0))
    compile_segment(case, target, length, 8, cuts)
    stand_at(places + start)
    link = [ChainItem(0, PREFIX), ChainItem(PREFIX, 8, case.stride, 0, start), ChainItem(PREFIX + length, QUERY)]
    linked = case.chain(target, [link], [1], [True], torch.float32)
    whole = case.chain(stand_in(target), [[ChainItem(0, case.tokens)]], [2], [True], torch.float32)
    assert linked[PREFIX + 8 : PREFIX + length].isnan().all()
    assert_close(linked[-QUERY:], whole[-QUERY:], 1e-4)
    assert_close(case.pool[1], case.pool[2], 1e-4)
