"""The router's decisions, without sockets and clocks: messages and time go in, actions come out.

Whatever happens to the scatter, a request ends well as long as its combine worker lives: that worker compiles what does not
come. So nothing here waits for certainty; every wait has a deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypic.router import messages as m
from hypic.router.actions import Action, Broken, Forward, Prompt, Send, Settings
from hypic.router.costs import Costs
from hypic.router.health import Deadlines, Liveness
from hypic.router.schedule import Cluster, Flight, Placement, Policy, Segment, Worker, place

OTHER = (
    "another model, dtype, TP size, seam window or weights. If the others were given weights since their launch, "
    "give this worker the same ones: POST the same /update_weights* to its own address"
)
"""Why a worker with another identity is refused."""
TRIES = 2
"""Workers that are told to compile a segment before it is left to the combine worker."""


class _Connection:
    """A worker, as long as it is connected."""

    def __init__(self, peer: bytes, hello: m.Hello):
        self.peer, self.hello = peer, hello
        self.in_order = True
        """Announcements are complete; False between Resync and the first announcement after it."""


class _Request:
    def __init__(self, placement: Placement, prompts: Iterable[Prompt]):
        self.placement, self.combine = placement, placement.combine
        self.prompts = {p.key: p for p in prompts}
        self.awaited: dict[bytes, str] = {}
        """Artifacts that come from another worker, and which."""
        self.tries: Counter[bytes] = Counter()
        """Compiles ordered on its behalf."""
        self.forwarded = self.linked = False


class Coordinator:
    """State and decisions of one router.

    Args:
        costs: measured costs, for placement.
        identity: what all workers must agree on; b"" takes it from the first one, and again once none is left.
        name: of this run of the router, at random.
    """

    def __init__(
        self,
        costs: Costs,
        identity: bytes = b"",
        name: bytes = b"router",
        settings: Settings | None = None,
        policy: Policy = "lpt",
    ):
        self.cluster = Cluster(costs)
        self.identity, self._fixed, self.name, self.policy = identity, bool(identity), name, policy
        self.settings = settings or Settings()
        self.counts: Counter[str] = Counter()
        """Frames of strangers, stale hits, orders repeated, deadlines missed: for metrics."""
        self.on_lost: Callable[[str], Any] = lambda worker: None
        """Called with every worker that is not part of the cluster any more."""
        self._connections: dict[bytes, _Connection] = {}
        self._by_name: dict[str, _Connection] = {}
        self._relaxed = 0.0
        self._alive = Liveness(self.settings.dead_after)
        self._requests: dict[str, _Request] = {}
        self._deadlines: Deadlines[tuple[Any, ...]] = Deadlines()
        self._handlers: dict[type, Callable[[_Connection, Any, float], list[Action]]] = {
            m.Heartbeat: self._heartbeat,
            m.Stored: self._announced,
            m.Evicted: self._announced,
            m.Compiled: self._compiled,
            m.Expecting: self._expecting,
            m.Arrived: self._arrived,
            m.Bye: lambda connection, _, now: self._lost(connection.hello.worker, now),
        }

    # ------------------------------------------------------------------ what comes in

    def receive(self, peer: bytes, message: Any, now: float) -> list[Action]:
        """A message of the connection `peer`."""
        if isinstance(message, m.Hello):
            return self._hello(peer, message, now)
        connection = self._connections.get(peer)
        if connection is None:  # of a router before this one, or declared dead: it must introduce itself (again)
            self.counts["stranger"] += 1
            return [Send(peer, self._welcome())]
        self._alive.heard(connection.hello.worker, now)
        return self._handlers[type(message)](connection, message, now)

    def submit(
        self,
        request: str,
        prompts: list[Prompt],
        now: float,
        combine: str | None = None,
        prefix: Sequence[bytes] = (),
    ) -> list[Action]:
        """A request with these segments, in natural order.

        Args:
            combine: the worker that combines it, if that is decided already and it is alive.
            prefix: digests of its blocks (:mod:`hypic.router.prefixes`).

        Raises:
            NoWorkers: none is alive.
            ValueError: the id is taken.
        """
        if request in self._requests:
            raise ValueError(f"request {request} is known already")
        segments = [Segment(p.key, len(p.tokens) // 8, p.nbytes) for p in prompts]
        placement = place(self.cluster, segments, self.policy, combine, prefix)
        new = self.cluster.commit(request, placement, segments)
        self.cluster.prefixes.remember(placement.combine, prefix)
        state = self._requests[request] = _Request(placement, prompts)
        state.awaited = {k: s.worker for k, s in placement.sources.items() if s.worker != placement.combine}
        cold = {k for k, s in placement.sources.items() if s.role != "send"}
        out: list[Action] = []
        if state.awaited:
            wanted = tuple(self._wanted(state.prompts[k], w, k in cold) for k, w in state.awaited.items())
            expect = m.Expect(request=request, segments=wanted, deadline=self.settings.arrive_within)
            out.append(Send(self._by_name[placement.combine].peer, expect))
            self._deadlines.set(("expect", request), now + self.settings.expect_within)
        left = Counter(flight.worker for flight in new.values())
        for key, flight in new.items():
            state.tries[key] += 1
            left[flight.worker] -= 1
            out.append(self._order(flight, state.prompts[key], request, now, left[flight.worker]))
        return out if state.awaited else [*out, *self._forward(request, state)]

    def placement(self, request: str) -> Placement | None:
        """Where a request was placed that has not ended."""
        state = self._requests.get(request)
        return state.placement if state is not None else None

    def nbytes(self, request: str, key: bytes) -> int:
        """Size of the artifact of a segment of a request under way; 0 if unknown."""
        state = self._requests.get(request)
        prompt = state.prompts.get(key) if state is not None else None
        return prompt.nbytes if prompt is not None else 0

    def worker_of(self, peer: bytes) -> str:
        """The worker at the other end of a connection; "" if it has not introduced itself."""
        connection = self._connections.get(peer)
        return connection.hello.worker if connection is not None else ""

    def hellos(self) -> dict[str, m.Hello]:
        """How the workers that are alive introduced themselves, by name."""
        return {name: c.hello for name, c in sorted(self._by_name.items())}

    def disown(self, worker: str, now: float) -> list[Action]:
        """Its HTTP server does not answer: as good as silent. If it lives, it introduces itself again."""
        if worker not in self._by_name:
            return []
        self.counts["disowned"] += 1
        return self._lost(worker, now)

    def first_token(self, request: str) -> None:
        """Its prefill is over: the combine worker has room for the next."""
        state = self._requests.get(request)
        if state is not None and not state.linked:
            state.linked = True
            self.cluster.linked(state.combine)

    def end(self, request: str) -> None:
        """It was answered."""
        self._forget(request)

    def cancel(self, request: str) -> list[Action]:
        """Its client is gone."""
        state = self._forget(request)
        if state is None:
            return []
        workers = {state.combine, *(f.worker for k, f in self.cluster.flights.items() if k in state.prompts)}
        return [Send(self._by_name[w].peer, m.Cancel(request=request)) for w in sorted(workers) if w in self._by_name]

    def tick(self, now: float) -> list[Action]:
        """What time brings: the silent are dead, deadlines are missed. Call it several times a heartbeat."""
        out: list[Action] = []
        if now - self._relaxed >= 1.0:
            self._relaxed = now
            self.cluster.relax(now)
        for worker in self._alive.dead(now):
            self.counts["dead"] += 1
            out += self._lost(worker, now)
        for what, *rest in self._deadlines.missed(now):
            self.counts[f"{what}_deadline"] += 1
            if what == "expect":
                out += self._forward(rest[0], self._requests[rest[0]])
            else:
                key, number = rest
                out += self._failed(key, number, now)
        return out

    # ------------------------------------------------------------------ messages

    def _hello(self, peer: bytes, hello: m.Hello, now: float) -> list[Action]:
        before = self._by_name.get(hello.worker)
        if before is not None and before.hello.epoch == hello.epoch and before.hello.identity != hello.identity:
            self.counts["new_weights"] += 1  # nothing it held before is of use: it begins anew
            return [*self._lost(hello.worker, now), *self._hello(peer, hello, now)]
        self.identity = self.identity or hello.identity
        if hello.identity != self.identity:
            self.counts["other_identity"] += 1
            return [Send(peer, m.Refused(reason=OTHER))]
        if before is not None and before.hello.epoch != hello.epoch:
            self.counts["stranger"] += 1
            reason = f"the name {hello.worker} is in use; it is free once its owner is silent"
            return [Send(peer, m.Refused(reason=reason))]
        if before is not None:  # the same process over a new connection: what it announced in between may be lost
            del self._connections[before.peer]
            before.peer, before.in_order = peer, False
            self._connections[peer] = before
            self._alive.heard(hello.worker, now)
            self.cluster.directory.join(hello.worker, hello.epoch)
            return [Send(peer, self._welcome())]
        self._connections[peer] = self._by_name[hello.worker] = _Connection(peer, hello)
        self._alive.heard(hello.worker, now)
        worker = Worker(hello.worker, capacity=hello.capacity, tokens_per_s=hello.tokens_per_s)
        self.cluster.workers[hello.worker] = worker
        self.cluster.directory.join(hello.worker, hello.epoch)
        return [Send(peer, self._welcome())]

    def _heartbeat(self, connection: _Connection, beat: m.Heartbeat, _: float) -> list[Action]:
        worker = self.cluster.workers[connection.hello.worker]
        worker.tokens_per_s = worker.tokens_per_s or beat.tokens_per_s
        return []

    def _announced(self, connection: _Connection, message: m.Stored | m.Evicted, _: float) -> list[Action]:
        directory, hello = self.cluster.directory, connection.hello
        if not connection.in_order and message.seq != 1:
            return []  # on its way when Resync was sent
        if isinstance(message, m.Stored):
            good = directory.stored(hello.worker, hello.epoch, message.seq, message.keys, message.nbytes)
        else:
            good = directory.evicted(hello.worker, hello.epoch, message.seq, message.keys)
        connection.in_order = good
        if good:
            return []
        self.counts["resync"] += 1
        directory.join(hello.worker, hello.epoch)
        return [Send(connection.peer, m.Resync())]

    def _compiled(self, connection: _Connection, done: m.Compiled, now: float) -> list[Action]:
        flight = self.cluster.flights.get(done.key)
        if flight is None or flight.number != done.flight or flight.worker != connection.hello.worker:
            return []  # an echo, or too late
        if not done.ok:
            self.counts["compile_failed"] += 1
            return self._failed(done.key, done.flight, now)
        self._landed(done.key, done.flight, done.seconds, now)
        return []

    def _expecting(self, connection: _Connection, answer: m.Expecting, _: float) -> list[Action]:
        state = self._requests.get(answer.request)
        if state is None or state.combine != connection.hello.worker:
            return []
        for key in (*answer.held, *answer.refused):
            state.awaited.pop(key, None)
        return self._forward(answer.request, state)

    def _arrived(self, connection: _Connection, arrived: m.Arrived, _: float) -> list[Action]:
        state = self._requests.get(arrived.request)
        if state is None or state.combine != connection.hello.worker:
            return []
        source = state.awaited.pop(arrived.key, None)
        if source is not None and not arrived.ok:
            self.counts["stale_hit"] += 1
            self.cluster.directory.disprove(source, arrived.key)
        return []

    # ------------------------------------------------------------------ faults

    def _failed(self, key: bytes, number: int, now: float) -> list[Action]:
        """A flight ended without an artifact."""
        flight = self._landed(key, number)
        return self._replace(key, flight, now) if flight is not None else []

    def _lost(self, worker: str, now: float) -> list[Action]:
        connection = self._by_name.pop(worker)
        del self._connections[connection.peer]
        self._alive.forget(worker)
        orphans = self.cluster.lost(worker)
        self.on_lost(worker)
        if not self._by_name and not self._fixed:
            self.identity = b""
        for key, flight in orphans.items():
            self._deadlines.met(("compile", key, flight.number))
        out: list[Action] = []
        for request in [r for r, s in self._requests.items() if s.combine == worker]:
            self._forget(request)
            out.append(Broken(request, worker))
        for key, flight in orphans.items():
            flight.requests &= self._requests.keys()
            out += self._replace(key, flight, now)
        for request, state in self._requests.items():
            for key in [k for k, w in state.awaited.items() if w == worker]:
                out += self._reroute(request, state, key, now)
        return out

    def _replace(self, key: bytes, flight: Flight, now: float) -> list[Action]:
        """Who waited for this flight gets another source."""
        out: list[Action] = []
        for request in sorted(flight.requests & self._requests.keys()):
            state = self._requests[request]
            if state.awaited.get(key) == flight.worker:
                out += self._reroute(request, state, key, now)
        return out

    def _reroute(self, request: str, state: _Request, key: bytes, now: float) -> list[Action]:
        """Another source for an awaited artifact: a holder, a flight, a new flight, or the combine worker itself."""
        failed, prompt, out = state.awaited.pop(key), state.prompts[key], []
        others = sorted(self.cluster.workers.keys() - {failed, state.combine})
        able = [w for w in others if not self.cluster.workers[w].drained]
        source = next((w for w in others if self.cluster.directory.holds(w, key)), None)
        if source is None and (flight := self.cluster.flights.get(key)) is not None and flight.worker in others:
            source = flight.worker
            flight.requests.add(request)
        elif source is None and flight is None and able and state.tries[key] < TRIES:
            self.counts["ordered_again"] += 1
            state.tries[key] += 1
            source = min(able, key=lambda w: (self.cluster.ready_seconds(self.cluster.workers[w]), w))
            flight = self.cluster.order(key, source, len(prompt.tokens) // 8, {request})
            out.append(self._order(flight, prompt, request, now))
        address, public_key = "", b""
        if source is not None:
            state.awaited[key], hello = source, self._by_name[source].hello
            address, public_key = hello.data, hello.public_key
        reroute = m.Reroute(
            request=request, key=key, source=source or state.combine, address=address, public_key=public_key
        )
        return [*out, Send(self._by_name[state.combine].peer, reroute)]

    # ------------------------------------------------------------------ helpers

    def _welcome(self) -> m.Welcome:
        return m.Welcome(router=self.name, heartbeat=self.settings.heartbeat, dead_after=self.settings.dead_after)

    def _wanted(self, p: Prompt, source: str, cold: bool) -> m.Wanted:
        hello = self._by_name[source].hello
        return m.Wanted(p.key, p.tenant, p.adapter, p.tokens, source, hello.data, cold, hello.public_key, p.method)

    def _order(self, flight: Flight, p: Prompt, request: str, now: float, more: int = 0) -> Send:
        self._deadlines.set(("compile", p.key, flight.number), now + self.settings.compile_within)
        compile_ = m.Compile(
            flight=flight.number,
            request=request,
            key=p.key,
            tenant=p.tenant,
            adapter=p.adapter,
            tokens=p.tokens,
            deadline=self.settings.compile_within,
            more=more,
            method=p.method,
        )
        return Send(self._by_name[flight.worker].peer, compile_)

    def _landed(self, key: bytes, number: int, seconds: float = 0.0, now: float = 0.0) -> Flight | None:
        self._deadlines.met(("compile", key, number))
        return self.cluster.landed(key, number, seconds, now)

    def _forward(self, request: str, state: _Request) -> list[Action]:
        self._deadlines.met(("expect", request))
        if state.forwarded:
            return []
        state.forwarded = True
        return [Forward(request, state.combine, self._by_name[state.combine].hello.http)]

    def _forget(self, request: str) -> _Request | None:
        self.first_token(request)
        state = self._requests.pop(request, None)
        if state is not None:
            self.cluster.ended(state.combine)
            self._deadlines.met(("expect", request))
            for key in state.prompts:
                if (flight := self.cluster.flights.get(key)) is not None:
                    flight.requests.discard(request)
        return state
