"""The artifact store of one rank: index, locks, all-or-nothing reservation, eviction.

Time is a logical clock (one tick per call that uses an artifact), so that all TP ranks evict alike.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from hypic.artifact.arena import Arena, align

PROTECTED_SHARE = 0.8
"""Share of the arena that artifacts hit at least once may keep away from newcomers (segmented LRU)."""


class Artifact:
    """One artifact in the arena. Owned by the store; callers hold it only between `lock` and `unlock`.

    Attributes:
        key: digest of all that the artifact is a function of.
        tokens: ids of the whole segment; compared on every hit.
        adapter: LoRA adapter it was compiled under ("" for the base model).
        method: name of the caching method that it is for ("" for the server's default).
        offset, nbytes: the blob in the arena.
        base: byte offset of the payload.
        ready: compiled; False while a compile request fills it.
        stale: invalidated while locked; must not be joined any more.
        locks: requests that rely on it.
        source: the worker that it came from; "" if it was compiled here.
        cold: that worker compiled it for the request that it was made for; otherwise it had it already.
        made_for: the router's name of the request that it was compiled or received for; "" if there is none.
    """

    __slots__ = (
        "adapter",
        "base",
        "cold",
        "key",
        "locks",
        "made_for",
        "method",
        "nbytes",
        "offset",
        "ready",
        "source",
        "stale",
        "tokens",
    )

    def __init__(self, key: bytes, tokens: array, adapter: str, offset: int, nbytes: int, base: int, method: str = ""):
        self.key, self.tokens, self.adapter, self.method = key, tokens, adapter, method
        self.offset, self.nbytes, self.base = offset, nbytes, base
        self.ready = self.stale = self.cold = False
        self.source = self.made_for = ""
        self.locks = 0


class Request(NamedTuple):
    """Space wanted for one artifact that is to be compiled."""

    key: bytes
    tokens: array
    adapter: str
    header_bytes: int
    payload_bytes: int
    method: str = ""

    @property
    def nbytes(self) -> int:
        return align(self.header_bytes + self.payload_bytes)


class ArtifactStore:
    """Index over an arena.

    Eviction is a segmented LRU: an artifact enters *probation*, its first hit promotes it to *protected*, and newcomers
    only ever push out probation as long as protected stays within PROTECTED_SHARE. A flood of one-off documents passes
    through probation and leaves the popular ones alone. What was evicted lately and comes again is protected at once, so
    that documents which are popular now take the place of those that were. Locked artifacts are never evicted, nor are
    pinned ones; pins are on keys, so they outlive artifacts that are invalidated.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        self.evictions = 0
        self.on_ready: Callable[[Artifact], None] = lambda _: None
        """Told of every artifact that becomes ready,"""
        self.on_gone: Callable[[Artifact], None] = lambda _: None
        """and of every ready one that is no longer found."""
        self._index: dict[bytes, Artifact] = {}
        self._probation: OrderedDict[bytes, Artifact] = OrderedDict()
        self._protected: OrderedDict[bytes, Artifact] = OrderedDict()
        self._protected_bytes = 0
        self._stale: set[Artifact] = set()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        """Keys of the last evicted artifacts, as many as there are artifacts."""
        self.pins: set[bytes] = set()
        """Keys whose artifacts are never evicted."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        """Bytes of the arena."""
        return self.arena.nbytes

    @property
    def used_bytes(self) -> int:
        return self.arena.nbytes - self.arena.free_bytes

    def ready(self) -> list[Artifact]:
        """All artifacts that may be joined."""
        return [a for a in self._index.values() if a.ready]

    def get(self, key: bytes) -> Artifact | None:
        """The artifact of `key`, ready or not, for callers that do not join it."""
        return self._index.get(key)

    def find(self, key: bytes, tokens: array) -> Artifact | None:
        """The artifact of `key`, ready or being compiled; None if absent. Does not count as a use.

        Raises:
            KeyError: the key is there with other tokens (a digest collision, never seen): use neither.
        """
        artifact = self._index.get(key)
        if artifact is not None and artifact.tokens != tokens:
            raise KeyError(f"artifact {key.hex()[:16]}: same digest, other tokens")
        return artifact

    def lock(self, artifact: Artifact) -> None:
        """Keep `artifact` in place until `unlock`; a lock on a ready artifact counts as a hit."""
        artifact.locks += 1
        if artifact.ready and not artifact.stale:
            self._touch(artifact)

    def unlock(self, artifact: Artifact) -> None:
        assert artifact.locks > 0, f"artifact {artifact.key.hex()[:16]} unlocked twice"
        artifact.locks -= 1
        if artifact.stale and artifact.locks == 0:
            self._stale.discard(artifact)
            self.arena.free(artifact.offset)

    def pin(self, key: bytes) -> None:
        """Never evict the artifact of `key`, be it here already or still to come."""
        self.pins.add(key)

    def unpin(self, key: bytes) -> None:
        self.pins.discard(key)

    def pinned(self, artifact: Artifact) -> bool:
        return artifact.key in self.pins

    def pinned_bytes(self, apart_from: Collection[bytes] = ()) -> int:
        """Bytes that pinned artifacts take in the arena, those of some keys left out."""
        here = (self._index[key] for key in self.pins if key in self._index and key not in apart_from)
        return sum(a.nbytes for a in here)

    def reserve(self, wanted: Iterable[Request]) -> list[Artifact] | None:
        """Space for all of `wanted`, or for none of them (None): never a part, so two requests cannot starve each other.

        The new artifacts are not ready, hold one lock for their compile, and are found by key from now on.
        """
        made: list[Artifact] = []
        for want in wanted:
            offset = self._alloc(want.nbytes)
            if offset is None:
                for artifact in made:
                    artifact.locks = 0
                    self._drop(artifact)
                return None
            base = offset + want.header_bytes
            artifact = Artifact(want.key, want.tokens, want.adapter, offset, want.nbytes, base, want.method)
            artifact.locks = 1
            self._index[want.key] = artifact
            self._probation[want.key] = artifact
            made.append(artifact)
        for artifact in made:
            if artifact.key in self._evicted:
                del self._evicted[artifact.key]
                self._touch(artifact)
        return made

    def commit(self, artifact: Artifact) -> None:
        """The compile is done: the artifact is ready, and the compile's lock is released."""
        artifact.ready = True
        if not artifact.stale:
            self.on_ready(artifact)
        self.unlock(artifact)

    def discard(self, artifact: Artifact) -> None:
        """The compile failed: forget the artifact; its space is free once nobody holds a lock."""
        if not artifact.stale:
            self._invalidate(artifact)
        self.unlock(artifact)

    def invalidate(self, which: Callable[[Artifact], bool] = lambda _: True) -> int:
        """Drop the artifacts that `which` picks; locked ones become stale and go with their last lock. Returns how many."""
        victims = [a for a in self._index.values() if which(a)]
        for artifact in victims:
            self._invalidate(artifact)
        return len(victims)

    def check_integrity(self) -> None:
        """Every blob has exactly one owner, and the lists agree with the index. Raises AssertionError."""
        self.arena.check_integrity()
        owned = [a.offset for a in (*self._index.values(), *self._stale)]
        assert len(owned) == len(set(owned)) and set(owned) == set(self.arena._used), (
            "arena blocks and artifacts differ"
        )
        assert self._probation.keys() | self._protected.keys() == self._index.keys()
        assert not self._probation.keys() & self._protected.keys()
        assert self._protected_bytes == sum(a.nbytes for a in self._protected.values())

    def locked(self) -> int:
        """Locks held in all; 0 when no request is in flight."""
        return sum(a.locks for a in (*self._index.values(), *self._stale))

    def _touch(self, artifact: Artifact) -> None:
        if self._probation.pop(artifact.key, None) is not None:
            self._protected_bytes += artifact.nbytes
        self._protected[artifact.key] = artifact
        self._protected.move_to_end(artifact.key)
        while self._protected_bytes > PROTECTED_SHARE * self.capacity and len(self._protected) > 1:
            key, oldest = self._protected.popitem(last=False)
            self._protected_bytes -= oldest.nbytes
            self._probation[key] = oldest

    def _alloc(self, nbytes: int) -> int | None:
        while (offset := self.arena.alloc(nbytes)) is None:
            rings = (self._probation, self._protected)
            victim = next((a for ring in rings for a in ring.values() if not a.locks and not self.pinned(a)), None)
            if victim is None:
                return None
            self._drop(victim)
            self.evictions += 1
            self._evicted[victim.key] = None
            while len(self._evicted) > max(len(self._index), 1):
                self._evicted.popitem(last=False)
        return offset

    def _forget(self, artifact: Artifact) -> None:
        del self._index[artifact.key]
        if artifact.ready:
            self.on_gone(artifact)
        if self._probation.pop(artifact.key, None) is None:
            del self._protected[artifact.key]
            self._protected_bytes -= artifact.nbytes

    def _drop(self, artifact: Artifact) -> None:
        self._forget(artifact)
        self.arena.free(artifact.offset)

    def _invalidate(self, artifact: Artifact) -> None:
        if artifact.locks:
            self._forget(artifact)
            artifact.stale = True
            self._stale.add(artifact)
        else:
            self._drop(artifact)
