"""The fetching side of :mod:`hypic.router.transport.zmq_blobs`: a DEALER for each peer, credit, and what is still missing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import zlib
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from hypic.router import messages as m
from hypic.router.transport import Peer, Receipt, Stats, TransferError
from hypic.router.transport.security import Gate
from hypic.router.transport.zmq_server import OPEN_CHUNKS, SEND_MARK, send_now

ENVELOPE = 256
"""What CURVE adds to a frame before libzmq compares it with MAXMSGSIZE (33 bytes in libzmq 4.3)."""


class _Transfer:
    """One blob on its way to us."""

    def __init__(self, key: bytes, into: memoryview, chunk: int):
        self.key, self.into, self.chunk = key, into, chunk
        self.count = -(-into.nbytes // chunk)
        self.missing = set(range(self.count))
        self.asked: set[int] = set()
        self.next = self.again = 0
        self.pending = False
        self.started = time.perf_counter()
        self.first = 0.0
        self.last = self.started
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def span(self, index: int) -> slice:
        return slice(index * self.chunk, min((index + 1) * self.chunk, self.into.nbytes))


class _Source:
    """Our DEALER to one peer."""

    def __init__(self, socket: zmq.asyncio.Socket):
        self.socket = socket
        self.transfers: dict[int, _Transfer] = {}
        self.calls: dict[int, asyncio.Future[m.Located | m.Confirmed]] = {}
        self.reader: asyncio.Task[None] | None = None


class BlobClient:
    """Fetches blobs from peers. Arguments as for ZmqTransport."""

    def __init__(
        self, context: zmq.asyncio.Context, gate: Gate, stats: Stats, chunk: int, window: int, retry_after: float
    ):
        self._context, self._gate, self.stats = context, gate, stats
        self._chunk, self._window, self._retry_after = chunk, window, retry_after
        self.inbox = m.Inbox(m.ToSink, "artifact chunks")
        self._sources: dict[Peer, _Source] = {}
        self._serial = itertools.count(1)

    async def close(self) -> None:
        for peer in list(self._sources):
            await self.forget(peer, TransferError("closed"))

    async def fetch(self, peer: Peer, key: bytes, into: memoryview, timeout: float) -> Receipt:
        into = into.cast("B")
        if not into.nbytes:
            raise ValueError("there are no empty artifacts")
        source = self._source(peer)
        number = next(self._serial)
        transfer = _Transfer(key, into, self._chunk)
        source.transfers[number] = transfer
        try:
            async with asyncio.timeout(timeout):
                self._ask(source, number, transfer)
                while not transfer.done.done():
                    await asyncio.wait([transfer.done], timeout=self._retry_after / 4)
                    if not transfer.done.done() and time.perf_counter() - transfer.last > self._retry_after:
                        self._give_back(transfer)
                        self._ask(source, number, transfer)
                transfer.done.result()
        except TimeoutError:
            have = transfer.count - len(transfer.missing)
            raise TransferError("timeout", f"{have} of {transfer.count} chunks in {timeout} s") from None
        finally:
            del source.transfers[number]
            if transfer.missing:
                self._tell(source, m.Stop(transfer=number))
        seconds = time.perf_counter() - transfer.first
        self.stats.receive_seconds += seconds
        return Receipt(into.nbytes, transfer.first - transfer.started, seconds, transfer.again)

    async def locate(self, peer: Peer, key: bytes, nbytes: int, timeout: float) -> m.Located:
        """Where the peer has a blob, once it has it. Raises TransferError."""
        found = await self._call(peer, lambda n: m.Locate(transfer=n, key=key, nbytes=nbytes), timeout)
        assert isinstance(found, m.Located)
        return found

    async def confirm(self, peer: Peer, key: bytes, stamp: int, timeout: float) -> bool:
        """Whether the blob was on offer until now. Raises TransferError."""
        answer = await self._call(peer, lambda n: m.Confirm(transfer=n, key=key, stamp=stamp), timeout)
        assert isinstance(answer, m.Confirmed)
        return answer.ok

    async def _call(self, peer: Peer, question: Callable[[int], m.Message], timeout: float) -> m.Located | m.Confirmed:
        """A question and its answer; asked again while there is none."""
        source, number = self._source(peer), next(self._serial)
        answer = source.calls[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                while not answer.done():
                    self._tell(source, question(number))
                    await asyncio.wait([answer], timeout=self._retry_after)
                return answer.result()
        except TimeoutError:
            raise TransferError("timeout", f"no answer in {timeout} s") from None
        finally:
            del source.calls[number]
            if not answer.done():
                self._tell(source, m.Stop(transfer=number))

    def _source(self, peer: Peer) -> _Source:
        if peer in self._sources:
            return self._sources[peer]
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max(self._chunk, m.limit(m.ToSink)) + ENVELOPE)
        socket.setsockopt(zmq.RCVHWM, SEND_MARK)
        socket.setsockopt(zmq.SNDHWM, OPEN_CHUNKS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            self._gate.introduce(socket, peer.address, peer.public_key)
            socket.connect(peer.address)
        except BaseException:
            socket.close()
            raise
        source = self._sources[peer] = _Source(socket)
        source.reader = asyncio.create_task(self._read(source))
        return source

    async def forget(self, peer: Peer, error: TransferError | None = None) -> None:
        """End what is fetched from a peer (it is dead, if no other reason is given), and close the connection."""
        if (source := self._sources.pop(peer, None)) is None:
            return
        for transfer in source.transfers.values():
            _fail(transfer.done, error or TransferError("gone", "the peer is dead"))
        for call in source.calls.values():
            _fail(call, error or TransferError("gone", "the peer is dead"))
        if source.reader is not None:
            source.reader.cancel()
            await asyncio.gather(source.reader, return_exceptions=True)
        source.socket.close()

    async def _read(self, source: _Source) -> None:
        while True:
            frames: list[Any] = await source.socket.recv_multipart(copy=False)
            message = self.inbox.read(frames[0].buffer)
            if message is None:
                continue
            if (call := source.calls.get(message.transfer)) is not None:
                _answer(call, message)
                continue
            transfer = source.transfers.get(message.transfer)
            if len(frames) != (2 if isinstance(message, m.Chunk) else 1):
                self.inbox.reject("frames")
            elif transfer is None or transfer.done.done():
                self.stats.duplicates += isinstance(message, m.Chunk)  # late: the transfer has ended
            elif isinstance(message, m.Gone):
                _fail(transfer.done, _gone(message))
            elif isinstance(message, m.Pending):
                transfer.last, transfer.pending = time.perf_counter(), True
            elif isinstance(message, m.Chunk):
                self._take(transfer, message, frames[1].buffer)
                self._ask(source, message.transfer, transfer)

    def _take(self, transfer: _Transfer, head: m.Chunk, data: memoryview) -> None:
        """Put a chunk where it belongs, once, if it is what its sender took it for."""
        index = head.index
        if index not in transfer.missing:
            self.stats.duplicates += 1
            return
        span = transfer.span(index)
        if data.nbytes != span.stop - span.start or zlib.crc32(data) != head.crc:
            self.stats.corrupt += 1
            transfer.asked.discard(index)  # asked for again at once, with the next credit
            return
        transfer.into[span] = data
        transfer.missing.discard(index)
        transfer.asked.discard(index)
        transfer.last = time.perf_counter()
        transfer.first, transfer.pending = transfer.first or transfer.last, False
        self.stats.received_chunks += 1
        self.stats.received_bytes += data.nbytes
        if not transfer.missing:
            transfer.done.set_result(None)

    def _give_back(self, transfer: _Transfer) -> None:
        """Nothing came for a while: what is open counts as lost."""
        if not transfer.pending:
            transfer.again += len(transfer.asked)
            self.stats.asked_again += len(transfer.asked)
        transfer.asked.clear()
        transfer.next = 0
        transfer.last = time.perf_counter()

    def _ask(self, source: _Source, number: int, transfer: _Transfer) -> None:
        """Spend the credit that is free, in one request for as many chunks; at least half a window at a time."""
        free = self._window - len(transfer.asked)
        left = len(transfer.missing) - len(transfer.asked)
        if not left or (free < (self._window + 1) // 2 and left > free):
            return
        wanted = self._next_chunks(transfer, min(free, left, 64))
        if wanted:
            transfer.asked.update(wanted)
            get = m.Get(
                transfer=number, key=transfer.key, nbytes=transfer.into.nbytes, chunk=transfer.chunk, wanted=wanted
            )
            self._tell(source, get)

    @staticmethod
    def _next_chunks(transfer: _Transfer, n: int) -> tuple[int, ...]:
        wanted: list[int] = []
        for _ in range(transfer.count):
            if len(wanted) == n:
                break
            index, transfer.next = transfer.next, (transfer.next + 1) % transfer.count
            if index in transfer.missing and index not in transfer.asked:
                wanted.append(index)
        return tuple(wanted)

    @staticmethod
    def _tell(source: _Source, message: m.Message) -> None:
        """Best effort, at once: a request that is lost is repeated."""
        if not source.socket.closed:
            with contextlib.suppress(zmq.Again):
                send_now(source.socket, [m.encode(message)])


def _fail(done: asyncio.Future[Any], error: TransferError) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # retrieved: its waiter may have been cancelled


def _gone(message: m.Gone) -> TransferError:
    reason = message.reason if message.reason in ("size", "window") else "gone"
    return TransferError(reason, message.reason)


def _answer(call: asyncio.Future[Any], message: m.Message) -> None:
    if isinstance(message, m.Gone):
        _fail(call, _gone(message))
    elif isinstance(message, (m.Located, m.Confirmed)) and not call.done():
        call.set_result(message)
