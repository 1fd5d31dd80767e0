"""The next turn of a conversation goes to the worker that has its beginning, unless others would be sooner."""

from __future__ import annotations

import random
from array import array

import pytest

from hypic.router.prefixes import BLOCK, Prefixes, digests
from hypic.router.schedule import CROWD, Cluster, Worker, place
from hypic.segment import Bounds
from tests.router.test_schedule import cluster, holds, key, segments

RNG = random.Random(0)


def tokens(n: int) -> array[int]:
    return array("q", [RNG.randrange(1000) for _ in range(n)])


def blocks(ids: array[int], *cached: tuple[int, int], space: str = "") -> list[bytes]:
    return digests(ids, space, [Bounds(*b) for b in cached])


def sent(c: Cluster, worker: str, ids: array[int]) -> None:
    c.prefixes.remember(worker, blocks(ids))


def test_blocks_are_equal_as_far_as_all_is_equal() -> None:
    ids = tokens(5 * BLOCK + 3)
    first = blocks(ids)
    assert len(first) == 5 == len(set(first))
    longer = ids + tokens(BLOCK)
    assert blocks(longer)[:5] == first
    changed = array("q", ids)
    changed[2 * BLOCK] += 1
    assert [a == b for a, b in zip(blocks(changed), first, strict=True)] == [True, True, False, False, False]
    assert not set(blocks(ids, space="another tenant")) & set(first)
    linked = blocks(ids, (10, 20), (2 * BLOCK - 1, 3 * BLOCK))
    same = blocks(longer, (10, 20), (2 * BLOCK - 1, 3 * BLOCK), (5 * BLOCK, 6 * BLOCK))
    assert same[:5] == linked and same[5:] != blocks(longer)[5:]
    other = blocks(ids, (10, 20), (2 * BLOCK, 3 * BLOCK))
    assert [a == b for a, b in zip(other, linked, strict=True)] == [True, False, False, False, False]
    assert not blocks(tokens(BLOCK - 1))


def test_the_longest_beginning_decides() -> None:
    seen, ids = Prefixes(), tokens(4 * BLOCK)
    seen.remember("w1", blocks(ids[: 2 * BLOCK]))
    seen.remember("w2", blocks(ids))
    assert seen.tokens(blocks(ids + tokens(BLOCK))) == {"w2": 4 * BLOCK, "w1": 2 * BLOCK}
    assert seen.tokens(blocks(ids[: 3 * BLOCK])) == {"w2": 3 * BLOCK, "w1": 2 * BLOCK}
    seen.leave("w2")
    assert seen.tokens(blocks(ids)) == {"w1": 2 * BLOCK}
    seen.clear()
    assert seen.tokens(blocks(ids)) == {}


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    seen, old, kept = Prefixes(most=8), tokens(3 * BLOCK), tokens(3 * BLOCK)
    for ids in (old, kept, kept, tokens(4 * BLOCK)):
        seen.remember("w0", blocks(ids))
    assert not seen.tokens(blocks(old)[:2]) and seen.tokens(blocks(kept)) == {"w0": 3 * BLOCK}


def test_the_next_turn_goes_where_the_one_before_went() -> None:
    c, turn = cluster(3), tokens(500)
    assert place(c, [], prefix=blocks(turn)).combine == "w0", "nobody has it"
    sent(c, "w2", turn)
    following = turn + tokens(100)
    assert place(c, [], prefix=blocks(following)).combine == "w2"
    assert place(c, [], prefix=blocks(tokens(500))).combine == "w0"
    c.workers["w2"].drained = True
    assert place(c, [], prefix=blocks(following)).combine == "w0"
    c.workers["w2"].drained = False
    c.lost("w2")
    c.workers["w2"] = Worker("w2")
    assert place(c, [], prefix=blocks(following)).combine == "w0", "it was started again, and is empty"


def test_it_goes_elsewhere_where_waiting_would_take_longer_than_computing_it_again() -> None:
    """500 tokens take half a second."""
    c, turn = cluster(2), tokens(8 * BLOCK)
    sent(c, "w1", turn)
    for queued, combine in ((400, "w1"), (700, "w0")):
        c.workers["w1"].queued_tokens = queued
        assert place(c, [], prefix=blocks(turn)).combine == combine


@pytest.mark.parametrize("idle", [0, 3])
def test_a_beginning_that_all_share_does_not_crowd_one_worker(idle: int) -> None:
    c, turn = cluster(3), tokens(8 * BLOCK)
    sent(c, "w2", turn)
    for worker in c.workers.values():
        worker.running = idle
    c.workers["w2"].running = 2 * idle + CROWD
    assert place(c, [], prefix=blocks(turn)).combine == "w2"
    c.workers["w2"].running += 1
    assert place(c, [], prefix=blocks(turn)).combine == "w0"


def test_artifacts_and_beginning_count_by_the_time_they_save() -> None:
    """w1 holds the artifact, which takes 0.1 ms to send; w2 has computed 512 tokens."""
    c, turn = cluster(3), tokens(8 * BLOCK)
    holds(c, "w1", key(0))
    wanted = segments(200)
    assert place(c, wanted, prefix=blocks(turn)).combine == "w1"
    sent(c, "w2", turn)
    placed = place(c, wanted, prefix=blocks(turn))
    assert (placed.combine, placed.sources[key(0)]) == ("w2", ("send", "w1"))
