"""Blobs over ZeroMQ: one ROUTER that serves ours, one DEALER for each peer that we fetch from.

Bounds, all enforced before memory is spent: MAXMSGSIZE closes the connection of whoever sends a longer frame; high-water
marks bound what libzmq queues; credit bounds what a peer may have open; numbers of waiting requests are capped.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from hypic.router import messages as m
from hypic.router.transport import Peer, Receipt, Stats
from hypic.router.transport.security import Curve, Listener
from hypic.router.transport.zmq_client import ENVELOPE, BlobClient
from hypic.router.transport.zmq_server import OPEN_CHUNKS, SEND_MARK, BlobServer

CHUNK = 1 << 20
WINDOW = 8
"""Chunks asked for and not yet here, for each transfer."""
RETRY_AFTER = 1.0
"""Seconds without a chunk after which what is missing is asked for again."""


class ZmqTransport:
    """A :class:`hypic.router.transport.Transport` over ``ipc://`` or ``tcp://`` with CURVE.

    Args:
        address: what to bind; a TCP port 0 is chosen by the system.
        curve: keys; needed for TCP.
        chunk: bytes of a chunk.
        window: chunks in flight for each fetch.
        retry_after: seconds without progress before chunks are asked for again.
        resolve: see :class:`BlobServer`.
    """

    def __init__(
        self,
        address: str,
        curve: Curve | None = None,
        *,
        chunk: int = CHUNK,
        window: int = WINDOW,
        retry_after: float = RETRY_AFTER,
        resolve: Callable[[bytes], bool] | None = None,
    ):
        self._address, self._curve = address, curve
        self._fetching = chunk, window, retry_after
        self._resolve = resolve
        self.stats = Stats()

    async def start(self) -> str:
        """Raises InsecureError or zmq.ZMQError; then nothing is left open."""
        options = {
            zmq.HEARTBEAT_IVL: 1000,  # a peer that hangs would hold on to what was sent to it
            zmq.HEARTBEAT_TIMEOUT: 5000,
            zmq.MAXMSGSIZE: m.limit(m.ToSource) + ENVELOPE,
            zmq.SNDHWM: SEND_MARK,
            zmq.RCVHWM: OPEN_CHUNKS,
        }
        self._listener = listener = Listener(self._address, self._curve, options)
        self.server = BlobServer(listener.socket, self.stats, self._resolve)
        self.client = BlobClient(listener.context, listener.gate, self.stats, *self._fetching)
        return listener.address

    @property
    def public_key(self) -> bytes:
        """What peers must know to connect over TCP."""
        return self._listener.gate.public_key

    def refresh(self) -> None:
        """See :meth:`Gate.refresh`."""
        self._listener.gate.refresh()

    def expect(self, key: bytes) -> None:
        self.server.expect(key)

    def offer(self, key: bytes, blob: memoryview) -> None:
        self.server.offer(key, blob)

    def idle(self, since: float) -> list[bytes]:
        """See :meth:`BlobServer.idle`."""
        return self.server.idle(since)

    def offer_place(self, key: bytes, window: bytes, offset: int, nbytes: int, blob: memoryview | None = None) -> None:
        """See :meth:`BlobServer.offer_place`."""
        self.server.offer_place(key, window, offset, nbytes, blob)

    async def locate(self, peer: Peer, key: bytes, nbytes: int, timeout: float) -> m.Located:
        """See :meth:`BlobClient.locate`."""
        return await self.client.locate(peer, key, nbytes, timeout)

    async def confirm(self, peer: Peer, key: bytes, stamp: int, timeout: float) -> bool:
        """See :meth:`BlobClient.confirm`."""
        return await self.client.confirm(peer, key, stamp, timeout)

    async def withdraw(self, key: bytes, reason: str = "gone") -> None:
        await self.server.withdraw(key, reason)

    async def fetch(self, peer: Peer, key: bytes, into: memoryview, timeout: float) -> Receipt:
        return await self.client.fetch(peer, key, into, timeout)

    async def forget(self, peer: Peer) -> None:
        """The peer is dead: what is fetched from it fails at once, and the connection is closed."""
        await self.client.forget(peer)

    async def close(self) -> None:
        await self.client.close()
        await self.server.close()
        self._listener.close()
