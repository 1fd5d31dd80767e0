"""The two ways of an artifact from another worker's arena into ours: over a socket, or copied out of a window."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import torch

from hypic.engine.cluster.memory import HostMemory, host_memory
from hypic.engine.cluster.mooncake import MooncakeWindow, MooncakeWindows
from hypic.engine.cluster.windows import CudaWindow, FileWindow, WindowError, Windows
from hypic.router.transport import Peer, Receipt, TransferError
from hypic.router.transport.zmq_blobs import ZmqTransport

logger = logging.getLogger(__name__)

_POLL = 0.0002


class Mover(Protocol):
    """All calls come from the exchange's event loop."""

    async def offer(self, transport: ZmqTransport, key: bytes, offset: int, nbytes: int) -> None:
        """Let others have a locked, ready artifact, until the transport withdraws it."""

    async def fetch(
        self, transport: ZmqTransport, peer: Peer, key: bytes, offset: int, nbytes: int, head: int, timeout: float
    ) -> tuple[Receipt, bytes]:
        """Fill a locked place of our arena. Once this has returned or raised, it is not written any more.

        Returns:
            What it took, and the first `head` bytes.

        Raises:
            TransferError: it has not come.
        """


def mover_for(buffer: torch.Tensor, address: str, way: str) -> Mover:
    """How artifacts move.

    Args:
        buffer: the arena's.
        address: of the socket at which this worker serves.
        way: "socket", "window", "mooncake", "mooncake-tcp", or "auto": windows inside a host, else sockets.

    Raises:
        WindowError: what was asked for is not possible here.
    """
    if way == "socket" or (way == "auto" and not address.startswith("ipc://")):
        return SocketMover(host_memory(buffer))
    if way.startswith("mooncake"):
        scheme, _, rest = address.partition("://")
        host = rest.rpartition(":")[0] if scheme == "tcp" else "127.0.0.1"
        return WindowMover(buffer, MooncakeWindows(buffer, host, "tcp" if way == "mooncake-tcp" else "rdma"))
    try:
        return WindowMover(buffer, Windows(buffer))
    except WindowError as e:
        if way == "window":
            raise
        logger.warning("hypic: artifacts move over sockets: %s", e)
        return SocketMover(host_memory(buffer))


class SocketMover:
    """Bytes through ZeroMQ, by way of host memory."""

    def __init__(self, memory: HostMemory):
        self._memory = memory

    async def offer(self, transport: ZmqTransport, key: bytes, offset: int, nbytes: int) -> None:
        transport.offer(key, await self._memory.readable(offset, nbytes))

    async def fetch(
        self, transport: ZmqTransport, peer: Peer, key: bytes, offset: int, nbytes: int, head: int, timeout: float
    ) -> tuple[Receipt, bytes]:
        view = self._memory.writable(offset, nbytes)
        receipt = await transport.fetch(peer, key, view, timeout)
        await self._memory.arrived(offset, view)
        return receipt, bytes(view[:head])


class WindowMover:
    """One copy from arena to arena; the socket carries only where, and whether it was there until the end.

    Who cannot map the other's memory, or is told of none, asks for the bytes. The source keeps no state of a copy: if it had
    to give the memory to something else meanwhile, its answer to `Confirm` is no, and what was copied is dropped.
    """

    def __init__(self, buffer: torch.Tensor, windows: Windows | MooncakeWindows):
        self._buffer, self._windows = buffer, windows
        self._memory = host_memory(buffer)
        self._cuda = buffer.device.type == "cuda"
        enqueued = self._cuda and isinstance(windows, Windows)
        self._stream = torch.cuda.Stream(buffer.device) if enqueued else None

    async def offer(self, transport: ZmqTransport, key: bytes, offset: int, nbytes: int) -> None:
        bytes_ = None if self._cuda else await self._memory.readable(offset, nbytes)
        transport.offer_place(key, self._windows.token, offset, nbytes, bytes_)

    async def fetch(
        self, transport: ZmqTransport, peer: Peer, key: bytes, offset: int, nbytes: int, head: int, timeout: float
    ) -> tuple[Receipt, bytes]:
        began = time.perf_counter()
        try:
            return await self._look(transport, peer, key, offset, nbytes, head, timeout)
        except TransferError as e:
            if e.reason != "window":
                raise
            logger.warning("hypic: artifacts of %s come over its socket: %s", peer.address, e)
        left = max(timeout - (time.perf_counter() - began), 0.1)
        return await SocketMover(self._memory).fetch(transport, peer, key, offset, nbytes, head, left)

    async def _look(
        self, transport: ZmqTransport, peer: Peer, key: bytes, offset: int, nbytes: int, head: int, timeout: float
    ) -> tuple[Receipt, bytes]:
        asked = time.perf_counter()
        found = await transport.locate(peer, key, nbytes, timeout)
        began = time.perf_counter()
        try:
            window = self._windows.find(found.window, found.offset, nbytes)
        except WindowError as e:
            raise TransferError("window", str(e)) from None
        place = self._buffer[offset : offset + nbytes]
        copying = asyncio.create_task(self._copy(window, found.offset, place))
        try:
            await asyncio.shield(copying)
        except asyncio.CancelledError:
            await asyncio.gather(copying, return_exceptions=True)
            raise
        except WindowError as e:
            raise TransferError("window", str(e)) from None
        left = max(timeout - (time.perf_counter() - asked), 0.1)
        if not await transport.confirm(peer, key, found.stamp, left):
            raise TransferError("gone", "withdrawn while it was copied")
        seconds = time.perf_counter() - began
        transport.stats.received_bytes += nbytes
        transport.stats.receive_seconds += seconds
        return Receipt(nbytes, began - asked, seconds, 0), place[:head].cpu().numpy().tobytes()

    async def _copy(self, window: FileWindow | CudaWindow | MooncakeWindow, offset: int, place: torch.Tensor) -> None:
        if self._stream is None:
            await asyncio.to_thread(window.copy_to, place, offset)
            return
        with torch.cuda.device(place.device), torch.cuda.stream(self._stream):
            window.copy_to(place, offset)
            done = torch.cuda.Event()
            done.record(self._stream)
        while not done.query():
            await asyncio.sleep(_POLL)
