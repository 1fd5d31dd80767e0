"""Heartbeats, deadlines and bounded queues."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.router.health import Deadlines, Liveness, Mailbox


def test_silence_is_death_and_is_told_until_forgotten() -> None:
    alive = Liveness(dead_after=2.0)
    alive.heard("a", 0.0)
    alive.heard("b", 1.0)
    assert alive.dead(2.0) == []
    assert alive.dead(3.5) == ["a", "b"]
    alive.heard("a", 3.5)
    alive.heard("a", 1.0)  # a beat that was under way for long
    assert alive.dead(3.6) == ["b"] and alive.dead(3.7) == ["b"]
    alive.forget("b")
    assert alive.dead(9.0) == ["a"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.integers(0, 20))), max_size=80),
    st.integers(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_deadlines(steps: list[tuple[str, int | None]], now: int) -> None:
    deadlines: Deadlines[str] = Deadlines()
    truth: dict[str, int] = {}
    for key, at in steps:
        if at is None:
            deadlines.met(key)
            truth.pop(key, None)
        else:
            deadlines.set(key, at)
            truth[key] = at
    missed = deadlines.missed(now)
    assert set(missed) == {k for k, at in truth.items() if at <= now} and len(missed) == len(set(missed))
    assert [truth[k] for k in missed] == sorted(truth[k] for k in missed)
    assert deadlines.missed(now) == []
    assert len(deadlines) == len(truth) - len(missed)
    assert len(deadlines._heap) <= 2 * len(truth) + 17, "deadlines that were moved are not kept"


def test_a_full_mailbox_refuses_and_counts() -> None:
    async def main() -> None:
        box: Mailbox[str] = Mailbox(items=2, nbytes=10)
        assert box.put("a", 4) and box.put("b", 4)
        assert not box.put("c", 1)
        assert await box.get() == "a"
        assert not box.put("c", 7)
        assert box.put("c", 6)
        assert box.refused == {"items": 1, "bytes": 1}
        assert [await box.get(), await box.get()] == ["b", "c"] and len(box) == 0

    asyncio.run(main())
