"""Named segments in the HTTP process: what is remembered of them, and how they get into prompts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypic.engine.http.insert import cut_at, splice, words_of
from hypic.engine.http.options import BadRequest
from hypic.engine.http.registry import RECORD_BYTES, TOKEN_BYTES, Record, Registry, RegistryFull, UnknownSegment, Wanted
from hypic.segment import Bounds, Piece

TOKENS = [array("i", [n] * n) for n in (1, 2, 40, 50)]
TENANTS = ["", "t", "u"]
BUDGET = 4 * RECORD_BYTES + 60 * TOKEN_BYTES


class RegistryMachine(RuleBasedStateMachine):
    """A registry against a dictionary with deadlines."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.registry = Registry(BUDGET, clock=lambda: self.now)
        self.known: dict[tuple[str, int], tuple[str, float | None, float]] = {}
        """Tenant and length -> id, ttl, when it was touched."""

    def alive(self, key: tuple[str, int]) -> bool:
        if key not in self.known:
            return False
        _, ttl, touched = self.known[key]
        return ttl is None or touched + ttl > self.now

    def cost(self, keys: set[tuple[str, int]]) -> int:
        return sum(RECORD_BYTES + TOKEN_BYTES * n for _, n in keys)

    @rule(
        tenant=st.sampled_from(TENANTS),
        tokens=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=3),
        ttl=st.sampled_from([None, 5.0, 50.0]),
    )
    def put(self, tenant: str, tokens: Sequence[array[int]], ttl: float | None) -> None:
        keys = {(tenant, len(t)) for t in tokens}
        if self.cost(keys | self.known.keys()) > BUDGET:
            with pytest.raises(RegistryFull, match="--hypic-segment-memory"):
                self.registry.put(Wanted(tenant, "", "", t, ttl) for t in tokens)
            return
        records = self.registry.put(Wanted(tenant, "", "", t, ttl) for t in tokens)
        for t, record in zip(tokens, records, strict=True):
            assert (record.tokens, record.tenant) == (t, tenant)
            if (known := self.known.get((tenant, len(t)))) is not None:
                assert record.id == known[0]
            self.known[tenant, len(t)] = record.id, ttl, self.now

    @rule(by=st.sampled_from([1.0, 6.0, 60.0]))
    def wait(self, by: float) -> None:
        self.now += by

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.sampled_from(TOKENS), other=st.sampled_from(TENANTS))
    def use(self, tenant: str, tokens: array[int], other: str) -> None:
        key = tenant, len(tokens)
        name = self.known[key][0] if key in self.known else "seg_none"
        if not self.alive(key) or other != tenant:
            with pytest.raises(UnknownSegment):
                self.registry.use(other, name)
            return
        assert self.registry.use(tenant, name) == tokens
        self.known[key] = name, self.known[key][1], self.now

    @rule()
    def expire(self) -> None:
        gone = {k: self.known[k] for k in self.known if not self.alive(k)}
        assert sorted(self.registry.expired()) == sorted(name for name, _, _ in gone.values())
        self.registry.drop(self.registry.expired())
        for key in gone:
            del self.known[key]

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.sampled_from(TOKENS))
    def drop(self, tenant: str, tokens: array[int]) -> None:
        if known := self.known.pop((tenant, len(tokens)), None):
            self.registry.drop([known[0]])

    @invariant()
    def agrees(self) -> None:
        assert len(self.registry) == len(self.known)
        assert self.registry.used_bytes == self.cost(set(self.known)) <= BUDGET
        for tenant in TENANTS:
            alive = {v[0] for k, v in self.known.items() if k[0] == tenant and self.alive(k)}
            assert {r.id for r in self.registry.of(tenant)} == alive
        lefts = [max(t + ttl - self.now, 0.0) for _, ttl, t in self.known.values() if ttl is not None]
        assert self.registry.next_expiry() == min(lefts, default=None)


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_looking_is_no_use() -> None:
    now = [0.0]
    registry = Registry(BUDGET, clock=lambda: now[0])
    record: Record = registry.put([Wanted("", "", "", TOKENS[0], 5.0)])[0]
    now[0] = 4.0
    registry.get("", record.id)
    assert registry.left(record) == 1.0
    registry.use("", record.id)
    assert registry.left(record) == 5.0


# ---------------------------------------------------------------------- into prompts

NAMED = {"one": [101, 102, 103], "other": [201], "third": [301, 302]}


def use(name: str) -> list[int]:
    try:
        return NAMED[name]
    except KeyError:
        raise UnknownSegment(name) from None


@settings(deadline=None)
@given(st.integers(0, 12), st.data())
def test_spliced_prompts(length: int, data: Any) -> None:
    """Without what was put in, the prompt is as it was; every segment has its tokens; order is that of positions."""
    ids = list(range(length))
    cuts = sorted(data.draw(st.sets(st.integers(0, length), max_size=6)))
    cached = [Bounds(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    free = [p for p in range(length + 1) if not any(b.start < p < b.end for b in cached)]
    raw = [
        [p, n]
        for p, n in data.draw(st.lists(st.tuples(st.sampled_from(free), st.sampled_from(sorted(NAMED))), max_size=5))
    ]
    out, bounds = splice(ids, cached, raw, use, "hypic.insert")
    assert [i for i in out if i < 100] == ids
    assert len(out) == length + sum(len(NAMED[n]) for _, n in raw)
    found = [out[b.start : b.end] for b in bounds]
    in_order = [NAMED[n] for _, n in sorted(raw, key=lambda pair: pair[0])]
    assert [f for f in found if f[0] > 100] == in_order
    assert [f for f in found if f[0] < 100] == [ids[b.start : b.end] for b in cached]
    assert all(a.end <= b.start for a, b in pairwise(bounds))
    before = [sum(i < 100 for i in out[: b.start]) for b in bounds if out[b.start] > 100]
    assert before == sorted(p for p, _ in raw), "each at its position"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"x": "one"}, r"insert\[0\]: must be \[position, id"),
        ([[0]], r"insert\[0\]: must be"),
        ([[0, "one"], [True, "one"]], r"insert\[1\]: must be"),
        ([["0", "one"]], "must be"),
        ([[-1, "one"]], "leaves the prompt of 6 tokens"),
        ([[7, "one"]], "leaves the prompt of 6 tokens"),
        ([[3, "one"]], r"is inside of the segment \[2, 4\]"),
    ],
)
def test_bad_places(raw: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        splice(list(range(6)), [Bounds(2, 4)], raw, use, "hypic.insert")
    with pytest.raises(UnknownSegment):
        splice([1], [], [[0, "none"]], use, "hypic.insert")


def test_texts_are_cut_where_a_word_stands() -> None:
    pieces = [Piece("a<1>b <11>", False), Piece("<1> x", True), Piece("<1", False)]
    words = {"<1>": NAMED["one"], "<11>": NAMED["other"]}
    assert cut_at(pieces, words) == [
        Piece("a", False),
        Piece("<1>", True, NAMED["one"]),
        Piece("b ", False),
        Piece("<11>", True, NAMED["other"]),
        Piece("<1>", True, NAMED["one"]),
        Piece(" x", True),
        Piece("<1", False),
    ]
    assert cut_at(pieces, {}) == pieces
    longer = {"<1": NAMED["one"], "<1>": NAMED["other"]}
    assert cut_at([Piece("<1>", False)], longer) == [Piece("<1>", True, NAMED["other"])], "the longer word wins"
    assert cut_at([Piece("one", True)], {"one": [1]})[0].ids == [1]


def test_a_word_that_does_not_stand_in_the_prompt_is_an_error() -> None:
    assert words_of({"<1>": "one"}, ["a", "b<1>"], use) == {"<1>": NAMED["one"]}
    assert words_of(None, ["a"], use) == {}
    for raw, says in (
        ({"<2>": "one"}, "does not stand"),
        ({"": "one"}, "send {"),
        ({"a": 5}, "send {"),
        ("a", "send {"),
    ):
        with pytest.raises(BadRequest, match=says):
            words_of(raw, ["a"], use)
    with pytest.raises(UnknownSegment):
        words_of({"a": "none"}, ["a"], use)
