"""The router as its front uses it: requests in, and for each the word where it may go now. No HTTP, no engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hypic.router import messages as m
from hypic.router.actions import Action, Broken, Forward, Prompt, Send, Settings
from hypic.router.control import ControlSocket
from hypic.router.coordinator import Coordinator
from hypic.router.costs import Costs
from hypic.router.measured import Measured
from hypic.router.schedule import Policy
from hypic.router.timeline import Recorder, Timeline
from hypic.router.transport.security import Curve

Reachable = Callable[[m.Hello], Awaitable[bool]]
"""Whether a worker's HTTP server answers at this address."""

logger = logging.getLogger(__name__)

_PROBE_EVERY = 0.1


class WorkerLost(RuntimeError):
    """The combine worker of a request is gone."""


class Ticket:
    """One attempt to serve one request.

    Attributes:
        request: the router's name of it.
        timeline: what happened so far.
        worker, http: where it goes.
        lost: set once that worker is gone.
    """

    def __init__(self, request: str, timeline: Timeline):
        self.request, self.timeline = request, timeline
        self.worker = self.http = ""
        self.lost = asyncio.Event()
        self.went: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Router:
    """Coordinator, socket, measurement and record of one front.

    Args:
        costs: what is reckoned with until it is measured.
        address: of the control socket.
        reachable: a worker counts as alive only once this holds of what it says; None takes its word.
    """

    def __init__(
        self,
        costs: Costs,
        address: str,
        policy: Policy = "lpt",
        settings: Settings | None = None,
        curve: Curve | None = None,
        reachable: Reachable | None = None,
    ):
        self.coordinator = Coordinator(costs, name=secrets.token_bytes(16), settings=settings, policy=policy)
        self.settings = self.coordinator.settings
        self.measured, self.recorder = Measured(costs), Recorder()
        self.roles: Counter[str] = Counter()
        """Segments by how their combine worker was to come by them."""
        self.placements: Counter[str] = Counter()
        self.heartbeats: dict[str, m.Heartbeat] = {}
        self.reachable = reachable
        self._socket = ControlSocket(self, address, self._act, curve)
        self._tickets: dict[str, Ticket] = {}
        self._expected_at: dict[str, float] = {}
        self._reached: dict[str, bytes] = {}
        """Which run of a worker was found to be reachable; not remembered once it is lost."""
        self.coordinator.on_lost = lambda worker: self._reached.pop(worker, None)
        self._probes: dict[str, tuple[bytes, m.Hello]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """The address that workers connect to. Raises InsecureError or zmq.ZMQError."""
        return await self._socket.start()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()

    # ------------------------------------------------------------------ requests

    async def submit(
        self,
        rid: str,
        prompts: Sequence[Prompt],
        prompt_tokens: int,
        combine: str | None = None,
        arrived: float = 0.0,
        prefix: Sequence[bytes] = (),
    ) -> Ticket:
        """Place a request, and wait until it may go to its combine worker.

        Args:
            rid: SGLang's request id.
            combine: the worker that combines it, if that is decided already and it is alive.
            arrived: when it arrived, by the monotonic clock; now if not given.
            prefix: digests of the prompt's blocks (:mod:`hypic.router.prefixes`).

        Raises:
            NoWorkers: none is alive.
            WorkerLost: its worker was lost meanwhile; it may be submitted again.
        """
        request, now = f"r{secrets.token_hex(12)}", time.monotonic()
        ticket = Ticket(request, self.recorder.begin(request, rid, prompt_tokens, arrived or now))
        try:
            actions = self.coordinator.submit(request, list(prompts), now, combine, prefix)
        except BaseException as e:
            self.recorder.end(request, type(e).__name__, now)
            raise
        placement = self.coordinator.placement(request)
        assert placement is not None
        self.recorder.placed(request, placement, prompts, now)
        self.roles.update(source.role for source in placement.sources.values())
        self.placements["scattered" if placement.scattered else "linked" if prompts else "plain"] += 1
        self._tickets[request] = ticket
        self._carry_out(actions, now)
        try:
            await ticket.went
        except asyncio.CancelledError:
            self.cancel(ticket)
            raise
        return ticket

    def holder(self, prompts: Sequence[Prompt]) -> str | None:
        """A worker that may get something new and has these artifacts."""
        cluster = self.coordinator.cluster
        able = set(cluster.available()).intersection(*(cluster.directory.holders(p.key) for p in prompts))
        return min(able, key=lambda name: (cluster.ready_seconds(cluster.workers[name]), name), default=None)

    def first_token(self, ticket: Ticket) -> None:
        self.recorder.first_token(ticket.request, time.monotonic())
        self.coordinator.first_token(ticket.request)

    def end(self, ticket: Ticket, outcome: str) -> None:
        """It was answered, well or not. Safe to call again."""
        self.coordinator.end(ticket.request)
        self._forget(ticket, outcome)

    def cancel(self, ticket: Ticket) -> None:
        """Its client is gone. Safe to call again."""
        now = time.monotonic()
        self._carry_out(self.coordinator.cancel(ticket.request), now)
        self._forget(ticket, "cancelled")

    def disown(self, worker: str) -> None:
        """Its HTTP server does not answer, or its process has ended: no need to wait until it has been silent for long."""
        now = time.monotonic()
        self._carry_out(self.coordinator.disown(worker, now), now)

    # ------------------------------------------------------------------ what the control socket calls

    def receive(self, peer: bytes, message: Any, now: float) -> list[Action]:
        """As Coordinator.receive."""
        if isinstance(message, m.Hello):
            return self._hello(peer, message, now)
        worker = self.coordinator.worker_of(peer)
        if isinstance(message, m.Heartbeat) and worker:
            self.heartbeats[worker] = message
        elif isinstance(message, m.Expecting) and (sent := self._expected_at.pop(message.request, None)):
            self._reckon(lambda: self.measured.round_trip(now - sent))
        elif isinstance(message, m.Arrived) and worker and message.ok:
            nbytes = self.coordinator.nbytes(message.request, message.key)
            self._reckon(lambda: self.measured.arrived(worker, nbytes, message.seconds, now))
        self.recorder.received(worker, message, now)
        return self._noted(self.coordinator.receive(peer, message, now), now)

    def tick(self, now: float) -> list[Action]:
        """As Coordinator.tick."""
        return self._noted(self.coordinator.tick(now), now)

    @property
    def rejected(self) -> Counter[str]:
        """Frames that were dropped, by reason."""
        return self._socket.inbox.rejected

    @property
    def unsent(self) -> int:
        return self._socket.unsent

    # ------------------------------------------------------------------ helpers

    def _hello(self, peer: bytes, hello: m.Hello, now: float) -> list[Action]:
        """Workers introduce themselves when their scheduler is up, which is before their HTTP server is."""
        if self.reachable is None or self._reached.get(hello.worker) == hello.epoch:
            self._reckon(lambda: self.measured.hello(hello))
            return self._noted(self.coordinator.receive(peer, hello, now), now)
        waiting = hello.worker in self._probes
        self._probes[hello.worker] = peer, hello
        if not waiting:
            task = asyncio.create_task(self._probe(hello.worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return []

    async def _probe(self, worker: str) -> None:
        """Wait for the HTTP server of whatever run of this worker spoke last."""
        assert self.reachable is not None
        while True:
            try:
                if await self.reachable(self._probes[worker][1]):
                    break
            except Exception:
                logger.exception("worker %s is not asked for anything yet", worker)
            await asyncio.sleep(_PROBE_EVERY)
        peer, hello = self._probes.pop(worker)
        self._reached[worker] = hello.epoch
        now = time.monotonic()
        self._carry_out(self._hello(peer, hello, now), now)

    def _reckon(self, measure: Callable[[], None]) -> None:
        measure()
        self.coordinator.cluster.costs = self.measured.costs

    def _noted(self, actions: list[Action], now: float) -> list[Action]:
        self.recorder.acted(actions, now)
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, m.Expect):
                self._expected_at[action.message.request] = now
        return actions

    def _carry_out(self, actions: list[Action], now: float) -> None:
        self._socket.carry_out(self._noted(actions, now))

    def _act(self, action: Forward | Broken) -> None:
        ticket = self._tickets.get(action.request)
        if ticket is None:
            return
        if isinstance(action, Forward):
            ticket.worker, ticket.http = action.worker, action.http
            if not ticket.went.done():
                ticket.went.set_result(None)
            return
        self._forget(ticket, f"{action.worker} was lost")
        ticket.lost.set()
        if not ticket.went.done():
            ticket.went.set_exception(WorkerLost(action.worker))

    def _forget(self, ticket: Ticket, outcome: str) -> None:
        self._tickets.pop(ticket.request, None)
        self._expected_at.pop(ticket.request, None)
        self.recorder.end(ticket.request, outcome, time.monotonic())
