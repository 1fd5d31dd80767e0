"""Cold prompts on 1 to N workers behind a router: what segment parallelism gives, and what it is made of.

TTFT is from sending the request to the endpoint until its first chunk, on a connection of its own; the rest comes from the
timeline in its report. Each repetition has documents that no worker has seen.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.table import Table

from hypic.bench.workload import Prompts, Workload
from hypic.router.costs import Costs
from hypic.router.launch.running import running
from hypic.router.launch.supervisor import get_json
from hypic.router.schedule import lower_bound
from hypic.router.simulate import Request, simulate

POLICIES = ("lpt", "round_robin")
WORKLOADS = ("equal", "uneven")
_UNEVEN = (0.25, 0.5, 0.75, 1.0)
"""Lengths of all segments but the first, as shares of the workload's; the first has four times that."""
_WARM_UP = 3
"""Prompts before those that count: speeds and rates are measured, kernels are tuned."""


class Sample(msgspec.Struct, kw_only=True):
    """One cold prompt, in milliseconds.

    Attributes:
        ttft: at the client. forwarded: until the router let it go to its worker.
        compile: from the first compile's begin to the last one's end. exposed: from then to the last artifact's arrival. link:
            from then to the first token at the router.
        workers: how many compiled for it.
        timeline: as in its report.
    """

    ttft: float
    forwarded: float
    compile: float
    exposed: float
    link: float
    workers: int
    timeline: dict[str, Any]


class ScatterRun(msgspec.Struct, kw_only=True):
    """One number of workers and one policy at one workload.

    Attributes:
        predicted: TTFT in ms by the simulation from this benchmark's own costs.
        ideal: T_compile / N + T_link, both of one worker; None without that.
        makespan_bound: no schedule compiles sooner, by the speed of one worker.
    """

    workers: int
    policy: str
    workload: str
    segments: list[int]
    samples: list[Sample]
    predicted: float | None = None
    ideal: float | None = None
    makespan_bound: float | None = None

    def median(self, field: str) -> float:
        return statistics.median(getattr(s, field) for s in self.samples)


class ScatterResult(msgspec.Struct, kw_only=True):
    """All of it, and the costs that were measured on the way: a file for `hypic simulate` and `hypic launch --costs`."""

    runs: list[ScatterRun]
    costs: Costs | None = None


def lengths(work: Workload, name: str) -> list[int]:
    """Tokens of each segment of a workload."""
    if name == "equal":
        return [work.segment_tokens] * work.segments
    rest = [int(work.segment_tokens * _UNEVEN[i % len(_UNEVEN)]) for i in range(work.segments - 1)]
    return [4 * work.segment_tokens, *rest]


def run_scatter(
    work: Workload,
    argv: Sequence[str],
    workers: Sequence[int],
    policies: Sequence[str] = POLICIES,
    workloads: Sequence[str] = WORKLOADS,
    vocab: int = 1000,
    say: Callable[[str], None] = print,
) -> ScatterResult:
    """One cluster of the largest number of workers; for smaller ones the others are drained.

    Raises:
        LaunchError: it did not come up.
    """
    result, most = ScatterResult(runs=[]), max(workers)
    names = [f"w{i}" for i in range(most)]
    prompts = Prompts(work, vocab)  # one stream of tokens: no document comes twice
    say(f"scatter: starting {most} workers")
    with running(argv, most) as url:
        for n in sorted(set(workers)):
            for policy in policies if n > 1 else policies[:1]:
                _change(url, {"resume": names[:n], "drain": names[n:], "policy": policy})
                for name in workloads:
                    result.runs.append(run := _time(url, prompts, work, n, policy, name))
                    say(f"{n} workers, {policy}, {name}: {run.median('ttft'):.1f} ms")
        result.costs = _measured(result, msgspec.convert(get_json(f"{url}/workers")["costs"], Costs))
    _reckon(result, work)
    return result


def _change(url: str, what: dict[str, Any]) -> None:
    request = urllib.request.Request(f"{url}/workers", json.dumps(what).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()


def _time(url: str, prompts: Prompts, work: Workload, n: int, policy: str, name: str) -> ScatterRun:
    sizes = lengths(work, name)
    samples = []
    for _ in range(_WARM_UP + work.reps):
        ids, bounds = prompts.prompt([prompts.tokens(size) for size in sizes])
        samples.append(ask(url, ids, bounds))
    return ScatterRun(workers=n, policy=policy, workload=name, segments=sizes, samples=samples[_WARM_UP:])


def ask(url: str, ids: list[int], bounds: list[list[int]]) -> Sample:
    """One cold prompt."""
    body = {
        "input_ids": ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        "hypic": {"segments": bounds, "report": True},
    }
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
    return _sample(ttft, chunks[-1]["meta_info"]["hypic"]["router"]["timeline"])


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


# ---------------------------------------------------------------------- what it says


def _alone(result: ScatterResult, workload: str) -> ScatterRun | None:
    return next((r for r in result.runs if r.workers == 1 and r.workload == workload), None)


def _measured(result: ScatterResult, costs: Costs) -> Costs:
    """The router's costs, with speed and link of one worker where that was timed."""
    alone = _alone(result, "equal")
    if alone is None:
        return costs
    return msgspec.structs.replace(
        costs,
        source="hypic bench --suites scatter",
        tokens_per_s=1e3 * sum(alone.segments) / alone.median("compile"),
        link_s=alone.median("link") / 1e3,
    )


def _reckon(result: ScatterResult, work: Workload) -> None:
    costs = result.costs
    assert costs is not None
    for run in result.runs:
        request = Request(tuple(run.segments), work.system + work.query)
        run.predicted = 1e3 * simulate(costs, run.workers, [request], run.policy)[0].ttft  # type: ignore[arg-type]
        run.makespan_bound = 1e3 * lower_bound(run.segments, run.workers) / costs.tokens_per_s
        if (alone := _alone(result, run.workload)) is not None:
            run.ideal = alone.median("compile") / run.workers + alone.median("link")


def table(result: ScatterResult, work: Workload) -> Table:
    title = f"scatter, n = {work.reps}: cold, {work.segments} segments of {work.segment_tokens} tokens (uneven: 4x, then less)"
    out = Table(title=title, caption="TTFT over HTTP, ms. of ideal: T_compile / N + T_link of one worker, over TTFT")
    columns = (
        "segments",
        "policy",
        "workers",
        "TTFT",
        "min",
        "max",
        "speed-up",
        "of ideal",
        "compile",
        "exposed",
        "link",
    )
    for column in (*columns, "predicted"):
        out.add_column(column, justify="left" if column in ("segments", "policy") else "right")
    for run in sorted(result.runs, key=lambda r: (r.workload, r.policy, r.workers)):
        ttft, alone = run.median("ttft"), _alone(result, run.workload)
        values = [s.ttft for s in run.samples]
        speed_up = f"{alone.median('ttft') / ttft:.2f}" if alone else ""
        share = f"{100 * run.ideal / ttft:.0f}%" if run.ideal else ""
        parts = [f"{run.median(field):.1f}" for field in ("compile", "exposed", "link")]
        numbers = [f"{x:.1f}" for x in (ttft, min(values), max(values))]
        predicted = f"{run.predicted:.1f}" if run.predicted else ""
        out.add_row(run.workload, run.policy, str(run.workers), *numbers, speed_up, share, *parts, predicted)
    return out


def plot(result: ScatterResult, path: Path) -> None:
    """TTFT over workers for each workload and policy, measured and predicted. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(r.workload for r in result.runs))
    figure, axes = pyplot.subplots(
        1, len(workloads), figsize=(6 * len(workloads), 4.5), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], workloads, strict=True):
        for policy in dict.fromkeys(r.policy for r in result.runs):
            runs = [r for r in result.runs if r.workload == name and (r.policy == policy or r.workers == 1)]
            runs.sort(key=lambda r: r.workers)
            counts = [r.workers for r in runs]
            (line,) = axis.plot(counts, [r.median("ttft") for r in runs], marker="o", label=policy)
            axis.plot(counts, [r.predicted for r in runs], ls=":", color=line.get_color(), label=f"{policy}, simulated")
        axis.set(title=f"{name} segments, cold", xlabel="workers", ylabel="TTFT, ms", ylim=(0, None))
        axis.set_xticks(sorted({r.workers for r in result.runs}))
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
