"""The serving side of :mod:`hypic.router.transport.zmq_blobs`: a ROUTER that sends chunks of our blobs to whoever asks."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, cast

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


class _Blob:
    """What we serve under one key: its memory, or None while it is being made."""

    __slots__ = ("crc", "memory", "trackers", "used", "waiting")

    def __init__(self) -> None:
        self.memory: memoryview | None = None
        self.used = time.monotonic()
        self.crc: dict[tuple[int, int], int] = {}
        self.trackers: list[zmq.MessageTracker] = []
        self.waiting: OrderedDict[tuple[bytes, int], m.Get] = OrderedDict()


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
        self._wake = asyncio.Event()
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._send())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def expect(self, key: bytes) -> None:
        self._blobs.setdefault(key, _Blob())

    def offer(self, key: bytes, blob: memoryview) -> None:
        entry = self._blobs.setdefault(key, _Blob())
        if entry.memory is not None:
            raise ValueError(f"{key.hex()[:16]} is offered already")
        entry.memory = blob.cast("B")
        waiting, entry.waiting = entry.waiting, OrderedDict()
        for (peer, _), get in waiting.items():
            self._queue(peer, get)

    def idle(self, since: float) -> list[bytes]:
        """Keys on offer that nobody has asked for, and whose chunks have all left, since then (time.monotonic())."""
        busy = {key for queue in self._queues.values() for _, key, _, _ in queue}
        return [k for k, e in self._blobs.items() if e.memory is not None and e.used < since and k not in busy]

    async def withdraw(self, key: bytes, reason: str = "gone") -> None:
        entry = self._blobs.pop(key, None)
        if entry is None:
            return
        for peer, transfer in entry.waiting:
            self._reply(peer, m.Gone(transfer=transfer, reason=reason))
        entry.memory = None
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
            elif isinstance(message, m.Get):
                self._get(peer, message)

    def _get(self, peer: bytes, get: m.Get) -> None:
        entry = self._blobs.get(get.key)
        if entry is None and self._resolve(get.key):
            entry = self._blobs[get.key]
        if entry is None:
            self._reply(peer, m.Gone(transfer=get.transfer, reason="gone"))
        elif entry.memory is None:
            if (peer, get.transfer) not in entry.waiting and len(entry.waiting) >= OPEN_PEERS:
                self.stats.turned_away += 1
                return
            entry.waiting[peer, get.transfer] = get
            self._reply(peer, m.Pending(transfer=get.transfer))
        else:
            self._queue(peer, get)

    def _queue(self, peer: bytes, get: m.Get) -> None:
        entry = self._blobs[get.key]
        assert entry.memory is not None
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
