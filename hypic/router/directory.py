"""Who holds which artifact, as the workers say.

A hint, never a promise: between an announcement and its use the artifact may be evicted or its worker dead. Whoever acts
on an entry must be able to recompile, and reports it with :meth:`Directory.disprove`. Announcements of a worker are
numbered; after a gap, or from another run of it, nothing it said before counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_KEYS = 1 << 20
"""Artifacts of one worker that are remembered; announcements beyond are ignored (a worker holds thousands)."""


class _Shelf:
    __slots__ = ("epoch", "held", "seq")

    def __init__(self, epoch: bytes):
        self.epoch, self.seq = epoch, 0
        self.held: dict[bytes, int] = {}


class Directory:
    """Holders of artifacts by worker announcements."""

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}
        self._holders: dict[bytes, set[str]] = {}

    def join(self, worker: str, epoch: bytes) -> None:
        """A worker (re)started, or was asked to announce everything again: it holds nothing until it says so."""
        self.leave(worker)
        self._shelves[worker] = _Shelf(epoch)

    def leave(self, worker: str) -> None:
        shelf = self._shelves.pop(worker, None)
        for key in shelf.held if shelf else ():
            self._forget(worker, key)

    def stored(self, worker: str, epoch: bytes, seq: int, keys: Sequence[bytes], nbytes: Sequence[int]) -> bool:
        """False if an announcement is missing or this is an old one's echo: then nothing was taken from it."""
        shelf = self._in_order(worker, epoch, seq)
        if shelf is None:
            return False
        for key, n in zip(keys, nbytes, strict=True):
            if len(shelf.held) < MAX_KEYS or key in shelf.held:
                shelf.held[key] = n
                self._holders.setdefault(key, set()).add(worker)
        return True

    def evicted(self, worker: str, epoch: bytes, seq: int, keys: Iterable[bytes]) -> bool:
        """As `stored`."""
        shelf = self._in_order(worker, epoch, seq)
        if shelf is None:
            return False
        for key in keys:
            if shelf.held.pop(key, None) is not None:
                self._forget(worker, key)
        return True

    def disprove(self, worker: str, key: bytes) -> None:
        """The worker was asked for it and does not have it."""
        shelf = self._shelves.get(worker)
        if shelf is not None and shelf.held.pop(key, None) is not None:
            self._forget(worker, key)

    def holders(self, key: bytes) -> frozenset[str]:
        return frozenset(self._holders.get(key, ()))

    def holds(self, worker: str, key: bytes) -> bool:
        return worker in self._holders.get(key, ())

    def count(self, worker: str) -> int:
        shelf = self._shelves.get(worker)
        return len(shelf.held) if shelf else 0

    def _in_order(self, worker: str, epoch: bytes, seq: int) -> _Shelf | None:
        shelf = self._shelves.get(worker)
        if shelf is None or shelf.epoch != epoch or seq != shelf.seq + 1:
            return None
        shelf.seq = seq
        return shelf

    def _forget(self, worker: str, key: bytes) -> None:
        holders = self._holders[key]
        holders.discard(worker)
        if not holders:
            del self._holders[key]
