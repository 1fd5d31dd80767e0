"""Heartbeats, deadlines, and queues that do not grow: what keeps one sick worker from harming the rest.

All times are a monotonic clock's, given by the caller; nothing here reads a clock or sleeps.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Liveness:
    """Who was heard of lately.

    Args:
        dead_after: seconds of silence after which a worker counts as dead.
    """

    def __init__(self, dead_after: float):
        self.dead_after = dead_after
        self._heard: dict[str, float] = {}

    def heard(self, worker: str, now: float) -> None:
        self._heard[worker] = max(now, self._heard.get(worker, now))

    def forget(self, worker: str) -> None:
        self._heard.pop(worker, None)

    def dead(self, now: float) -> list[str]:
        """Workers whose silence has lasted too long, the longest first; each is named until it is forgotten."""
        silent = [(t, w) for w, t in self._heard.items() if now - t > self.dead_after]
        return [w for _, w in sorted(silent)]


class Deadlines(Generic[K]):
    """Things that must happen by a time, each named by a key that has one deadline at most."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """Set or move the deadline of `key`."""
        self._at[key] = at
        self._serial += 1
        heapq.heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._at) + 16:  # keys that were met or moved
            self._heap = [(t, n, k) for t, n, k in self._heap if self._at.get(k) == t]
            heapq.heapify(self._heap)

    def met(self, key: K) -> None:
        self._at.pop(key, None)

    def missed(self, now: float) -> list[K]:
        """Keys whose time has passed, the earliest first; each is returned once."""
        out = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                out.append(key)
        return out


class Mailbox(Generic[V]):
    """A queue between tasks of one event loop with a limit in items and in bytes: what does not fit is refused and counted.

    Args:
        items: the most that may wait.
        nbytes: the most bytes that may wait (as their senders count them).
    """

    def __init__(self, items: int, nbytes: int):
        self.items, self.nbytes = items, nbytes
        self.refused: Counter[str] = Counter()
        self._queue: asyncio.Queue[tuple[V, int]] = asyncio.Queue()
        self._used = 0

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, item: V, nbytes: int) -> bool:
        """False if the queue is full; never waits."""
        if self._queue.qsize() >= self.items:
            self.refused["items"] += 1
            return False
        if self._used + nbytes > self.nbytes:
            self.refused["bytes"] += 1
            return False
        self._used += nbytes
        self._queue.put_nowait((item, nbytes))
        return True

    async def get(self) -> V:
        item, nbytes = await self._queue.get()
        self._used -= nbytes
        return item
