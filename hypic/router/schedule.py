"""Placement: which worker combines a request, and who compiles or sends each of its segments.

Functions over one :class:`Cluster`, the load view that all requests share: no clock, no sockets, no chance. The router and
the simulation run this same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from hypic.router.costs import Costs
from hypic.router.directory import Directory
from hypic.router.prefixes import Prefixes
from hypic.router.rate import Rate

Policy = Literal["lpt", "round_robin"]
Role = Literal["here", "send", "join", "compile"]
"""How the combine worker comes by a segment's artifact.

here: it holds it. send: a holder sends it. join: another request's compile is under way, whose worker sends it too.
compile: it is compiled for this request.
"""

DRIFT = 0.25
STALE = 15.0
"""Seconds without a measurement after which a worker's speed begins to be taken for that of the others: one that was slow once
would not be given work again, and so never be seen to be as fast as they are."""
CROWD = 4
"""A worker that answers more than twice as many requests as the idlest, and this many more, gets no other for its prefix: or all
that begin alike would decode in one place."""
NOISE = 0.15
"""Measured speeds that are no further from the median are taken for it: they scatter by that much where workers are equal, and
LPT would have one that was slow by chance idle at the end."""
LEAST_GAIN = 0.05
"""Scattering must promise to save this share of the time, or the request stays on one worker."""


class Segment(NamedTuple):
    """A segment of a request, as placement sees it."""

    key: bytes
    tokens: int
    nbytes: int


class Worker(msgspec.Struct):
    """The load view of one worker.

    Attributes:
        queued_tokens: tokens of compiles that it was given and has not finished.
        linking: requests that it combines at present, up to their first token.
        running: requests that it was given and has not answered in full; decides between workers that are equally soon.
        capacity: bytes of its arena.
        tokens_per_s: measured compile speed; 0 while unknown.
    """

    name: str
    capacity: int = 2**62
    queued_tokens: int = 0
    linking: int = 0
    running: int = 0
    tokens_per_s: float = 0.0

    speed: Rate = msgspec.field(default_factory=Rate)
    measured_at: float = 0.0
    """When a compile was measured last."""
    drained: bool = False
    """It gets nothing new: neither requests nor compiles. What it holds it still sends."""

    def measured(self, tokens: int, seconds: float, now: float) -> None:
        """A compile of `tokens` took `seconds` of the worker's time, and ended at `now`."""
        if tokens > 0 and seconds > 0:
            self.speed.rate = self.tokens_per_s
            self.speed.add(tokens, seconds)
            self.tokens_per_s, self.measured_at = self.speed.rate, now


class Flight(msgspec.Struct):
    """A compile that was ordered: one for each key in the whole cluster, whoever waits for it."""

    number: int
    worker: str
    tokens: int
    requests: set[str]


class Source(NamedTuple):
    role: Role
    worker: str


class Placement(NamedTuple):
    """Attributes:
    combine: the worker that links, decodes and streams.
    sources: for each distinct segment, who provides its artifact.
    scattered: whether any worker but the combine worker compiles for it.
    seconds: until the last artifact is there, as reckoned.
    """

    combine: str
    sources: dict[bytes, Source]
    scattered: bool
    seconds: float


class NoWorkers(RuntimeError):
    """No worker is alive, or all that are have been drained."""


class Cluster:
    """Workers alive, who holds what, and compiles under way."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.workers: dict[str, Worker] = {}
        self.directory = Directory()
        self.prefixes = Prefixes()
        self.flights: dict[bytes, Flight] = {}
        self.turn = 0
        """Round robin's position."""
        self._numbers = 0

    def available(self) -> dict[str, Worker]:
        """Workers that may get something new."""
        return {name: w for name, w in self.workers.items() if not w.drained}

    def ready_seconds(self, worker: Worker) -> float:
        """When the worker has done what it was given."""
        queue = self.costs.compile_seconds(worker.queued_tokens, self.speed(worker))
        return queue + worker.linking * self.costs.link_s

    def speed(self, worker: Worker) -> float:
        """Tokens per second to reckon with. A worker that has not been measured is as the others are."""
        known, usual = worker.tokens_per_s, self.usual_speed
        return known if known and abs(known - usual) > NOISE * usual else usual

    @property
    def usual_speed(self) -> float:
        """The median; what the costs say while none is known."""
        known = sorted(w.tokens_per_s for w in self.workers.values() if w.tokens_per_s)
        return known[len(known) // 2] if known else self.costs.tokens_per_s

    # ------------------------------------------------------------------ changes

    def commit(self, request: str, placement: Placement, segments: Iterable[Segment]) -> dict[bytes, Flight]:
        """Enter a placement into the load view. Returns the flights that are new: those to order."""
        self.workers[placement.combine].linking += 1
        self.workers[placement.combine].running += 1
        new = {}
        tokens = {s.key: s.tokens for s in segments}
        for key, (role, worker) in placement.sources.items():
            if role == "join":
                self.flights[key].requests.add(request)
            elif role == "compile":
                new[key] = self.order(key, worker, tokens[key], {request})
        return new

    def order(self, key: bytes, worker: str, tokens: int, requests: set[str]) -> Flight:
        """Open a flight. Raises KeyError if the worker is not alive, ValueError if the key is in flight already."""
        if key in self.flights:
            raise ValueError(f"{key.hex()[:16]} is in flight already")
        self.workers[worker].queued_tokens += tokens
        self._numbers += 1
        self.flights[key] = flight = Flight(self._numbers, worker, tokens, requests)
        return flight

    def landed(self, key: bytes, number: int, seconds: float = 0.0, now: float = 0.0) -> Flight | None:
        """The flight is over, well or not (then `seconds` is 0). None if it is not the one that is known: an echo."""
        flight = self.flights.get(key)
        if flight is None or flight.number != number:
            return None
        del self.flights[key]
        if (worker := self.workers.get(flight.worker)) is not None:
            worker.queued_tokens -= flight.tokens
            worker.measured(flight.tokens, seconds, now)
        return flight

    def relax(self, now: float) -> None:
        """Speeds that were measured long ago drift to the median of all. Call it about once a second."""
        usual = self.usual_speed
        for worker in self.workers.values():
            if worker.measured_at and now - worker.measured_at > STALE:
                worker.tokens_per_s += DRIFT * (usual - worker.tokens_per_s)

    def linked(self, combine: str) -> None:
        """A request that `combine` was given has its first token, or is gone."""
        if (worker := self.workers.get(combine)) is not None and worker.linking:
            worker.linking -= 1

    def ended(self, combine: str) -> None:
        """A request that `combine` was given is answered, or gone."""
        if (worker := self.workers.get(combine)) is not None and worker.running:
            worker.running -= 1

    def lost(self, worker: str) -> dict[bytes, Flight]:
        """The worker is dead. Returns its flights, now closed: to be ordered elsewhere."""
        self.workers.pop(worker, None)
        self.directory.leave(worker)
        self.prefixes.leave(worker)
        orphans = {k: f for k, f in self.flights.items() if f.worker == worker}
        for key in orphans:
            del self.flights[key]
        return orphans


# ---------------------------------------------------------------------- assignment


def lpt(
    jobs: Mapping[bytes, float], ready: Mapping[str, float], speed: Mapping[str, float] | None = None
) -> dict[bytes, str]:
    """Longest processing time first: each job, longest first, to the worker that would finish it earliest.

    Args:
        jobs: work of each job.
        ready: seconds until each worker is free.
        speed: work per second of each worker; 1 if not given.
    """
    finish = dict(ready)
    out = {}
    for key in sorted(jobs, key=lambda k: (-jobs[k], k)):
        at = {w: t + jobs[key] / (speed[w] if speed else 1.0) for w, t in finish.items()}
        worker = min(at, key=lambda w: (at[w], w))
        out[key], finish[worker] = worker, at[worker]
    return out


def round_robin(jobs: Mapping[bytes, float], workers: Sequence[str], turn: int = 0) -> dict[bytes, str]:
    """Each job, in order, to the next worker: what LPT is compared with."""
    return {key: workers[(turn + i) % len(workers)] for i, key in enumerate(jobs)}


def makespan(jobs: Mapping[bytes, float], assigned: Mapping[bytes, str], ready: Mapping[str, float]) -> float:
    """When the last worker that has a job is done (at speed 1)."""
    finish = dict(ready)
    for key, worker in assigned.items():
        finish[worker] += jobs[key]
    return max((finish[w] for w in set(assigned.values())), default=0.0)


def lower_bound(jobs: Iterable[float], workers: int) -> float:
    """No schedule on that many idle, equal workers is shorter: the mean, the longest job, and pairs that must share one."""
    longest = sorted(jobs, reverse=True)
    pair = longest[workers - 1] + longest[workers] if len(longest) > workers else 0.0
    return max(sum(longest) / workers, longest[0] if longest else 0.0, pair)


def place(
    cluster: Cluster,
    segments: Sequence[Segment],
    policy: Policy = "lpt",
    combine: str | None = None,
    prefix: Sequence[bytes] = (),
) -> Placement:
    """Who combines and who provides what. Changes nothing but round robin's position; `Cluster.commit` does.

    Args:
        combine: the worker that combines, if that is decided already and it is alive.
        prefix: digests of the prompt's blocks (:mod:`hypic.router.prefixes`).

    Raises:
        NoWorkers: none is alive, or all are drained.
    """
    if not cluster.available():
        raise NoWorkers(
            "all workers are drained; resume one by POST /workers"
            if cluster.workers
            else "no worker is alive; GET /workers shows what the router knows"
        )
    distinct = {s.key: s for s in segments}
    if combine not in cluster.workers:
        combine = _combine_worker(cluster, list(distinct.values()), prefix)
    assert combine is not None
    sources: dict[bytes, Source] = {}
    missing: dict[bytes, Segment] = {}
    incoming = 0
    for key, s in distinct.items():
        holders = cluster.directory.holders(key) & cluster.workers.keys()
        if combine in holders:
            sources[key] = Source("here", combine)
        elif holders:
            sources[key] = Source("send", min(holders, key=lambda w: (cluster.ready_seconds(cluster.workers[w]), w)))
            incoming += s.nbytes
        elif key in cluster.flights:
            sources[key] = Source("join", cluster.flights[key].worker)
        else:
            missing[key] = s
    assigned, seconds = _assign(cluster, missing, combine, policy)
    sources |= {key: Source("compile", worker) for key, worker in assigned.items()}
    seconds = max(seconds, cluster.costs.transfer_seconds(incoming))
    return Placement(combine, sources, any(w != combine for w in assigned.values()), seconds)


def _combine_worker(cluster: Cluster, segments: Sequence[Segment], prefix: Sequence[bytes]) -> str:
    """The one that would have everything soonest: by what it must wait for first, what it lacks, what it need not compute as
    it has seen the prompt's beginning, and whether it fits."""
    need = sum(s.nbytes for s in segments)
    seen, available = cluster.prefixes.tokens(prefix), cluster.available()
    crowded = 2 * min(w.running for w in available.values()) + CROWD

    def cost(worker: Worker) -> tuple[bool, float, int, str]:
        held = sum(s.nbytes for s in segments if cluster.directory.holds(worker.name, s.key))
        seconds = cluster.ready_seconds(worker) + cluster.costs.transfer_seconds(need - held)
        if worker.running <= crowded:
            seconds -= seen.get(worker.name, 0) / cluster.usual_speed
        return need > worker.capacity, seconds, worker.running, worker.name

    return min(available.values(), key=cost).name


def _assign(
    cluster: Cluster, missing: Mapping[bytes, Segment], combine: str, policy: Policy
) -> tuple[dict[bytes, str], float]:
    """Who compiles what, and when the last artifact is at the combine worker."""
    costs, workers = cluster.costs, cluster.available() | {combine: cluster.workers[combine]}
    alone = dict.fromkeys(missing, combine)
    if not missing:
        return alone, 0.0
    jobs = {key: float(s.tokens) for key, s in missing.items()}
    if policy == "round_robin":
        names = sorted(workers)
        spread = round_robin(jobs, names, cluster.turn)
        cluster.turn = (cluster.turn + len(jobs)) % len(names)
        return spread, _reckon(cluster, missing, spread, combine)
    others = sorted((cluster.ready_seconds(w), name) for name, w in workers.items() if name != combine)
    best, local = alone, _reckon(cluster, missing, alone, combine)
    seconds, margin = local, LEAST_GAIN * (local + costs.link_seconds(len(missing), 0))
    for n in _sizes(min(len(others), len(missing))):
        team = [(cluster.ready_seconds(workers[combine]), combine), *others[:n]]
        ready = {name: t + (0.0 if name == combine else costs.message_s) for t, name in team}
        speed = {name: cluster.speed(workers[name]) for _, name in team}
        for name in speed.keys() - {combine}:
            speed[name] = min(speed[name], _pipe_tokens_per_s(costs, missing.values()) / n)
        spread = lpt(jobs, ready, speed)
        if (scattered := _reckon(cluster, missing, spread, combine)) < seconds and scattered < local - margin:
            best, seconds = spread, scattered
    return best, seconds


def _sizes(most: int) -> list[int]:
    """How many workers to try beside the combine worker. More is not always sooner: passes get too small to fill a worker,
    and all artifacts go through one pipe."""
    return sorted({*range(1, min(most, 8) + 1), *(n for n in (12, 16, 24, 32, 48, 64) if n < most), most} - {0})


def _pipe_tokens_per_s(costs: Costs, segments: Iterable[Segment]) -> float:
    """Tokens whose artifacts the combine worker can receive in a second."""
    tokens, nbytes = (sum(n) for n in zip(*((s.tokens, s.nbytes) for s in segments), strict=True))
    return tokens / costs.transfer_seconds(nbytes) if nbytes else float("inf")


def _reckon(cluster: Cluster, missing: Mapping[bytes, Segment], assigned: Mapping[bytes, str], combine: str) -> float:
    """When the combine worker has all of `missing`: its own compiles, and what others send, which comes at the end of each of
    their passes and goes through one pipe, first come first served."""
    costs, own, pipe = cluster.costs, 0.0, 0.0
    coming: list[tuple[float, float]] = []
    for name in set(assigned.values()):
        mine = [missing[k] for k, w in assigned.items() if w == name]
        worker = cluster.workers[name]
        busy, tokens = cluster.ready_seconds(worker), sum(s.tokens for s in mine)
        if name == combine:
            own = busy + costs.compile_seconds(tokens, cluster.speed(worker))
            continue
        seconds = costs.transfer_seconds(sum(s.nbytes for s in mine))
        step = max(costs.forward_tokens, min(s.tokens for s in mine))
        for begin in range(0, tokens, step):
            end = min(begin + step, tokens)
            ready = busy + costs.compile_seconds(end, cluster.speed(worker)) + 2 * costs.message_s
            coming.append((ready, seconds * (end - begin) / tokens))
    for ready, seconds in sorted(coming):
        pipe = max(pipe, ready) + seconds
    return max(own, pipe)
