"""A worker's voice: a thread with an event loop that speaks to the router (control) and to other workers (artifacts).

The scheduler's thread calls the methods under "from the scheduler" and takes events out; it never waits for a socket, and
nothing here touches the store. What the scheduler must do before memory may be read or written is done before it calls.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from hypic.artifact.layout import HeaderError, decode_header, require_header
from hypic.engine.cluster.events import (
    Asked,
    ClusterEvent,
    Expired,
    Fetched,
    FromRank,
    Idle,
    Returned,
    Tally,
    Told,
)
from hypic.engine.cluster.membership import Load, Membership, Order, RouterLink
from hypic.engine.cluster.movers import Mover
from hypic.router import messages as m
from hypic.router.transport import Peer, TransferError
from hypic.router.transport.security import Gate
from hypic.router.transport.zmq_blobs import ZmqTransport

logger = logging.getLogger(__name__)

OFFER_IDLE = 5.0
"""Seconds after which an artifact that nobody has asked for is on offer no more, so that it can be evicted."""
GRACE = 0.5
"""Seconds that a peer waits for an artifact of which nothing is known here: its order may be on its way."""
TOGETHER = 0.02
"""Seconds that an order waits for those that are to follow at once: one may be lost."""
_REMEMBERED = 4096


def rank_address(address: str, rank: int) -> str:
    """Where rank `rank` of a worker serves, whose rank 0 serves at `address`: tcp ports and ipc names follow each other."""
    if not rank:
        return address
    if address.startswith("tcp://"):
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + rank}"
    return f"{address}.{rank}"


class Place(msgspec.Struct, frozen=True):
    """A reserved, locked place in the arena, and the header that the artifact must have there."""

    key: bytes
    offset: int
    nbytes: int
    header: bytes


class Exchange:
    """The thread. Its sockets are there, and joining goes on in the background, once :meth:`start` has returned."""

    def __init__(self, member: Membership, identity: bytes, mover: Mover):
        self.member = member
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while there are events: for whoever sleeps."""
        self._mover = mover
        self._router = RouterLink(member, identity, self._told)
        self._events: deque[ClusterEvent] = deque()
        self._pending: set[bytes] = set()
        """Keys that the scheduler waits for; its thread alone uses this."""
        self._tally = Tally(member.ranks)
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        """Keys that were evicted lately."""
        self._ordered: set[bytes] = set()
        """Keys that are being compiled for others."""
        self._together: list[m.Compile] = []
        """Orders that wait for those that follow."""
        self._fetches: dict[bytes, asyncio.Task[None]] = {}
        self._offers: dict[bytes, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hypic-exchange", daemon=True)

    # ------------------------------------------------------------------ from the scheduler

    def start(self) -> None:
        """Raises InsecureError or zmq.ZMQError: an address cannot be used."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def close(self, timeout: float = 5.0) -> None:
        """Say goodbye and end. Nothing refers to the arena afterwards."""
        self._post(self._stop.set)
        self._thread.join(timeout)

    def take(self) -> list[ClusterEvent]:
        """Events since the last call: of all ranks, if this is rank 0, else none."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        events = [self._events.popleft() for _ in range(len(self._events))]
        for event in events:
            if isinstance(event, Fetched):
                self._pending.discard(event.key)
        if self._pending and not self._thread.is_alive():
            events += [Fetched(key, False, "the exchange has ended") for key in sorted(self._pending)]
            self._pending.clear()
        return events

    def show(self, load: Load) -> None:
        """For the next heartbeats."""
        self._router.load = load

    def stored(self, key: bytes, nbytes: int) -> None:
        """An artifact is ready."""
        self._post(self._announce, key, nbytes)

    def gone(self, key: bytes) -> None:
        """An artifact that was ready is not in the store any more."""
        self._post(self._announce, key, None)

    def offer(self, key: bytes, offset: int, nbytes: int) -> None:
        """Serve a locked, ready artifact until `Returned`."""
        self._post(self._offer, key, offset, nbytes)

    def withdraw(self, key: bytes, reason: str) -> None:
        """Serve it no more; then `Returned`."""
        self._post(self._withdraw, key, reason, True)

    def order(self, key: bytes) -> None:
        """It is being made here: peers that ask for it wait until `offer` or `refuse`."""
        self._post(self._order, key)

    def refuse(self, key: bytes, reason: str) -> None:
        """Tell those who wait for it that it will not come."""
        self._post(self._withdraw, key, reason, False)

    def fetch(self, place: Place, peer: Peer, timeout: float) -> None:
        """Fill the place from a worker, whose rank 0 `peer` is; then `Fetched`."""
        self._pending.add(place.key)
        self._post(self._fetch, place, self._rank_of(peer), timeout)

    def refetch(self, place: Place, peer: Peer | None, timeout: float, reason: str = "") -> None:
        """Drop what is fetched and begin anew with another peer, or with none: then it has failed, for this reason."""
        self._post(self._refetch, place, self._rank_of(peer) if peer else None, timeout, reason)

    def say(self, message: m.Message) -> None:
        """Tell the router (best effort; rank 0 alone does)."""
        self._post(self._say, message)

    def rename(self, identity: bytes) -> None:
        """The weights are others now: leave, and join as what we are."""
        self._post(self._router.rename, identity)

    def _rank_of(self, peer: Peer) -> Peer:
        return Peer(rank_address(peer.address, self.member.rank), peer.public_key)

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
            self._started.set()
            os.eventfd_write(self.wake_fd, 1)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        member = self.member
        self._transport = ZmqTransport(rank_address(member.data, member.rank), member.curve, resolve=self._resolve)
        address = await self._transport.start()
        context = zmq.asyncio.Context()
        self._ranks = context.socket(zmq.PULL if member.rank == 0 else zmq.PUSH)
        self._ranks.setsockopt(zmq.LINGER, 0)
        gate = None
        try:
            gate = Gate(context, member.curve)
            if member.ranks > 1:
                self._join_ranks(gate)
            if member.rank == 0:
                self._router.connect(context, gate, address, self._transport.public_key)
            tasks = [self._spawn(self._stop.wait())]
            if member.rank == 0:
                work = self._router.listen, self._router.beat, self._look_for_idle, self._listen_to_ranks
                tasks += [self._spawn(w()) for w in work]
            self._started.set()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._transport.close()
            self._router.close()
            self._ranks.close()
            if gate is not None:
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

    # ------------------------------------------------------------------ ranks

    def _join_ranks(self, gate: Gate) -> None:
        """Other ranks of this worker tell rank 0 what has become of their parts."""
        address = self.member.data + ".ranks"
        if self.member.rank:
            gate.introduce(self._ranks, address, b"")
            self._ranks.connect(address)
        else:
            gate.guard(self._ranks, address)
            self._ranks.bind(address)

    async def _listen_to_ranks(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromRank)
        while True:
            self._at_rank(decoder.decode(await self._ranks.recv()))

    def _at_rank(self, event: FromRank) -> None:
        """Something has happened at one rank: rank 0 tells the scheduler once it is true of all."""
        if self.member.rank:
            self._spawn(self._tell_rank_0(event))
        elif (of_all := self._tally.add(event)) is not None:
            self._tell(of_all)

    async def _tell_rank_0(self, event: FromRank) -> None:
        await self._ranks.send(msgspec.msgpack.encode(event))

    # ------------------------------------------------------------------ the router

    def _told(self, order: Order) -> None:
        if not isinstance(order, m.Compile):
            self._pass_on()
            self._tell(Told(order))
            return
        self._order(order.key)  # at once: a peer's wish may be right behind it
        self._loop.call_later(order.deadline, self._tell, Expired(order.key))
        self._together.append(order)
        if not order.more:
            self._pass_on()
        elif len(self._together) == 1:
            self._loop.call_later(TOGETHER, self._pass_on)

    def _pass_on(self) -> None:
        """Orders of one request reach the scheduler at once, so that its first pass takes as many as it can: it may wake between
        two events, and take the first alone."""
        together, self._together = self._together, []
        self._events.extend([Told(order) for order in together])
        os.eventfd_write(self.wake_fd, 1)

    def _say(self, message: m.Message) -> None:
        if isinstance(message, m.Compiled):
            self._ordered.discard(message.key)
        self._router.say(message)

    def _announce(self, key: bytes, nbytes: int | None) -> None:
        self._router.announce(key, nbytes)
        if nbytes is not None:
            self._gone.pop(key, None)
        else:
            self._gone[key] = None
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)

    # ------------------------------------------------------------------ artifacts out

    def _resolve(self, key: bytes) -> bool:
        """A peer wants what is not on offer. True: it may wait."""
        if key in self._gone and key not in self._ordered:
            return False
        self._transport.expect(key)
        if key in self._router.held:
            self._at_rank(Asked(key))
        elif key not in self._ordered:
            self._loop.call_later(GRACE, self._give_up, key)
        return True

    def _give_up(self, key: bytes) -> None:
        if key in self._router.held:
            self._at_rank(Asked(key))
        elif key not in self._ordered:
            self._withdraw(key, "gone", False)

    def _order(self, key: bytes) -> None:
        if key not in self._router.held:
            self._ordered.add(key)
            self._transport.expect(key)

    def _offer(self, key: bytes, offset: int, nbytes: int) -> None:
        async def offer() -> None:
            await self._mover.offer(self._transport, key, offset, nbytes)

        self._ordered.discard(key)
        self._offers[key] = self._spawn(offer())

    def _withdraw(self, key: bytes, reason: str, lent: bool) -> None:
        async def withdraw() -> None:
            if (offer := self._offers.pop(key, None)) is not None:
                await asyncio.gather(offer, return_exceptions=True)
            await self._transport.withdraw(key, reason)
            if lent:
                self._at_rank(Returned(key))

        self._ordered.discard(key)
        self._spawn(withdraw())

    async def _look_for_idle(self) -> None:
        while True:
            for key in self._transport.idle(time.monotonic() - OFFER_IDLE):
                self._tell(Idle(key))
            self._transport.refresh()
            await asyncio.sleep(OFFER_IDLE / 10)

    # ------------------------------------------------------------------ artifacts in

    def _fetch(self, place: Place, peer: Peer, timeout: float) -> None:
        self._fetches[place.key] = self._spawn(self._receive(place, peer, timeout))

    def _refetch(self, place: Place, peer: Peer | None, timeout: float, reason: str) -> None:
        key = place.key
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
                await self._receive(place, peer, timeout)

        self._fetches[key] = self._spawn(again())

    async def _receive(self, place: Place, peer: Peer, timeout: float) -> None:
        key = place.key
        try:
            receipt, head = await self._mover.fetch(
                self._transport, peer, key, place.offset, place.nbytes, len(place.header), timeout
            )
            require_header(head, decode_header(place.header))
        except TransferError as e:
            self._over(key, Fetched(key, False, e.reason))
        except HeaderError as e:
            logger.error("hypic: from %s: %s", peer.address, e)
            self._over(key, Fetched(key, False, "header"))
        except Exception as e:
            logger.exception("hypic: fetching from %s", peer.address)
            self._over(key, Fetched(key, False, type(e).__name__))
        else:
            self._over(key, Fetched(key, True, seconds=receipt.seconds))

    def _over(self, key: bytes, event: Fetched) -> None:
        self._fetches.pop(key, None)
        self._at_rank(event)
