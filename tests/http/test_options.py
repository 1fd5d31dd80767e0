"""The ``hypic`` object of a request: what is refused, and what the error says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.engine.http.options import BadRequest, Options


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ([1], "must be an object with the keys insert, method, report, segments, separator"),
        ("x", "must be an object"),
        ({"seperator": "|"}, "unknown key 'seperator'; valid keys are insert, method, report, segments, separator"),
        ({"separator": 5}, "hypic.separator: must be a string, got 5"),
        ({"method": 0}, "hypic.method: must be a string, got 0"),
        ({"report": "yes"}, "hypic.report: must be true or false, got 'yes'"),
        ({"segments": "0-5"}, "hypic.segments: must be a list of"),
    ],
)
def test_bad_options(raw: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        Options.parse(raw)


def test_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options(separator=None, segments=None, report=False)
    assert Options.parse({"separator": "", "report": None}) == Options(separator="")


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([[0, 5], [4, 8]], r"segments\[1\] = \[4, 8\] overlaps hypic.segments\[0\] = \[0, 5\]"),
        ([[4, 8], [0, 5]], r"segments\[0\] = \[4, 8\] overlaps hypic.segments\[1\]"),
        ([[0, 5], [0, 5]], "overlaps"),
        ([[3, 3]], r"segments\[0\] = \[3, 3\]: is empty; end is exclusive"),
        ([[5, 3]], "is empty"),
        ([[0, 11]], r"leaves the prompt of 10 tokens"),
        ([[-1, 4]], "leaves the prompt"),
        ([[0, 1, 2]], "must be two integers"),
        ([5], "must be two integers"),
        ([["0", "1"]], "must be two integers"),
        ([[0.0, 1.0]], "must be two integers"),
        ([[False, True]], "must be two integers"),
        ([None], "must be two integers"),
    ],
)
def test_bad_segments(segments: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        Options.parse({"segments": segments}).bounds([10], batch=False)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), unique=True).map(sorted), st.randoms(use_true_random=False))
def test_any_order_is_sorted(cuts: list[int], rng: Any) -> None:
    wanted = list(zip(cuts[::2], cuts[1::2], strict=False))
    shuffled = [list(w) for w in wanted]
    rng.shuffle(shuffled)
    assert Options(segments=shuffled).bounds([50], batch=False) == [tuple(wanted)]


def test_batches_have_one_list_for_each_prompt() -> None:
    assert Options(segments=[[[0, 2]], None, []]).bounds([5, 5, 5], batch=True) == [((0, 2),), (), ()]
    assert Options(segments=[[[0, 2]]]).bounds([5], batch=True) == [((0, 2),)]
    assert Options().bounds([5, 5], batch=True) == [(), ()]
    for wrong in ([[0, 2]], [[0, 2], [2, 4]], [[[0, 2]]], []):
        with pytest.raises(BadRequest, match="for a batch of 2 prompts send 2 lists"):
            Options(segments=wrong).bounds([5, 5], batch=True)
    with pytest.raises(BadRequest, match=r"segments\[1\]\[0\] = \[0, 9\]: leaves"):
        Options(segments=[[], [[0, 9]]]).bounds([5, 5], batch=True)


def test_long_values_are_cut_in_errors() -> None:
    with pytest.raises(BadRequest) as e:
        Options.parse({"separator": ["x"] * 1000})
    assert len(str(e.value)) < 200
