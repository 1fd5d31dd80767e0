"""A discrete-event simulation of a cluster: the router's own placement, and measured costs in place of engines.

Each worker runs one forward pass at a time, filled with what waits (as SGLang's chunked prefill does); artifacts go to the
combine worker over its one incoming pipe, first come first served; the link is a pass of the combine worker.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hypic.router.costs import Costs
from hypic.router.schedule import Cluster, Placement, Policy, Segment, Worker, place


class Request(NamedTuple):
    """A prompt: when it comes, the tokens of its (distinct, cold) segments, its plain tokens."""

    segments: tuple[int, ...]
    plain_tokens: int = 96
    arrival: float = 0.0


class Bar(NamedTuple):
    """A bar of the Gantt chart."""

    kind: str
    worker: str
    segment: int
    start: float
    end: float


class Outcome(NamedTuple):
    """What became of one request. The five terms add up to the time to first token.

    Attributes:
        ttft: seconds to the first token.
        messages: from arrival until the first worker begins, and the first token's way back.
        waiting: for forward passes of other requests.
        compile: from the first pass until the last artifact is compiled.
        transfer: from then until it is at the combine worker: what of the transfers is not hidden behind compiles.
        link: the combine worker's pass.
        bound: what bounds it: "link", "transfer", "messages", "waiting", or which kind of compile: "longest segment" (one
            worker has nothing else), "forward floor" (passes too small to fill a worker), "compute" (more workers help).
        ideal: T_compile / N + T_link.
        bars: the Gantt chart.
    """

    ttft: float
    messages: float
    waiting: float
    compile: float
    transfer: float
    link: float
    bound: str
    ideal: float
    placement: Placement
    bars: tuple[Bar, ...]


class _Job:
    __slots__ = ("begun", "done", "end", "left", "number", "request", "start", "tokens", "worker")

    def __init__(self, request: int, number: int, tokens: int, worker: str):
        self.request, self.number, self.tokens, self.worker = request, number, tokens, worker
        self.left = tokens
        self.begun = self.done = False
        self.start = self.end = 0.0


class _Engine:
    """One worker: passes one after the other."""

    def __init__(self, name: str):
        self.name, self.busy = name, False
        self.compiles: deque[_Job] = deque()
        self.links: deque[int] = deque()
        self.pipe_free = 0.0


class _Running:
    """A request on its way."""

    def __init__(self, request: Request, placement: Placement):
        self.request, self.placement = request, placement
        self.missing = len(request.segments)
        self.jobs: list[_Job] = []
        self.bars: list[Bar] = []
        self.arrived = self.link_start = self.link_end = 0.0


class Simulation:
    """One run. Use :func:`simulate`."""

    def __init__(self, costs: Costs, workers: int, policy: Policy):
        self.costs, self.policy = costs, policy
        self.cluster = Cluster(costs)
        width = len(str(workers - 1))
        for i in range(workers):
            name = f"w{i:0{width}}"
            self.cluster.workers[name] = Worker(name)
        self.engines = {name: _Engine(name) for name in self.cluster.workers}
        self.requests: dict[int, _Running] = {}
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, time: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._serial), do))

    def run(self) -> None:
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()

    def arrive(self, number: int, request: Request) -> None:
        segments = [
            Segment(b"%d/%d" % (number, i), n, self.costs.artifact_nbytes(n)) for i, n in enumerate(request.segments)
        ]
        placement = place(self.cluster, segments, self.policy)
        running = self.requests[number] = _Running(request, placement)
        flights = self.cluster.commit(str(number), placement, segments)
        for i, segment in enumerate(segments):
            job = _Job(number, i, segment.tokens, flights[segment.key].worker)
            running.jobs.append(job)
            self.at(self.now + self.costs.message_s, lambda job=job: self._queue(job))  # type: ignore[misc]
        if not segments:
            self.at(self.now + self.costs.message_s, lambda: self._ready(number))

    def _queue(self, job: _Job) -> None:
        engine = self.engines[job.worker]
        engine.compiles.append(job)
        # After all messages of this instant, so that the first pass is as full as it would be.
        self.at(self.now, lambda: self._pass(engine))

    def _pass(self, engine: _Engine) -> None:
        """Begin the next forward pass: a link that is ready goes first, as its client has waited longest."""
        if engine.busy:
            return
        if engine.links:
            number = engine.links.popleft()
            running = self.requests[number]
            engine.busy, running.link_start = True, self.now
            r = running.request
            running.link_end = self.now + self.costs.link_seconds(len(r.segments), r.plain_tokens)
            self.at(running.link_end, lambda: self._linked(engine, running))
            return
        room, jobs = self.costs.forward_tokens, []
        while engine.compiles and room:
            job = engine.compiles[0]
            if not job.begun:
                job.begun, job.start = True, self.now
            part = min(room, job.left)
            job.left, room = job.left - part, room - part
            if not job.left:
                jobs.append(engine.compiles.popleft())
        tokens = self.costs.forward_tokens - room
        if not tokens:
            return
        engine.busy = True
        self.at(self.now + self.costs.forward_seconds(tokens), lambda: self._compiled(engine, jobs))

    def _compiled(self, engine: _Engine, jobs: Sequence[_Job]) -> None:
        engine.busy = False
        for job in jobs:
            job.done, job.end = True, self.now
            running = self.requests[job.request]
            running.bars.append(Bar("compile", engine.name, job.number, job.start, self.now))
            key = b"%d/%d" % (job.request, job.number)
            self.cluster.landed(key, self.cluster.flights[key].number)
            combine = self.engines[running.placement.combine]
            if engine is combine:
                self._arrived(job.request)
                continue
            start = max(self.now + self.costs.message_s, combine.pipe_free)
            combine.pipe_free = start + self.costs.transfer_seconds(self.costs.artifact_nbytes(job.tokens))
            running.bars.append(Bar("transfer", combine.name, job.number, start, combine.pipe_free))
            self.at(combine.pipe_free, lambda n=job.request: self._arrived(n))  # type: ignore[misc]
        self._pass(engine)

    def _arrived(self, number: int) -> None:
        running = self.requests[number]
        running.missing -= 1
        if not running.missing:
            self._ready(number)

    def _ready(self, number: int) -> None:
        running = self.requests[number]
        running.arrived = self.now
        engine = self.engines[running.placement.combine]
        engine.links.append(number)
        self._pass(engine)

    def _linked(self, engine: _Engine, running: _Running) -> None:
        engine.busy = False
        self.cluster.linked(engine.name)
        self.cluster.ended(engine.name)
        running.bars.append(Bar("link", engine.name, -1, running.link_start, running.link_end))
        self._pass(engine)


def simulate(costs: Costs, workers: int, requests: Sequence[Request], policy: Policy = "lpt") -> list[Outcome]:
    """What `workers` equal workers make of `requests`, in their order."""
    sim = Simulation(costs, workers, policy)
    for number, request in enumerate(requests):
        sim.at(request.arrival, lambda n=number, r=request: sim.arrive(n, r))  # type: ignore[misc]
    sim.run()
    return [_outcome(costs, workers, sim.requests[n]) for n in range(len(requests))]


def _outcome(costs: Costs, workers: int, running: _Running) -> Outcome:
    request, jobs = running.request, running.jobs
    ttft = running.link_end + costs.message_s - request.arrival
    link = running.link_end - running.link_start
    first = min((j.start for j in jobs), default=running.arrived)
    compiled = max((j.end for j in jobs), default=running.arrived)
    sent = request.arrival + costs.message_s
    terms = {
        "messages": 2 * costs.message_s,
        "waiting": (first - sent) + (running.link_start - running.arrived),
        "compile": compiled - first,
        "transfer": running.arrived - compiled,
        "link": link,
    }
    bound = max(terms, key=lambda t: terms[t])
    if bound == "compile":
        last = max(jobs, key=lambda j: j.end)
        alone = [j for j in jobs if j.worker == last.worker]
        tokens = sum(j.tokens for j in alone)
        if costs.forward_seconds(min(tokens, costs.forward_tokens)) > tokens / costs.tokens_per_s:
            bound = "forward floor"
        else:
            bound = "longest segment" if len(alone) == 1 and workers > 1 else "compute"
    ideal = costs.compile_seconds(sum(request.segments)) / workers + link
    bars = tuple(sorted(running.bars, key=lambda b: (b.start, b.end, b.segment)))
    return Outcome(ttft, **terms, bound=bound, ideal=ideal, placement=running.placement, bars=bars)


def read_segments(text: str) -> tuple[int, ...]:
    """``"8192,10x512"`` -> one segment of 8192 tokens and ten of 512. Raises ValueError."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*", part)
        if not match or not int(match[2]) or match[1] == "0":
            raise ValueError(f"{part!r}: write for example 16x2048, or 8192,10x512")
        out += [int(match[2])] * int(match[1] or 1)
    return tuple(out)
