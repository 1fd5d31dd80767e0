"""Holders of artifacts: what workers say counts in order, from their present run, and until it is disproved."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypic.router.directory import Directory

WORKERS, KEYS = ("w0", "w1", "w2"), tuple(bytes([i]) for i in range(5))


def test_announcements_count_in_order_and_of_the_present_run() -> None:
    d = Directory()
    assert not d.stored("w0", b"a", 1, [b"k"], [1]), "not joined"
    d.join("w0", b"a")
    assert d.stored("w0", b"a", 1, [b"k", b"l"], [1, 2])
    assert d.holders(b"k") == {"w0"}
    assert not d.stored("w0", b"a", 1, [b"m"], [1]), "twice"
    assert not d.evicted("w0", b"a", 3, [b"k"]), "one is missing"
    assert not d.evicted("w0", b"old", 2, [b"k"]), "another run of it"
    assert d.holders(b"k") == {"w0"} and not d.holders(b"m")
    assert d.evicted("w0", b"a", 2, [b"k"])
    assert not d.holders(b"k") and d.holds("w0", b"l")
    d.join("w0", b"b")
    assert not d.holders(b"l"), "it started again, empty"
    assert d.stored("w0", b"b", 1, [b"k"], [1])


class Machine(RuleBasedStateMachine):
    """Against a plain set of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory()
        self.truth: set[tuple[str, bytes]] = set()
        self.seq: dict[str, int] = {}

    def next(self, worker: str) -> int:
        if worker in self.seq:
            self.seq[worker] += 1
        return self.seq.get(worker, 1)

    @rule(worker=st.sampled_from(WORKERS))
    def join(self, worker: str) -> None:
        self.directory.join(worker, b"e")
        self.seq[worker] = 0
        self.truth = {p for p in self.truth if p[0] != worker}

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.directory.leave(worker)
        self.seq.pop(worker, None)
        self.truth = {p for p in self.truth if p[0] != worker}

    @rule(worker=st.sampled_from(WORKERS), keys=st.lists(st.sampled_from(KEYS)))
    def stored(self, worker: str, keys: list[bytes]) -> None:
        known = worker in self.seq
        assert self.directory.stored(worker, b"e", self.next(worker), keys, [1] * len(keys)) == known
        self.truth |= {(worker, k) for k in keys if known}

    @rule(worker=st.sampled_from(WORKERS), keys=st.lists(st.sampled_from(KEYS)))
    def evicted(self, worker: str, keys: list[bytes]) -> None:
        assert self.directory.evicted(worker, b"e", self.next(worker), keys) == (worker in self.seq)
        self.truth -= {(worker, k) for k in keys}

    @rule(worker=st.sampled_from(WORKERS), key=st.sampled_from(KEYS))
    def disprove(self, worker: str, key: bytes) -> None:
        self.directory.disprove(worker, key)
        self.truth -= {(worker, key)}

    @invariant()
    def agrees(self) -> None:
        for k in KEYS:
            assert self.directory.holders(k) == {w for w, held in self.truth if held == k}
        for w in WORKERS:
            assert self.directory.count(w) == sum(worker == w for worker, _ in self.truth)
        assert set(self.directory._holders) == {k for _, k in self.truth}, "nothing is kept for what nobody holds"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
