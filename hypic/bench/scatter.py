"""Cold prompts on 1 to N workers behind a router: what segment parallelism gives, and what it is made of.

TTFT is from sending the request to the endpoint until its first chunk, on a connection of its own; the rest comes from the
timeline in its report. Each repetition has documents that no worker has seen. Stock SGLang gets prompts of the same shapes over
HTTP, too, on one GPU and, if that is asked for, on several (TP).
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from hypic.bench.scatter_result import Agreement, Sample, Scatter, ScatterResult, ScatterRun, StockRun
from hypic.bench.workload import Prompts, Workload
from hypic.router.costs import Costs
from hypic.router.launch.running import running
from hypic.router.launch.stock import stock_servers
from hypic.router.launch.supervisor import get_json

POLICIES = ("lpt", "round_robin")
WORKLOADS = ("equal", "uneven")
SHORT, SHORT_TOKENS = "short", 64
"""A workload of one segment, the shortest that is cached: what a forward pass and a link take at least."""
_UNEVEN = (0.25, 0.5, 0.75, 1.0)
"""Lengths of all segments but the first, as shares of the workload's; the first has four times that."""
_WARM_UP = (3, 2)
"""Prompts before those that count, for the first case of a number of workers and for others: rates get measured."""
_FEW = 3
"""Repetitions at most of all lengths but the first."""
_UNTOLD = 3
"""Prompts at most for one sample."""
_FAILURES = 3
"""So many cases that fail end it."""
_STOCK_SHARE = 0.2
"""Of what is left of the budget, kept for each stock engine."""
NO_ALLREDUCE_FUSION = "--enforce-disable-flashinfer-allreduce-fusion"
"""SGLang switches that on for TP; what FlashInfer makes for it may use NVLink multicast, which can put a shared host's GPUs out
of service."""


class Case(NamedTuple):
    """One line of the table."""

    segments: int
    workload: str
    policy: str
    workers: int


def lengths(work: Workload, name: str) -> list[int]:
    """Tokens of each segment of a workload."""
    if name == SHORT:
        return [SHORT_TOKENS]
    if name == "equal":
        return [work.segment_tokens] * work.segments
    rest = [int(work.segment_tokens * _UNEVEN[i % len(_UNEVEN)]) for i in range(work.segments - 1)]
    return [4 * work.segment_tokens, *rest]


def cases(work: Workload, plan: Scatter) -> Iterator[Case]:
    """What is timed on the cluster, the most important first, as time may run out."""
    for policy in POLICIES:
        for workload in WORKLOADS:
            for count in plan.counts or (work.segments,):
                for n in sorted(set(plan.workers)):
                    if n > 1 or policy == POLICIES[0]:
                        yield Case(count, workload, policy, n)
                if (policy, workload) == (POLICIES[0], WORKLOADS[0]) and count == (plan.counts or (work.segments,))[0]:
                    yield Case(1, SHORT, policy, 1)


class Bench:
    """Fills a ScatterResult.

    Args:
        vocab: token ids are below it.
        say: gets lines of progress. keep: is called whenever there is more in `result`.
    """

    def __init__(
        self,
        work: Workload,
        plan: Scatter,
        vocab: int,
        say: Callable[[str], None] = print,
        keep: Callable[[ScatterResult], None] = lambda _: None,
    ) -> None:
        self.work, self.plan, self.result = work, plan, ScatterResult()
        self._prompts = Prompts(work, vocab)  # one stream of tokens: no document comes twice
        self._say, self._keep = say, keep
        self._seen: set[int] = set()

    def cluster(self, url: str, deadline: float = float("inf")) -> None:
        """Time all cases on a running cluster of the largest number of workers; for smaller ones the others are drained.

        Args:
            deadline: `time.monotonic()` after which no case begins.
        """
        failures = 0
        try:
            for case in cases(self.work, self.plan):
                what = f"{case.segments} {case.workload}, {case.policy}, {case.workers} workers"
                if time.monotonic() > deadline:
                    self.result.left_out.append(f"no time for {what}")
                    continue
                try:
                    drain(url, self.plan, case.workers, case.policy)
                    run = self._case(url, case)
                except (RuntimeError, OSError, ValueError) as e:
                    if (failures := failures + 1) == _FAILURES:
                        raise
                    self.failed(what, e)
                    continue
                self.result.runs.append(run)
                self._say(f"{what}: {run.median('ttft'):.1f} ms")
                self._keep(self.result)
        finally:
            if (told := get_json(f"{url}/workers")) is not None:
                self.result.costs = msgspec.convert(told["costs"], Costs)
                self._keep(self.result)
        drain(url, self.plan, max(self.plan.workers), POLICIES[0])

    def stock(self, url: str, gpus: int, deadline: float = float("inf")) -> None:
        """Time the workloads on a running stock server."""
        for count in self.plan.counts or (self.work.segments,):
            for workload in WORKLOADS:
                if time.monotonic() > deadline:
                    self.result.left_out.append(f"no time for stock on {gpus} GPUs, {count} segments, {workload}")
                    continue
                sizes = self._sizes(count, workload)
                values = [ask(url, *self._draw(sizes), hypic=False).ttft for _ in range(1 + min(self.work.reps, _FEW))][
                    1:
                ]
                self.result.stock.append(run := StockRun(gpus=gpus, workload=workload, segments=sizes, values=values))
                self._say(f"{count} {workload}, stock on {gpus} GPUs: {run.median:.1f} ms")
                self._keep(self.result)

    def failed(self, what: str, why: object) -> None:
        self.result.left_out.append(f"{what}: {why}")
        self._say(f"scatter: {what}: {why}")
        self._keep(self.result)

    def _case(self, url: str, case: Case) -> ScatterRun:
        sizes = self._sizes(case.segments, case.workload)
        first_length = case.segments == (self.plan.counts or (self.work.segments,))[0]
        warm_up = _WARM_UP[case.workers in self._seen]
        self._seen.add(case.workers)
        reps = self.work.reps if first_length else min(self.work.reps, _FEW)
        samples = [self._sample(url, sizes) for _ in range(warm_up + reps)][warm_up:]
        return ScatterRun(
            workers=case.workers, policy=case.policy, workload=case.workload, segments=sizes, samples=samples
        )

    def _sample(self, url: str, sizes: Sequence[int]) -> Sample:
        """Of a cold prompt. One whose compile was so short that its worker had the router's order for it behind its end is not
        told when that was; another is asked then."""
        for _ in range(_UNTOLD):
            if (sample := ask(url, *self._draw(sizes))).compile > 0:
                break
        return sample

    def _sizes(self, count: int, workload: str) -> list[int]:
        return lengths(msgspec.structs.replace(self.work, segments=count), workload)

    def _draw(self, sizes: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        return self._prompts.prompt([self._prompts.tokens(size) for size in sizes])


def run_scatter(bench: Bench, argv: Sequence[str], cpu: bool, compare: Callable[[str], Agreement]) -> ScatterResult:
    """One cluster of the largest number of workers, then the stock engines, one after the other.

    Args:
        compare: asks a running cluster whether it answers as one worker does.

    Raises:
        LaunchError: the cluster did not come up. What fails later is in `left_out`.
    """
    plan = bench.plan
    end = time.monotonic() + (plan.budget if plan.budget else float("inf"))
    engines = [1] * plan.stock + [plan.tp] * bool(plan.tp)

    def share(n: int) -> float:
        """Seconds for what comes first, if `n` stock engines come behind it."""
        return (end - time.monotonic()) * (1 - _STOCK_SHARE * n)

    with running(argv, max(plan.workers), stagger=plan.stagger, start_seconds=min(share(len(engines)), 1800.0)) as url:
        time_all(bench, url, time.monotonic() + 0.9 * share(len(engines)), compare)
    for i, gpus in enumerate(engines):
        seconds = share(len(engines) - 1 - i)
        try:
            stock_alone(bench, argv, gpus, cpu, seconds)
        except (RuntimeError, OSError, ValueError) as e:
            bench.failed(f"stock on {gpus} GPUs", e)
    return bench.result


def time_all(bench: Bench, url: str, deadline: float, compare: Callable[[str], Agreement]) -> None:
    """What is to be had of a running cluster; what fails is named in `left_out`."""
    try:
        bench.cluster(url, deadline)
    except (RuntimeError, OSError, ValueError) as e:
        bench.failed("cluster", e)
    try:
        bench.result.agreement = compare(url)
    except (RuntimeError, OSError, ValueError) as e:
        bench.failed("agreement", e)


def stock_alone(bench: Bench, argv: Sequence[str], gpus: int, cpu: bool, seconds: float) -> None:
    """Start one stock server on `gpus` GPUs and time it. Raises LaunchError, RuntimeError, OSError."""
    deadline = time.monotonic() + seconds
    more = [NO_ALLREDUCE_FUSION] if gpus > 1 else []
    limits = {"tp": gpus, "start_seconds": min(seconds, 1800.0)}
    with stock_servers([*argv, *more], cpu=cpu, **limits) as (url,):  # type: ignore[arg-type]
        bench.stock(url, gpus, deadline)


def drain(url: str, plan: Scatter, workers: int, policy: str, patience: float = 30.0) -> None:
    """Have the first `workers` of the cluster alone take part.

    A worker whose kernels are being compiled may be silent for a while. Raises RuntimeError if one is for longer than `patience`.
    """
    names = [f"w{i}" for i in range(max(plan.workers))]
    what = {"resume": names[:workers], "drain": names[workers:], "policy": policy}
    request = urllib.request.Request(f"{url}/workers", json.dumps(what).encode(), method="POST")
    deadline = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                response.read()
            return
        except urllib.error.HTTPError as e:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{url}/workers: {e.code} {e.read()[:300]!r}") from None
        time.sleep(0.2)


def ask(url: str, ids: list[int], bounds: list[list[int]], hypic: bool = True) -> Sample:
    """One cold prompt; without `hypic` a Sample has nothing but its TTFT."""
    body: dict[str, Any] = {
        "input_ids": ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    }
    if hypic:
        body["hypic"] = {"segments": bounds, "report": True}
    payload = json.dumps(body)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    try:
        began = time.perf_counter()
        connection.request("POST", "/generate", payload, {"content-type": "application/json"})
        response = connection.getresponse()
        line = response.readline()
        ttft = 1e3 * (time.perf_counter() - began)
        rest = response.read()
    finally:
        connection.close()
    chunks = [json.loads(x[6:]) for x in (line + rest).split(b"\n\n") if x.startswith(b"data: {")]
    if not chunks or "error" in chunks[-1]:
        raise RuntimeError(f"{url} answered {(line + rest)[:500]!r}")
    if not hypic:
        return Sample(ttft=ttft, forwarded=0, compile=0, exposed=0, link=0, workers=0, timeline={})
    report = chunks[-1]["meta_info"].get("hypic")
    if not report:
        raise RuntimeError(f"{url} answered without a report: caching is off, its log says why")
    return _sample(ttft, report["router"]["timeline"])


def _sample(ttft: float, timeline: dict[str, Any]) -> Sample:
    lines = timeline["segments"]
    begun = [x["begun"] for x in lines if x["begun"] is not None]
    done = [x["done"] for x in lines if x["done"] is not None]
    arrived = [x["arrived"] for x in lines if x["arrived"] is not None]
    compiled = max(done, default=timeline["forwarded"])
    ready = max([compiled, *arrived])
    return Sample(
        ttft=ttft,
        forwarded=timeline["forwarded"],
        compile=compiled - min(begun, default=timeline["forwarded"]),
        exposed=ready - compiled,
        link=timeline["first_token"] - ready,
        workers=len({x["worker"] for x in lines}),
        timeline=timeline,
    )
