"""Stages of a linear layer: every token computed once, in order, with each artifact and checkpoint in its place."""

from __future__ import annotations

from array import array
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.artifact.store import Artifact
from hypic.engine.batch import (
    CHAIN_LIMIT,
    BatchPlan,
    CompileRow,
    LinkRow,
    Stage,
    linear_stages,
)
from hypic.engine.request import Compile, Link, Segment
from hypic.kernels.gdn_chain import ChainItem
from hypic.method import Method
from hypic.plan import NO_ARTIFACT, Interior, LinkLayout
from hypic.segment import RequestSpans

W, CONV = 4, 3
SLOT = 99


def link_row(
    stretches: list[tuple[int, int]], tail: int, hit: int, begin: int = 0, end: int = 0, checkpoint: int | None = None
) -> LinkRow:
    """A linked row: (plain, segment) lengths of each stretch, then a tail; chunk [begin, end) of the computed tokens.

    The artifact of segment i lies at byte 1000 i.
    """
    segments, interiors, at = [], [], hit
    for i, (plain, length) in enumerate(stretches):
        at += plain
        tokens = array("q", range(length))
        artifact = Artifact(b"%d" % i, tokens, "", 1000 * i, 10, 1000 * i)
        segments.append(Segment(at, at + length, tokens, artifact.key, artifact=artifact))
        interiors.append(Interior(min(at + W, at + length), at + length, i))
        at += length
    layout = LinkLayout(at + tail, hit, interiors)
    begin, end = (
        min(layout.prefix_len + begin, layout.total - 1),
        min(layout.prefix_len + end, layout.total) if end else layout.total,
    )
    link = Link(RequestSpans(), segments, Method("seam", "seam", W))
    order = layout.order(begin, end)
    row = LinkRow(
        link, layout, begin, end, layout.runs(begin, end), order, begin == layout.prefix_len, end == layout.total
    )
    row.checkpoint = None if checkpoint is None else (checkpoint, SLOT)
    return row


def stages_of(*rows: LinkRow | CompileRow | tuple[int, int]) -> list[Stage]:
    """A batch of linked rows, compiles, and ordinary rows (prefix, new tokens)."""
    plan, prefixes, lengths = BatchPlan(), [], []
    for i, row in enumerate(rows):
        if isinstance(row, LinkRow):
            plan.links[i] = row
        elif isinstance(row, CompileRow):
            plan.compiles[i] = row
        begin, end = row if isinstance(row, tuple) else (row.begin, row.end)
        prefixes.append(begin)
        lengths.append(end - begin)
    return linear_stages(plan, prefixes, lengths, CONV)


def steps(stages: list[Stage], row: int) -> list[tuple[Any, ...]]:
    """What happens to the state of a row, in the order in which the stages do it."""
    out: list[tuple[Any, ...]] = []
    for stage in stages:
        chains = [c for c in stage.chains if c.row == row]
        natives = [n for n in stage.natives if n.row == row]
        assert len(chains) <= 1 and len(natives) <= 1, "a kernel sees a row once"
        for chain in chains:
            for i, item in enumerate(chain.items):
                out.append(("chain", item.tok, item.length, chain.fresh and i == 0))
                if item.art != NO_ARTIFACT:
                    out.append(("join", item.art, item.own))
        out += [("native", n.token, n.length, n.start) for n in natives]
        out += [("keep", c.slot) for c in stage.checkpoints if c.row == row]
    return out


drawn_rows = st.one_of(
    st.tuples(st.integers(0, 50), st.integers(51, 60)),
    st.builds(
        lambda stretches, tail, hit, cuts, keep: link_row(
            stretches, tail, hit, min(cuts), max(cuts) + 1, hit + keep if keep else None
        ),
        st.lists(
            st.tuples(
                st.sampled_from([0, 1, 3, CHAIN_LIMIT, CHAIN_LIMIT + 1, CHAIN_LIMIT + 40]),
                st.sampled_from([2, W, W + 1, 20]),
            ),
            max_size=4,
        ),
        st.sampled_from([1, 5, CHAIN_LIMIT + 1]),
        st.integers(0, 3),
        st.tuples(st.sampled_from([0, 0, 3, 40, 200]), st.integers(0, 500)),
        st.integers(0, 300),
    ),
)


@given(st.lists(drawn_rows, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_stages_do_what_the_runs_say(rows: list[Any]) -> None:
    stages = stages_of(*rows)
    token = 0
    for i, row in enumerate(rows):
        if not isinstance(row, LinkRow):
            begin, end = row
            assert steps(stages, i) == [("native", token, end - begin, begin)]
            token += end - begin
            continue
        expected_tokens: list[tuple[int, int]] = []
        expected_joins = []
        keep_at = None
        for run in row.runs:
            expected_tokens += [(token + run.offset + k, run.start + k) for k in range(run.length)]
            keep = row.checkpoint
            if keep and run.start < keep[0] <= run.start + run.length:
                keep_at = token + run.offset + keep[0] - run.start, len(expected_joins)
            if run.segment != NO_ARTIFACT:
                segment = row.link.segments[run.segment]
                own = min(CONV, max(segment.length - W, 0))
                expected_joins.append((1000 * run.segment, own, token + run.offset + run.length))
        seen, joins, kept = [], [], None
        for step in steps(stages, i):
            if step[0] == "join":
                joins.append((*step[1:], token + len(seen)))
            elif step[0] == "keep":
                assert step[1] == SLOT
                kept = token + len(seen), len(joins)
            else:
                kind, first, length, start = step
                assert kind == "chain" or length > CHAIN_LIMIT
                assert kind == "native" or length <= CHAIN_LIMIT
                if kind == "native":
                    assert start == row.positions[first - token]
                seen += range(first, first + length)
        assert seen == [t for t, _ in expected_tokens], "every token once, in natural order"
        assert joins == expected_joins, "every artifact behind the tokens that stand before it"
        assert kept == keep_at, "the checkpoint behind the token that it names, before what joins there"
        token += row.end - row.begin


@given(st.lists(drawn_rows, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_only_a_row_that_begins_from_nothing_is_fresh(rows: list[Any]) -> None:
    for stage_number, stage in enumerate(stages := stages_of(*rows)):
        for chain in stage.chains:
            row = rows[chain.row]
            first = not any(chain.row in {x.row for x in (*s.chains, *s.natives)} for s in stages[:stage_number])
            assert chain.fresh == (first and row.first and row.layout.hit == 0)


def test_most_batches_need_one_stage() -> None:
    """Seams, short gaps and a short question in the chain; ordinary rows and compiles in the native kernel."""
    compiling = CompileRow(Compile(Artifact(b"c", array("q", range(70)), "", 0, 10, 0), W), 0, 0, 70)
    (stage,) = stages_of(link_row([(5, 20), (0, 20)], 9, 0), (3, 8), compiling)
    assert [(c.row, c.fresh, c.items) for c in stage.chains] == [
        (0, True, [ChainItem(0, 9, 0, CONV, 5), ChainItem(9, 4, 1000, CONV, 25), ChainItem(13, 9, NO_ARTIFACT, 0)])
    ]
    assert [(n.row, n.start, n.length, n.token) for n in stage.natives] == [(1, 3, 5, 22), (2, 0, 70, 27)]
    assert not stage.checkpoints


def test_a_long_question_follows_the_chain_in_the_same_stage() -> None:
    (stage,) = stages_of(link_row([(5, 20)], 300, 0))
    assert [c.items for c in stage.chains] == [[ChainItem(0, 9, 0, CONV, 5)]]
    assert [(n.start, n.length, n.token) for n in stage.natives] == [(25, 300, 9)]


def test_a_long_head_opens_a_stage_in_front_of_the_chain() -> None:
    first, second = stages_of(link_row([(300, 20)], 5, 0), (0, 7))
    assert [(n.row, n.length) for n in first.natives] == [(0, 304), (1, 7)] and not first.chains
    (chain,) = second.chains
    assert not chain.fresh and chain.items == [ChainItem(304, 0, 0, CONV, 300), ChainItem(304, 5, NO_ARTIFACT, 0)]


def test_an_interior_shorter_than_the_conv_window_owns_what_it_has() -> None:
    (stage,) = stages_of(link_row([(0, W + 1), (1, W + 2), (0, W)], 2, 0))
    assert [item.own for item in stage.chains[0].items] == [1, 2, 0, 0]


def test_a_checkpoint_in_a_question_cuts_it() -> None:
    first, second = stages_of(link_row([(0, 20)], 300, 0, checkpoint=20 + 200))
    assert [(n.token, n.length) for n in first.natives] == [(4, 200)]
    assert [(c.row, c.slot) for c in first.checkpoints] == [(0, SLOT)]
    assert [c.items for c in second.chains] == [[ChainItem(204, 100, NO_ARTIFACT, 0)]] and not second.checkpoints


def test_a_checkpoint_at_the_end_of_a_seam_is_kept_before_its_artifact_joins() -> None:
    first, second = stages_of(link_row([(12, 20)], 5, 0, checkpoint=16))
    assert [c.items for c in first.chains] == [[ChainItem(0, 16, NO_ARTIFACT, 0)]] and len(first.checkpoints) == 1
    assert [c.items for c in second.chains] == [[ChainItem(16, 0, 0, CONV, 12), ChainItem(16, 5, NO_ARTIFACT, 0)]]
