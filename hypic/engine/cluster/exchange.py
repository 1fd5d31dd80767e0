"""A worker's voice: a thread with an event loop that speaks to the router (control) and to other workers (artifacts).

The scheduler's thread calls the methods under "from the scheduler" and takes events out; it never waits for a socket, and
nothing here touches the store. What the scheduler must do before memory may be read or written is done before it calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from hypic.engine.cluster.events import Asked, ClusterEvent, Fetched, Returned, Told
from hypic.engine.cluster.memory import HostMemory
from hypic.router import messages as m
from hypic.router.transport import Peer, TransferError
from hypic.router.transport.security import Curve, Gate
from hypic.router.transport.zmq_blobs import ZmqTransport

logger = logging.getLogger(__name__)

HELLO_EVERY = 0.5
"""Seconds between attempts to join."""
OFFER_IDLE = 5.0
"""Seconds after which an artifact that nobody has asked for is on offer no more, so that it can be evicted."""
GRACE = 0.5
"""Seconds that a peer waits for an artifact of which nothing is known here: its order may be on its way."""
_ENVELOPE = 256
_QUEUE = 1024
_REMEMBERED = 4096
_ANNOUNCED_AT_ONCE = 32768


class Membership(msgspec.Struct, frozen=True):
    """Where this worker belongs.

    Attributes:
        router: address of the router's control socket.
        worker: our name.
        data: address to serve artifacts at.
        http: base URL of our HTTP server.
        capacity: bytes of the arena.
        shape: of our artifacts and passes.
        curve, router_key: keys for tcp addresses.
    """

    router: str
    worker: str
    data: str
    http: str
    capacity: int
    shape: m.Shape = m.Shape()
    curve: Curve | None = None
    router_key: bytes = b""


class Load(msgspec.Struct, frozen=True):
    """What a heartbeat says."""

    queued_tokens: int = 0
    running: int = 0
    free: int = 0
    tokens_per_s: float = 0.0


class Exchange:
    """The thread. Its socket is bound, and joining goes on in the background, once :meth:`start` has returned."""

    def __init__(self, member: Membership, identity: bytes, memory: HostMemory):
        self.member = member
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while there are events: for whoever sleeps."""
        self.load = Load(free=member.capacity)
        """Written by the scheduler, read at every heartbeat."""
        self.joined = threading.Event()
        self.dropped = 0
        """Control messages that could not be sent."""
        self._identity, self._memory = identity, memory
        self._epoch = os.urandom(16)
        self._events: deque[ClusterEvent] = deque()
        self._inbox = m.Inbox(m.ToWorker, "router")
        self._held: dict[bytes, int] = {}
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        """Keys that were evicted lately."""
        self._ordered: set[bytes] = set()
        self._news: list[tuple[bool, bytes, int]] = []
        self._seq = self._beats = 0
        self._router = b""
        self._said_hello = -1e9
        self._awaits_welcome = False
        self._heartbeat = HELLO_EVERY
        self._fetches: dict[bytes, asyncio.Task[None]] = {}
        self._offers: dict[bytes, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started: threading.Event = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hypic-exchange", daemon=True)

    # ------------------------------------------------------------------ from the scheduler

    def start(self) -> None:
        """Raises InsecureError or zmq.ZMQError: an address cannot be used."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def take(self) -> list[ClusterEvent]:
        """Events since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        return [self._events.popleft() for _ in range(len(self._events))]

    def close(self, timeout: float = 5.0) -> None:
        """Say goodbye and end. Nothing refers to the arena afterwards."""
        self._post(self._stop.set)
        self._thread.join(timeout)

    def stored(self, key: bytes, nbytes: int) -> None:
        """An artifact is ready."""
        self._post(self._announce, True, key, nbytes)

    def gone(self, key: bytes) -> None:
        """An artifact that was ready is not in the store any more."""
        self._post(self._announce, False, key, 0)

    def offer(self, key: bytes, offset: int, nbytes: int) -> None:
        """Serve a locked, ready artifact until `Returned`."""
        self._post(self._offer, key, offset, nbytes)

    def withdraw(self, key: bytes, reason: str) -> None:
        """Serve it no more, or tell those who wait for it that it will not come; then `Returned`."""
        self._post(self._withdraw, key, reason)

    def fetch(self, key: bytes, peer: Peer, offset: int, nbytes: int, timeout: float) -> None:
        """Fill the reserved, locked place; then `Fetched`."""
        self._post(self._fetch, key, peer, offset, nbytes, timeout)

    def refetch(
        self, key: bytes, peer: Peer | None, offset: int, nbytes: int, timeout: float, reason: str = ""
    ) -> None:
        """Drop what is fetched and begin anew with another peer, or with none: then it has failed, for this reason."""
        self._post(self._refetch, key, peer, offset, nbytes, timeout, reason)

    def say(self, message: m.Message) -> None:
        """Tell the router (best effort)."""
        self._post(self._said, message)

    def rename(self, identity: bytes) -> None:
        """The weights are others now: leave, and join as what we are."""
        self._post(self._renamed, identity)

    def _post(self, fn: Callable[..., Any], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(fn, *args)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as e:
            self._error = e
            if self._started.is_set():
                logger.exception("hypic: the exchange with other workers has ended; this server goes on alone")
        finally:
            self.joined.clear()
            self._started.set()
            os.eventfd_write(self.wake_fd, 1)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        member = self.member
        self._transport = ZmqTransport(member.data, member.curve, resolve=self._resolve)
        self._address = await self._transport.start()
        context = zmq.asyncio.Context()
        self._control = context.socket(zmq.DEALER)
        try:
            gate = Gate(context, member.curve)
            for option, value in (
                (zmq.LINGER, 200),
                (zmq.IMMEDIATE, 1),
                (zmq.MAXMSGSIZE, m.limit(m.ToWorker) + _ENVELOPE),
                (zmq.SNDHWM, _QUEUE),
                (zmq.RCVHWM, _QUEUE),
                (zmq.RECONNECT_IVL, 100),
                (zmq.RECONNECT_IVL_MAX, 2000),
                (zmq.HEARTBEAT_IVL, 1000),
                (zmq.HEARTBEAT_TIMEOUT, 5000),
            ):
                self._control.setsockopt(option, value)
            gate.introduce(self._control, member.router, member.router_key)
            self._control.connect(member.router)
            self._started.set()
            tasks = [self._spawn(self._listen()), self._spawn(self._beat()), self._spawn(self._stop.wait())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            self._send(m.Bye())
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._transport.close()
            self._control.close()
            if "gate" in locals():
                gate.close()
            context.term()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, event: ClusterEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self.wake_fd, 1)

    # ------------------------------------------------------------------ control

    def _send(self, message: m.Message) -> bool:
        future = self._control.send(m.encode(message), zmq.NOBLOCK)
        try:
            future.result()  # type: ignore[attr-defined]  # done: NOBLOCK
        except zmq.ZMQError:  # no router at present, or one that does not read
            self.dropped += 1
            return False
        return True

    def _said(self, message: m.Message) -> None:
        if isinstance(message, m.Compiled):
            self._ordered.discard(message.key)
        if self.joined.is_set():
            self._send(message)

    def _hello(self) -> None:
        member = self.member
        self._said_hello = time.monotonic()
        self._awaits_welcome = self._send(
            m.Hello(
                worker=member.worker,
                epoch=self._epoch,
                identity=self._identity,
                data=self._address,
                http=member.http,
                capacity=member.capacity,
                free=self.load.free,
                tokens_per_s=self.load.tokens_per_s,
                shape=member.shape,
                public_key=self._transport.public_key,
            )
        )

    async def _beat(self) -> None:
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
            for key in self._transport.idle(time.monotonic() - OFFER_IDLE):
                self._withdraw(key, "gone")
            await asyncio.sleep(self._heartbeat if self.joined.is_set() else HELLO_EVERY / 4)

    async def _listen(self) -> None:
        while True:
            frames = await self._control.recv_multipart()
            if len(frames) != 1:
                self._inbox.reject("frames")
            elif (message := self._inbox.read(frames[0])) is not None:
                self._heard(message)

    def _heard(self, message: Any) -> None:
        if isinstance(message, m.Welcome):
            if not self._awaits_welcome:  # it does not know us (any more): another router, or we were silent
                self.joined.clear()
                self._hello()
                return
            self._awaits_welcome, self._heartbeat = False, message.heartbeat
            if message.router != self._router:
                logger.info("hypic: worker %s of the router at %s", self.member.worker, self.member.router)
            self._router = message.router
            self.joined.set()
            self._announce_all()
        elif isinstance(message, m.Refused):
            self._awaits_welcome = False
            self.joined.clear()
            logger.warning("hypic: the router at %s refuses this worker: %s", self.member.router, message.reason)
        elif isinstance(message, m.Resync):
            self._announce_all()
        else:
            if isinstance(message, m.Compile):
                self._ordered.add(message.key)
                if message.key not in self._held:
                    self._transport.expect(message.key)
            self._tell(Told(message))

    def _renamed(self, identity: bytes) -> None:
        self._identity = identity
        if self.joined.is_set():
            self._send(m.Bye())
            self.joined.clear()

    # ------------------------------------------------------------------ announcements

    def _announce(self, stored: bool, key: bytes, nbytes: int) -> None:
        if stored:
            self._held[key] = nbytes
            self._gone.pop(key, None)
        else:
            self._held.pop(key, None)
            self._gone[key] = None
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)
        if not self._news:
            self._loop.call_soon(self._publish)
        self._news.append((stored, key, nbytes))

    def _publish(self) -> None:
        """What happened since the loop was here last, in its order, in as few messages as that takes."""
        news, self._news = self._news, []
        if self.joined.is_set():
            for stored, items in itertools.groupby(news, key=lambda n: n[0]):
                self._number(stored, [(key, nbytes) for _, key, nbytes in items])

    def _announce_all(self) -> None:
        self._seq = 0
        self._news.clear()
        self._number(True, list(self._held.items()))

    def _number(self, stored: bool, items: list[tuple[bytes, int]]) -> None:
        for at in range(0, len(items), _ANNOUNCED_AT_ONCE):
            keys, sizes = zip(*items[at : at + _ANNOUNCED_AT_ONCE], strict=True)
            self._seq += 1
            self._send(
                m.Stored(seq=self._seq, keys=keys, nbytes=sizes) if stored else m.Evicted(seq=self._seq, keys=keys)
            )

    # ------------------------------------------------------------------ artifacts out

    def _resolve(self, key: bytes) -> bool:
        """A peer wants what is not on offer. True: it may wait."""
        if key in self._gone and key not in self._ordered:
            return False
        self._transport.expect(key)
        if key in self._held:
            self._tell(Asked(key))
        elif key not in self._ordered:
            self._loop.call_later(GRACE, self._give_up, key)
        return True

    def _give_up(self, key: bytes) -> None:
        if key in self._held:
            self._tell(Asked(key))
        elif key not in self._ordered:
            self._withdraw(key, "gone")

    def _offer(self, key: bytes, offset: int, nbytes: int) -> None:
        async def offer() -> None:
            self._transport.offer(key, await self._memory.readable(offset, nbytes))

        self._ordered.discard(key)
        self._offers[key] = self._spawn(offer())

    def _withdraw(self, key: bytes, reason: str) -> None:
        async def withdraw() -> None:
            if (offer := self._offers.pop(key, None)) is not None:
                await asyncio.gather(offer, return_exceptions=True)
            await self._transport.withdraw(key, reason)
            self._tell(Returned(key))

        self._ordered.discard(key)
        self._spawn(withdraw())

    # ------------------------------------------------------------------ artifacts in

    def _fetch(self, key: bytes, peer: Peer, offset: int, nbytes: int, timeout: float) -> None:
        self._begin(key, self._receive(key, peer, offset, nbytes, timeout))

    def _refetch(self, key: bytes, peer: Peer | None, offset: int, nbytes: int, timeout: float, reason: str) -> None:
        before = self._fetches.get(key)
        if before is None:  # it is over, and its event is on its way
            return
        before.cancel()

        async def again() -> None:
            await asyncio.gather(before, return_exceptions=True)
            if not before.cancelled():
                self._fetches.pop(key, None)
            elif peer is None:
                self._over(key, Fetched(key, False, reason))
            else:
                await self._receive(key, peer, offset, nbytes, timeout)

        self._begin(key, again())

    def _begin(self, key: bytes, work: Coroutine[Any, Any, None]) -> None:
        self._fetches[key] = self._spawn(work)

    async def _receive(self, key: bytes, peer: Peer, offset: int, nbytes: int, timeout: float) -> None:
        try:
            view = self._memory.writable(offset, nbytes)
            receipt = await self._transport.fetch(peer, key, view, timeout)
            await self._memory.arrived(offset, view)
        except TransferError as e:
            self._over(key, Fetched(key, False, e.reason))
        except Exception as e:
            logger.exception("hypic: fetching from %s", peer.address)
            self._over(key, Fetched(key, False, type(e).__name__))
        else:
            self._over(key, Fetched(key, True, seconds=receipt.seconds))

    def _over(self, key: bytes, event: Fetched) -> None:
        self._fetches.pop(key, None)
        self._tell(event)
