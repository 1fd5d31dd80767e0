"""The serving side of :mod:`hypic.router.transport.zmq_blobs`: a ROUTER that sends chunks of our blobs to whoever asks."""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import zmq
import zmq.asyncio

from hypic.router import messages as m
from hypic.router.transport import Stats

OPEN_CHUNKS = 256
"""Chunks that one peer may have open here; what it asks for beyond that is dropped (it will ask again)."""
OPEN_PEERS = 256
SEND_MARK = 16
"""High-water mark in chunks of the pipe to each peer."""
_POLL = 0.001


def send_now(socket: zmq.asyncio.Socket, frames: Sequence[Any], **kwargs: Any) -> zmq.MessageTracker | None:
    """Send at once, or raise zmq.Again.

    Through the asyncio socket, never past it: libzmq signals edges, and a send behind its back swallows the news of frames
    that came in. With NOBLOCK its future is done when it is returned.
    """
    return cast("asyncio.Future[Any]", socket.send_multipart(frames, zmq.NOBLOCK, **kwargs)).result()


class _Place(NamedTuple):
    window: bytes
    offset: int
    nbytes: int
    stamp: int


class _Blob:
    """What we serve under one key: its memory, its place in a window, or neither while it is being made."""

    __slots__ = ("crc", "memory", "place", "trackers", "used", "waiting")

    def __init__(self) -> None:
        self.memory: memoryview | None = None
        self.place: _Place | None = None
        self.used = time.monotonic()
        self.crc: dict[tuple[int, int], int] = {}
        self.trackers: list[zmq.MessageTracker] = []
        self.waiting: OrderedDict[tuple[bytes, int], m.Get | m.Locate] = OrderedDict()

    @property
    def there(self) -> bool:
        return self.memory is not None or self.place is not None


class BlobServer:
    """Serves blobs on a bound ROUTER. Options of the socket and its end belong to the caller.

    `resolve`, if given, is asked about a key that is not known when a peer wants it; true if it has called `expect` (or
    `offer`), so that the peer waits.
    """

    def __init__(self, socket: zmq.asyncio.Socket, stats: Stats, resolve: Callable[[bytes], bool] | None = None):
        self._server, self.stats = socket, stats
        self._resolve = resolve or (lambda _: False)
        self.inbox = m.Inbox(m.ToSource, "artifact requests")
        self._blobs: dict[bytes, _Blob] = {}
        self._queues: OrderedDict[bytes, deque[tuple[int, bytes, int, int]]] = OrderedDict()
        """For each peer's routing id: (transfer, key, chunk size, index) to send."""
        self._stamps = itertools.count(1)
        self._wake = asyncio.Event()
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._send())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def expect(self, key: bytes) -> None:
        self._blobs.setdefault(key, _Blob())

    def offer(self, key: bytes, blob: memoryview) -> None:
        self._entry(key).memory = blob.cast("B")
        self._serve_waiting(key)

    def offer_place(self, key: bytes, window: bytes, offset: int, nbytes: int, blob: memoryview | None = None) -> None:
        """Serve a blob by telling where it is, and by its bytes (if given) to those who cannot look there. It must not
        change until `withdraw`."""
        entry = self._entry(key)
        entry.place, entry.memory = _Place(window, offset, nbytes, next(self._stamps)), blob and blob.cast("B")
        self._serve_waiting(key)

    def _entry(self, key: bytes) -> _Blob:
        entry = self._blobs.setdefault(key, _Blob())
        if entry.there:
            raise ValueError(f"{key.hex()[:16]} is offered already")
        entry.used = time.monotonic()
        return entry

    def _serve_waiting(self, key: bytes) -> None:
        entry = self._blobs[key]
        waiting, entry.waiting = entry.waiting, OrderedDict()
        for (peer, _), wish in waiting.items():
            self._grant(peer, wish)

    def idle(self, since: float) -> list[bytes]:
        """Keys on offer that nobody has asked for, and whose chunks have all left, since then (time.monotonic())."""
        busy = {key for queue in self._queues.values() for _, key, _, _ in queue}
        return [k for k, e in self._blobs.items() if e.there and e.used < since and k not in busy]

    async def withdraw(self, key: bytes, reason: str = "gone") -> None:
        entry = self._blobs.pop(key, None)
        if entry is None:
            return
        for peer, transfer in entry.waiting:
            self._reply(peer, m.Gone(transfer=transfer, reason=reason))
        entry.memory = entry.place = None
        while any(not t.done for t in entry.trackers):
            await asyncio.sleep(_POLL)

    async def _serve(self) -> None:
        while True:
            frames = await self._server.recv_multipart()
            if len(frames) != 2:
                self.inbox.reject("frames")
                continue
            peer, message = frames[0], self.inbox.read(frames[1])
            if isinstance(message, m.Stop):
                self._stop(peer, message.transfer)
            elif isinstance(message, m.Confirm):
                self._confirm(peer, message)
            elif message is not None:
                self._wish(peer, message)

    def _wish(self, peer: bytes, wish: m.Get | m.Locate) -> None:
        entry = self._blobs.get(wish.key)
        if entry is None and self._resolve(wish.key):
            entry = self._blobs[wish.key]
        if entry is None:
            self._reply(peer, m.Gone(transfer=wish.transfer, reason="gone"))
        elif not entry.there:
            if (peer, wish.transfer) not in entry.waiting and len(entry.waiting) >= OPEN_PEERS:
                self.stats.turned_away += 1
                return
            entry.waiting[peer, wish.transfer] = wish
            self._reply(peer, m.Pending(transfer=wish.transfer))
        else:
            self._grant(peer, wish)

    def _grant(self, peer: bytes, wish: m.Get | m.Locate) -> None:
        place = self._blobs[wish.key].place
        if isinstance(wish, m.Get):
            self._queue(peer, wish)
        elif place is None or place.nbytes != wish.nbytes:
            self._reply(peer, m.Gone(transfer=wish.transfer, reason="size" if place else "window"))
        else:
            self._blobs[wish.key].used = time.monotonic()
            located = m.Located(transfer=wish.transfer, window=place.window, offset=place.offset, stamp=place.stamp)
            self._reply(peer, located)

    def _confirm(self, peer: bytes, confirm: m.Confirm) -> None:
        entry = self._blobs.get(confirm.key)
        ok = entry is not None and entry.place is not None and entry.place.stamp == confirm.stamp
        if ok and entry is not None and entry.place is not None:
            entry.used = time.monotonic()
            self.stats.sent_bytes += entry.place.nbytes
        self._reply(peer, m.Confirmed(transfer=confirm.transfer, ok=ok))

    def _queue(self, peer: bytes, get: m.Get) -> None:
        entry = self._blobs[get.key]
        if entry.memory is None:
            self._reply(peer, m.Gone(transfer=get.transfer, reason="window"))
            return
        entry.used = time.monotonic()
        if entry.memory.nbytes != get.nbytes:
            self._reply(peer, m.Gone(transfer=get.transfer, reason="size"))
            return
        if peer not in self._queues and len(self._queues) >= OPEN_PEERS:
            self.stats.turned_away += len(get.wanted)
            return
        queue = self._queues.get(peer, deque())
        open_ = {(t, i) for t, _, _, i in queue}
        for index in get.wanted:
            if index * get.chunk >= get.nbytes or (get.transfer, index) in open_:
                continue
            if len(queue) >= OPEN_CHUNKS:
                self.stats.turned_away += 1
                continue
            queue.append((get.transfer, get.key, get.chunk, index))
        if queue:
            self._queues[peer] = queue
            self._wake.set()

    def _stop(self, peer: bytes, transfer: int) -> None:
        if queue := self._queues.get(peer):
            self._queues[peer] = deque(q for q in queue if q[0] != transfer)
            if not self._queues[peer]:
                del self._queues[peer]
        for entry in self._blobs.values():
            entry.waiting.pop((peer, transfer), None)

    async def _send(self) -> None:
        """One chunk of each peer in turn, so that no peer waits for another's blob; full pipes are tried again."""
        while True:
            if not self._queues:
                self._wake.clear()
                await self._wake.wait()
            sent = False
            for peer in list(self._queues):
                outcome = self._send_chunk(peer, *self._queues[peer][0])
                if outcome is None:  # its pipe is full
                    continue
                sent = True
                self._queues[peer].popleft()
                if not outcome or not self._queues[peer]:
                    del self._queues[peer]
            await asyncio.sleep(0 if sent else _POLL)

    def _send_chunk(self, peer: bytes, transfer: int, key: bytes, chunk: int, index: int) -> bool | None:
        """True: sent, or no longer ours to send. False: the peer is gone. None: its pipe is full."""
        entry = self._blobs.get(key)
        if entry is None or entry.memory is None:
            return self._reply(peer, m.Gone(transfer=transfer, reason="gone"))
        part = entry.memory[index * chunk : (index + 1) * chunk]
        crc = entry.crc.get((chunk, index))
        if crc is None:
            crc = entry.crc[chunk, index] = zlib.crc32(part)
        head = m.encode(m.Chunk(transfer=transfer, index=index, crc=crc))
        try:
            tracker = send_now(self._server, [peer, head, part], copy=False, track=True)
        except zmq.Again:
            return None
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                return False
            raise
        entry.trackers = [t for t in entry.trackers if not t.done]
        if tracker is not None:
            entry.trackers.append(tracker)
        self.stats.sent_chunks += 1
        self.stats.sent_bytes += part.nbytes
        return True

    def _reply(self, peer: bytes, message: m.Message) -> bool:
        """Best effort: a peer that does not hear it asks again. False if it is gone."""
        try:
            send_now(self._server, [peer, m.encode(message)])
        except zmq.Again:
            return True
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True
