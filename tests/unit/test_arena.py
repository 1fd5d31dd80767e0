"""The arena: blocks never overlap, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.artifact.arena import ALIGN, Arena, align

GRANULES = 32


@given(st.lists(st.one_of(st.integers(1, 9 * ALIGN), st.none()), max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_blocks_are_disjoint_whole_and_given_back(calls: list[int | None], rng: object) -> None:
    """A number allocates that many bytes, None frees some block."""
    arena = Arena(GRANULES * ALIGN + 17, "cpu")
    assert arena.nbytes == GRANULES * ALIGN == arena.buffer.numel()
    blocks: dict[int, int] = {}
    for n in calls:
        if n is None:
            if blocks:
                offset = rng.choice(sorted(blocks))  # type: ignore[attr-defined]
                del blocks[offset]
                arena.free(offset)
        else:
            taken = {g for o, size in blocks.items() for g in range(o // ALIGN, (o + size) // ALIGN)}
            holes = "".join("x" if g in taken else "." for g in range(GRANULES))
            want = align(n)
            first = holes.find("." * (want // ALIGN))
            offset = arena.alloc(n)
            assert offset == (None if first < 0 else first * ALIGN), "first fit, and only no hole is no fit"
            if offset is not None:
                blocks[offset] = want
        arena.check_integrity()
        assert arena.free_bytes == arena.nbytes - sum(blocks.values())
    for offset in blocks:
        arena.free(offset)
    assert arena.alloc(arena.nbytes) == 0, "holes that touch become one"


def test_a_block_is_freed_once() -> None:
    arena = Arena(4 * ALIGN, "cpu")
    offset = arena.alloc(1)
    assert offset is not None
    arena.free(offset)
    with pytest.raises(KeyError):
        arena.free(offset)
    with pytest.raises(KeyError):
        arena.free(ALIGN)


def test_an_arena_smaller_than_a_granule_holds_nothing() -> None:
    arena = Arena(ALIGN - 1, "cpu")
    assert arena.alloc(1) is None
    arena.check_integrity()


@pytest.mark.parametrize(("n", "rounded"), [(0, 0), (1, ALIGN), (ALIGN, ALIGN), (ALIGN + 1, 2 * ALIGN)])
def test_align(n: int, rounded: int) -> None:
    assert align(n) == rounded
