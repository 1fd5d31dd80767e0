"""A worker's connection to its router: joining, heartbeats, announcements. Lives in the exchange's event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from hypic.router import messages as m
from hypic.router.transport.security import Curve, Gate
from hypic.router.transport.zmq_client import ENVELOPE
from hypic.router.transport.zmq_server import send_now

logger = logging.getLogger(__name__)

HELLO_EVERY = 0.5
"""Seconds between attempts to join."""
_QUEUE = 1024
_ANNOUNCED_AT_ONCE = 32768

Order = m.Compile | m.Expect | m.Reroute | m.Cancel


class Membership(msgspec.Struct, frozen=True):
    """Where this worker belongs.

    Attributes:
        router: address of the router's control socket.
        worker: our name.
        data: address to serve artifacts at (of rank 0).
        http: base URL of our HTTP server.
        capacity: bytes of the arena.
        shape: of our artifacts and passes.
        curve, router_key: keys for tcp addresses.
        rank, ranks: of the TP group. Rank 0 alone speaks to the router; rank r serves and fetches its part of artifacts from
            rank r of other workers.
    """

    router: str
    worker: str
    data: str
    http: str
    capacity: int
    shape: m.Shape = m.Shape()
    curve: Curve | None = None
    router_key: bytes = b""
    rank: int = 0
    ranks: int = 1


class Load(msgspec.Struct, frozen=True):
    """What a heartbeat says."""

    queued_tokens: int = 0
    running: int = 0
    free: int = 0
    tokens_per_s: float = 0.0


class RouterLink:
    """The connection.

    Args:
        member: where we belong.
        identity: digest of what our artifacts are a function of.
        heard: called with every order.

    Attributes:
        load: written by the scheduler's thread, read at every heartbeat.
        joined: the router knows us.
        held: artifacts that may be joined here: key -> bytes.
        dropped: messages that could not be sent.
    """

    def __init__(self, member: Membership, identity: bytes, heard: Callable[[Order], None]):
        self.load = Load(free=member.capacity)
        self.joined = threading.Event()
        self.held: dict[bytes, int] = {}
        self.dropped = 0
        self._member, self._identity, self._heard = member, identity, heard
        self._epoch = os.urandom(16)
        self._inbox = m.Inbox(m.ToWorker, "router")
        self._news: list[tuple[bool, bytes, int]] = []
        self._seq = self._beats = 0
        self._router = b""
        self._said_hello = -1e9
        self._awaits_welcome = False
        self._heartbeat = HELLO_EVERY

    def connect(self, context: zmq.asyncio.Context, gate: Gate, data: str, public_key: bytes) -> None:
        """`data` and `public_key` are what peers need to reach us. Raises InsecureError."""
        self._data, self._public_key = data, public_key
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 200),
            (zmq.IMMEDIATE, 1),
            (zmq.MAXMSGSIZE, m.limit(m.ToWorker) + ENVELOPE),
            (zmq.SNDHWM, _QUEUE),
            (zmq.RCVHWM, _QUEUE),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 2000),
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 5000),
        ):
            self._socket.setsockopt(option, value)
        gate.introduce(self._socket, self._member.router, self._member.router_key)
        self._socket.connect(self._member.router)

    def close(self) -> None:
        """Say goodbye."""
        if hasattr(self, "_socket"):
            if self.joined.is_set():
                self._send(m.Bye())
            self.joined.clear()
            self._socket.close()

    def say(self, message: m.Message) -> None:
        """Best effort: every wait of the router has a deadline."""
        if self.joined.is_set():
            self._send(message)

    def rename(self, identity: bytes) -> None:
        """We are another model now: leave; the next beat joins again."""
        self._identity = identity
        if self._member.rank:
            return
        self._send(m.Bye())  # also if its Welcome to what we were is still on its way:
        self._awaits_welcome = False  # then that makes us introduce ourselves
        self.joined.clear()

    def announce(self, key: bytes, nbytes: int | None) -> None:
        """An artifact is here, or (None) is not any more."""
        if nbytes is not None:
            self.held[key] = nbytes
        elif self.held.pop(key, None) is None:
            return
        if not self._news:
            asyncio.get_running_loop().call_soon(self._publish)
        self._news.append((nbytes is not None, key, nbytes or 0))

    async def beat(self) -> None:
        """For ever: join while we are not known, and show that we live."""
        while True:
            if self.joined.is_set():
                load, self._beats = self.load, self._beats + 1
                self._send(
                    m.Heartbeat(
                        seq=self._beats,
                        queued_tokens=load.queued_tokens,
                        running=load.running,
                        free=load.free,
                        tokens_per_s=load.tokens_per_s,
                    )
                )
            elif time.monotonic() - self._said_hello >= HELLO_EVERY:
                self._hello()
            await asyncio.sleep(self._heartbeat if self.joined.is_set() else HELLO_EVERY / 4)

    async def listen(self) -> None:
        """For ever: take in what the router says."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 1:
                self._inbox.reject("frames")
            elif (message := self._inbox.read(frames[0])) is not None:
                self._hear(message)

    def _hear(self, message: m.Welcome | m.Refused | m.Resync | Order) -> None:
        if isinstance(message, m.Welcome):
            if not self._awaits_welcome:  # it does not know us (any more): another router, or we were silent
                self.joined.clear()
                self._hello()
                return
            self._awaits_welcome, self._heartbeat = False, message.heartbeat
            if message.router != self._router:
                logger.info("hypic: worker %s of the router at %s", self._member.worker, self._member.router)
            self._router = message.router
            self.joined.set()
            self._announce_all()
        elif isinstance(message, m.Refused):
            self._awaits_welcome = False
            self.joined.clear()
            logger.warning("hypic: the router at %s refuses this worker: %s", self._member.router, message.reason)
        elif isinstance(message, m.Resync):
            self._announce_all()
        else:
            self._heard(message)

    def _hello(self) -> None:
        member = self._member
        self._said_hello = time.monotonic()
        self._awaits_welcome = self._send(
            m.Hello(
                worker=member.worker,
                epoch=self._epoch,
                identity=self._identity,
                data=self._data,
                http=member.http,
                capacity=member.capacity,
                free=self.load.free,
                tokens_per_s=self.load.tokens_per_s,
                shape=member.shape,
                public_key=self._public_key,
            )
        )

    def _send(self, message: m.Message) -> bool:
        try:
            send_now(self._socket, [m.encode(message)])
        except zmq.ZMQError:  # no router at present, or one that does not read
            self.dropped += 1
            return False
        return True

    def _publish(self) -> None:
        """What happened since the loop was here last, in its order, in as few messages as that takes."""
        news, self._news = self._news, []
        if self.joined.is_set():
            for stored, items in itertools.groupby(news, key=lambda n: n[0]):
                self._number(stored, [(key, nbytes) for _, key, nbytes in items])

    def _announce_all(self) -> None:
        self._seq = 0
        self._news.clear()
        self._number(True, list(self.held.items()))

    def _number(self, stored: bool, items: list[tuple[bytes, int]]) -> None:
        for at in range(0, len(items), _ANNOUNCED_AT_ONCE):
            keys, sizes = zip(*items[at : at + _ANNOUNCED_AT_ONCE], strict=True)
            self._seq += 1
            self._send(
                m.Stored(seq=self._seq, keys=keys, nbytes=sizes) if stored else m.Evicted(seq=self._seq, keys=keys)
            )
