"""The layout generator: valid prompts, reproducible, and every awkward case really drawn."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.check.layouts import FIRST_TOKEN, LENGTHS, Layout, document_pool, random_layout
from tests.strategies import layouts

VOCAB = 500
POOL = document_pool(random.Random(1), VOCAB)


def draw(seed: int, max_tokens: int = 600) -> Layout:
    return random_layout(random.Random(seed), VOCAB, max_tokens=max_tokens, pool=POOL)


def check(layout: Layout, max_tokens: int) -> None:
    assert 1 <= len(layout.ids) <= max_tokens
    assert all(FIRST_TOKEN <= t < VOCAB for t in layout.ids)
    done = 0
    for start, end in layout.cached:
        assert done <= start < end <= len(layout.ids)
        assert tuple(layout.ids[start:end]) in POOL
        done = end


@given(st.integers(0, 2**32), st.integers(1, 1500))
@settings(max_examples=300, deadline=None)
def test_every_layout_is_valid_and_reproducible(seed: int, max_tokens: int) -> None:
    layout = draw(seed, max_tokens)
    check(layout, max_tokens)
    assert layout == draw(seed, max_tokens)


def test_awkward_layouts_are_common() -> None:
    """Each case that the stress tests count on is in at least 5% of the layouts."""
    cases: dict[str, int] = {}
    for layout in map(draw, range(400)):
        ids, cached = layout
        gaps = [b[0] - a[1] for a, b in pairwise(cached)]
        documents = [tuple(ids[s:e]) for s, e in cached]
        plain = len(ids) - sum(e - s for s, e in cached)
        found = {
            "only a query": not cached,
            "only segments": not plain,
            "ends in a segment": bool(cached) and cached[-1][1] == len(ids),
            "starts with a segment": bool(cached) and cached[0][0] == 0,
            "adjacent segments": 0 in gaps,
            "gap shorter than the conv kernel": any(0 < g < 4 for g in gaps),
            "gap longer than the seam": any(g > 8 for g in gaps),
            "a segment twice": len(set(documents)) < len(documents),
        } | {f"segment of {n}": any(len(d) == n for d in documents) for n in LENGTHS}
        for name, hit in found.items():
            cases[name] = cases.get(name, 0) + hit
    assert min(cases.values()) >= 20, cases


def test_no_room_for_any_document_leaves_plain_tokens() -> None:
    for seed in range(50):
        check(draw(seed, max_tokens=1), 1)


def test_empty_prompts_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        draw(0, max_tokens=0)


@given(layouts(VOCAB, max_tokens=300, pool=POOL))
@settings(max_examples=50, deadline=None)
def test_the_strategy_draws_valid_layouts(layout: Layout) -> None:
    check(layout, 300)
