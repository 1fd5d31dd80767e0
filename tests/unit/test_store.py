"""The artifact store against a simple model of it, and under floods and races (CASES 7, 9, 12, 27, 28)."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from hypic.artifact.arena import ALIGN, Arena
from hypic.artifact.store import PROTECTED_SHARE, Artifact, ArtifactStore, Request

GRANULES = 20
NAMES = [f"{i}" for i in range(10)]


def tokens(name: str) -> array:
    return array("q", map(ord, name))


def wanted(name: str, granules: int, adapter: str = "") -> Request:
    return Request(name.encode(), tokens(name), adapter, ALIGN // 2, granules * ALIGN - ALIGN // 2)


def size(name: str) -> int:
    """Granules of an artifact: what it is a function of decides on its size."""
    return 2 + int(name) % 4


class Model:
    """What is documented of the store: who is in which class, least recently used first."""

    def __init__(self) -> None:
        self.probation: list[str] = []
        self.protected: list[str] = []
        self.evicted: set[str] = set()
        self.last_evicted: str | None = None

    @property
    def names(self) -> set[str]:
        return {*self.probation, *self.protected}

    def hit(self, name: str) -> None:
        self.forget(name)
        self.protected.append(name)
        while sum(map(size, self.protected)) > PROTECTED_SHARE * GRANULES and len(self.protected) > 1:
            self.probation.append(self.protected.pop(0))

    def forget(self, name: str) -> None:
        for names in (self.probation, self.protected):
            if name in names:
                names.remove(name)

    def evict(self, name: str) -> None:
        self.forget(name)
        self.evicted.add(name)
        self.last_evicted = name

    def victims(self, locked: set[str]) -> list[str]:
        """In the order in which newcomers push them out."""
        return [n for n in (*self.probation, *self.protected) if n not in locked]


class StoreMachine(RuleBasedStateMachine):
    """Requests come and go; every blob carries a stamp of its own, which nobody else may overwrite."""

    compiling = Bundle("compiling")
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.store = ArtifactStore(Arena(GRANULES * ALIGN, "cpu"))
        self.model = Model()
        self.alive: dict[Artifact, int] = {}
        """Stamps of all artifacts whose bytes somebody may still read."""
        self.serial = 0
        self.pinned: set[str] = set()

    def find(self, name: str) -> Artifact | None:
        return self.store.find(name.encode(), tokens(name))

    def kept(self) -> set[str]:
        """What is never evicted: locked or pinned."""
        return self.pinned | {a.key.decode() for a in self.alive if a.locks and not a.stale}

    def stamp(self, artifact: Artifact) -> None:
        self.serial = self.serial % 255 + 1
        self.store.arena.buffer[artifact.offset : artifact.offset + artifact.nbytes] = self.serial
        self.alive[artifact] = self.serial

    def bury(self) -> None:
        """Forget what is neither found nor locked any more."""
        self.alive = {a: s for a, s in self.alive.items() if a.locks or self.find(a.key.decode()) is a}

    @rule(target=compiling, name=st.sampled_from(NAMES), adapter=st.sampled_from(["", "lora"]))
    def reserve_one(self, name: str, adapter: str) -> Any:
        if name in self.model.names:
            return None
        order = self.model.victims(self.kept())
        made = self.store.reserve([wanted(name, size(name), adapter)])
        gone = self.model.names - {a.key.decode() for a in self.store._index.values()}
        assert gone == set(order[: len(gone)]), "the least worthy go first"
        for victim in order[: len(gone)]:
            self.model.evict(victim)
        self.bury()
        if made is None:
            assert set(order) == gone, "what could go has gone before a request is sent away"
            assert self.kept() or any(a.locks for a in self.alive), "an empty arena takes any artifact that it can hold"
            return None
        (artifact,) = made
        self.stamp(artifact)
        self.model.probation.append(name)
        is_protected = name.encode() in self.store._protected
        if name not in self.model.evicted:
            assert not is_protected, "a newcomer begins in probation"
        if name == self.model.last_evicted:
            assert is_protected, "what was evicted last and is wanted again is protected at once"
            self.model.last_evicted = None
        self.model.evicted.discard(name)
        if is_protected:
            self.model.hit(name)
        assert (artifact.locks, artifact.ready, artifact.stale, artifact.adapter) == (1, False, False, adapter)
        return artifact

    @precondition(lambda self: self.serial % 4 == 0)  # it empties the store: not all the time
    @rule(names=st.lists(st.sampled_from(NAMES), unique=True, min_size=2, max_size=4))
    def reserve_too_much(self, names: list[str]) -> None:
        """More than the arena: nothing of it is reserved."""
        before, order = self.model.names, self.model.victims(self.kept())
        names = [n for n in names if n not in before]
        made = self.store.reserve(wanted(n, GRANULES // 2 + 1) for n in names[:2]) if len(names) > 1 else None
        assert made is None
        assert not any(self.find(n) for n in names)
        gone = before - {a.key.decode() for a in self.store._index.values()}
        assert gone == set(order[: len(gone)])
        for name in order[: len(gone)]:
            self.model.evict(name)
        self.bury()

    @rule(artifact=consumes(compiling), works=st.booleans())
    def compile_ends(self, artifact: Artifact | None, works: bool) -> None:
        if artifact is None:
            return
        if works:
            self.store.commit(artifact)
            assert artifact.ready
        else:
            if not artifact.stale:
                self.model.forget(artifact.key.decode())
            self.store.discard(artifact)
        self.bury()

    @rule(target=held, name=st.sampled_from(NAMES))
    def lock(self, name: str) -> Any:
        artifact = self.find(name)
        assert (artifact is not None) == (name in self.model.names)
        if artifact is not None:
            self.store.lock(artifact)
            if artifact.ready:
                self.model.hit(name)
        return artifact

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=8))
    def serve(self, names: list[str]) -> None:
        """Requests for one artifact each, from arrival to end."""
        for name in names:
            if self.find(name) is None:
                self.compile_ends(self.reserve_one(name, ""), True)
            else:
                self.unlock(self.lock(name))

    @rule(artifact=consumes(held))
    def unlock(self, artifact: Artifact | None) -> None:
        if artifact is not None:
            self.store.unlock(artifact)
            self.bury()

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: str) -> None:
        """Also what is not there yet; not so much that nothing else fits."""
        if len(self.pinned) < 3:
            self.store.pin(name.encode())
            self.pinned.add(name)

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        self.store.unpin(name.encode())
        self.pinned.discard(name)

    @rule(adapters=st.sampled_from([("lora",), ("lora",), ("",), ("", "lora")]))
    def invalidate(self, adapters: tuple[str, ...]) -> None:
        victims = [a for a in self.store._index.values() if a.adapter in adapters]
        assert self.store.invalidate(lambda a: a.adapter in adapters) == len(victims)
        for a in victims:
            self.model.forget(a.key.decode())
            assert a.stale == bool(a.locks) and self.find(a.key.decode()) is None
        self.bury()

    @precondition(lambda self: self.model.names)
    @rule()
    def collide(self) -> None:
        """Another segment under the same digest: neither is used."""
        name = min(self.model.names)
        with pytest.raises(KeyError, match="same digest"):
            self.store.find(name.encode(), array("q", [1, 2, 3]))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.store.check_integrity()
        assert [k.decode() for k in self.store._probation] == self.model.probation
        assert [k.decode() for k in self.store._protected] == self.model.protected
        assert len(self.store) == len(self.model.names)
        assert self.store.used_bytes == sum(a.nbytes for a in self.alive)
        assert self.store.locked() == sum(a.locks for a in self.alive)
        here = self.pinned & self.model.names
        assert self.store.pinned_bytes() == sum(size(n) for n in here) * ALIGN
        assert self.store.pinned_bytes(apart_from=[n.encode() for n in here]) == 0
        assert self.store.ready() == [a for a in self.store._index.values() if a.ready]

    @invariant()
    def no_blob_was_overwritten(self) -> None:
        for artifact, stamp in self.alive.items():
            blob = self.store.arena.buffer[artifact.offset : artifact.offset + artifact.nbytes]
            assert (blob == stamp).all(), f"bytes of artifact {artifact.key!r} were given to another"

    def teardown(self) -> None:
        for artifact in list(self.alive):
            while artifact.locks:
                self.store.unlock(artifact)
        self.store.invalidate()  # pinned ones, too
        assert self.store.used_bytes == 0 and self.store.locked() == 0
        self.store.check_integrity()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------------- examples

EIGHT = 8


@pytest.fixture
def store() -> ArtifactStore:
    """Room for eight artifacts."""
    return ArtifactStore(Arena(EIGHT * 3 * ALIGN, "cpu"))


def ask(store: ArtifactStore, *names: str) -> list[bool]:
    """Serve a request of these artifacts from arrival to end; which of them were there."""
    found = [store.find(n.encode(), tokens(n)) for n in names]
    for artifact in found:
        if artifact is not None:
            store.lock(artifact)
    made = store.reserve([wanted(n, 3) for n, a in zip(names, found, strict=True) if a is None])
    assert made is not None
    for artifact in made:
        store.lock(artifact)
        store.commit(artifact)
    for artifact in [*filter(None, found), *made]:
        store.unlock(artifact)
    assert store.locked() == 0
    store.check_integrity()
    return [a is not None for a in found]


def test_12_a_flood_leaves_what_is_popular(store: ArtifactStore) -> None:
    popular = ["p0", "p1", "p2"]
    for _ in range(2):
        ask(store, *popular)
    for i in range(1000):
        assert ask(store, f"one-off {i}") == [False]
        if i % 100 == 0:
            assert ask(store, *popular) == [True] * 3
    assert ask(store, *popular) == [True] * 3
    assert store.evictions >= 1000 - EIGHT


def test_12_what_becomes_popular_takes_the_place_of_what_was(store: ArtifactStore) -> None:
    for names in (["a", "b", "c", "d", "e", "f"], ["u", "v", "w", "x", "y", "z"]):
        for _ in range(3):
            for name in names:
                ask(store, name)
    assert [ask(store, n) for n in names] == [[True]] * 6


def test_27_all_or_nothing(store: ArtifactStore) -> None:
    half = EIGHT // 2 + 1
    first = store.reserve([wanted(f"a{i}", 3) for i in range(half)])
    assert first is not None and len(first) == half
    second = [wanted(f"b{i}", 3) for i in range(half)]
    assert store.reserve(second) is None
    assert store.used_bytes == half * 3 * ALIGN and not any(store.find(w.key, w.tokens) for w in second)
    for artifact in first:
        store.commit(artifact)
    made = store.reserve(second)
    assert made is not None and [a.key for a in made] == [w.key for w in second]
    store.check_integrity()


def test_07_an_artifact_that_is_used_twice_is_freed_once(store: ArtifactStore) -> None:
    ask(store, "a")
    (artifact,) = store.ready()
    store.lock(artifact)
    store.lock(artifact)
    assert store.invalidate() == 1
    store.unlock(artifact)
    assert store.used_bytes == artifact.nbytes
    store.lock(artifact)  # held, but stale: it does not come back
    store.check_integrity()
    store.unlock(artifact)
    store.unlock(artifact)
    assert store.used_bytes == 0
    with pytest.raises(AssertionError, match="unlocked twice"):
        store.unlock(artifact)


def test_28_a_compile_that_ends_after_the_flush_leaves_nothing(store: ArtifactStore) -> None:
    for end in (store.commit, store.discard):
        (artifact,) = store.reserve([wanted("a", 3)]) or []
        store.lock(artifact)  # the request that waits for it
        store.invalidate()
        end(artifact)
        assert store.ready() == [] and store.find(b"a", tokens("a")) is None
        store.unlock(artifact)
        assert store.used_bytes == 0
