"""Run plans: every token is presented once, computed once, and joined where it stands."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.plan import MARK, NO_ARTIFACT, Interior, LinkLayout, Run, mark_interiors


class Prompt(NamedTuple):
    """A prompt to be linked: (computed, interior) lengths of each segment's stretch, the tail, and the radix hit."""

    stretches: list[tuple[int, int]]
    tail: int
    hit: int

    @property
    def interiors(self) -> list[Interior]:
        out, at = [], self.hit
        for i, (computed, interior) in enumerate(self.stretches):
            at += computed
            out.append(Interior(at, at + interior, i))
            at += interior
        return out

    @property
    def total(self) -> int:
        return self.hit + sum(a + b for a, b in self.stretches) + self.tail

    def layout(self) -> LinkLayout:
        return LinkLayout(self.total, self.hit, self.interiors)


prompts = st.builds(
    Prompt,
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6),
    st.integers(1, 9),
    st.integers(0, 9),
)


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Prompt, list[tuple[int, int]]]:
    """A prompt and the chunks it is computed in, in presented positions."""
    prompt = draw(prompts)
    layout = prompt.layout()
    cuts = draw(st.sets(st.integers(layout.prefix_len, layout.total), max_size=5))
    ends = sorted(cuts | {layout.prefix_len, layout.total})
    return prompt, list(itertools.pairwise(ends))


@given(prompts)
def test_the_presented_order_is_hit_then_interiors_then_what_is_computed(prompt: Prompt) -> None:
    layout = prompt.layout()
    order = layout.order(0, layout.total).tolist()
    inside = {p for lo, hi, _ in prompt.interiors for p in range(lo, hi)}
    rest = [p for p in range(prompt.hit, prompt.total) if p not in inside]
    assert order == [*range(prompt.hit), *sorted(inside), *rest]
    assert layout.prefix_len == prompt.hit + len(inside) and layout.interior_tokens == len(inside)
    assert layout.reserve_end == max([prompt.hit, *(hi for _, hi, _ in prompt.interiors)])
    assert order[layout.reserve_end :] == list(range(layout.reserve_end, prompt.total))


@given(chunked())
@settings(max_examples=300)
def test_runs_compute_each_token_once_and_join_each_artifact_in_its_place(
    drawn: tuple[Prompt, list[tuple[int, int]]],
) -> None:
    prompt, chunks = drawn
    layout, at = prompt.layout(), prompt.hit
    joined = []
    for begin, end in chunks:
        runs, offset = layout.runs(begin, end), 0
        for run in runs:
            assert run.offset == offset
            offset += run.length
            positions = np.arange(run.start, run.start + run.length)
            assert layout.order(begin, end)[run.offset : offset].tolist() == positions.tolist()
            assert run.start == at, "a run begins where the last one or its artifact ended"
            at += run.length
            if run.segment != NO_ARTIFACT:
                lo, at, _ = prompt.interiors[run.segment]
                assert run.start + run.length == lo
                joined.append(run.segment)
            else:
                assert run.length
        assert offset == end - begin
    assert at == prompt.total
    assert joined == [i.segment for i in prompt.interiors]


@given(chunked(), st.integers(0, 80))
def test_computed_below_counts(drawn: tuple[Prompt, list[tuple[int, int]]], position: int) -> None:
    prompt, chunks = drawn
    for begin, end in chunks:
        runs = prompt.layout().runs(begin, end)
        expected = sum(p < position for r in runs for p in range(r.start, r.start + r.length))
        assert prompt.layout().computed_below(begin, end, position) == expected


def test_an_example() -> None:
    """head 2 | seam 2, interior 3 | gap 1, seam 2, interior 0 | query 2, in chunks of five and two tokens."""
    layout = LinkLayout(12, 0, [Interior(4, 7, 0), Interior(10, 10, 1)])
    assert layout.order(0, 12).tolist() == [4, 5, 6, 0, 1, 2, 3, 7, 8, 9, 10, 11]
    assert layout.runs(3, 8) == [Run(0, 4, 0, 0), Run(4, 1, 7, NO_ARTIFACT)]
    assert layout.runs(8, 12) == [Run(0, 2, 8, 1), Run(2, 2, 10, NO_ARTIFACT)]


def test_artifacts_in_front_of_the_first_token_join_in_the_first_chunk() -> None:
    layout = LinkLayout(10, 2, [Interior(2, 5, 0), Interior(5, 8, 1)])
    assert layout.runs(8, 9) == [Run(0, 0, 2, 0), Run(0, 0, 5, 1), Run(0, 1, 8, NO_ARTIFACT)]
    assert layout.runs(9, 10) == [Run(0, 1, 9, NO_ARTIFACT)]


@pytest.mark.parametrize(
    ("total", "hit", "interiors"),
    [
        (10, 0, [Interior(5, 8, 0), Interior(2, 4, 1)]),
        (10, 0, [Interior(2, 5, 0), Interior(4, 6, 1)]),
        (10, 4, [Interior(2, 6, 0)]),
        (10, 0, [Interior(6, 3, 0)]),
        (10, 0, [Interior(2, 10, 0)]),
        (10, 10, []),
    ],
    ids=["order", "overlap", "cut by the hit", "backwards", "nothing left to compute", "all hit"],
)
def test_impossible_layouts(total: int, hit: int, interiors: list[Interior]) -> None:
    with pytest.raises(ValueError):
        LinkLayout(total, hit, interiors)


@pytest.mark.parametrize(("begin", "end"), [(2, 5), (5, 13), (8, 7)])
def test_impossible_chunks(begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="chunk"):
        LinkLayout(12, 0, [Interior(4, 7, 0)]).runs(begin, end)


ids = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@st.composite
def spanned(draw: st.DrawFn, tokens: list[int]) -> list[Interior]:
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    return [Interior(lo, hi, i) for i, (lo, hi) in enumerate(zip(cuts[::2], cuts[1::2], strict=False))]


@given(st.data())
@settings(max_examples=300)
def test_keys_agree_as_far_as_tokens_and_boundaries_do(data: st.DataObject) -> None:
    """CASES 30: up to the first difference in a token or in where an interior begins or goes on, and no further."""
    a = data.draw(ids)
    b = data.draw(st.sampled_from([a, a[: len(a) // 2] + data.draw(ids)]))
    of_a, of_b = data.draw(spanned(a)), data.draw(spanned(b))

    def kinds(tokens: list[int], interiors: list[Interior]) -> list[tuple[int, str]]:
        kind = ["computed"] * len(tokens)
        for lo, hi, _ in interiors:
            kind[lo:hi] = ["first", *["interior"] * (hi - lo - 1)][: hi - lo]
        return list(zip(tokens, kind, strict=True))

    x, y = mark_interiors(a, of_a).tolist(), mark_interiors(b, of_b).tolist()
    truth_x, truth_y = kinds(a, of_a), kinds(b, of_b)
    assert [i == j for i, j in zip(x, y, strict=False)] == [i == j for i, j in zip(truth_x, truth_y, strict=False)]
    assert [i % MARK for i in x] == a


def test_no_mark_is_a_token() -> None:
    assert mark_interiors([7, 8, 9], [Interior(1, 3, 0)]).tolist() == [7, 8 + 2 * MARK, 9 + MARK]
    assert MARK > 2**32
