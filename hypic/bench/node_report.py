"""Files of a node's run: JSON, plots, and a summary to read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hypic.bench import scatter_report
from hypic.bench.report import markdown_table
from hypic.bench.result import BenchResult
from hypic.bench.scatter import SHORT
from hypic.bench.workload import Workload
from hypic.router.simulate import Request, simulate
from hypic.traces import report as replay_report
from hypic.traces.result import ReplayResult

SIMULATED = (1, 2, 4, 8, 16, 32, 64)


class NodeResult(msgspec.Struct, kw_only=True):
    """What the run did, besides what bench.json and replay.json hold.

    Attributes:
        seconds: that each stage took. failed: why a stage did not end well.
        answers: of `hypic selfcheck --workers` on a tiny model. transfers: of hypic.router.transport.measure, by way.
        simulated: TTFT in ms by number of workers, from the costs of this run.
    """

    workers: int
    budget: float
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    answers: dict[str, Any] = {}
    transfers: dict[str, Any] = {}
    simulated: dict[str, dict[int, float]] = {}


def write(out: Path, found: NodeResult, bench: BenchResult, replay: ReplayResult) -> None:
    """All files anew: what there is after each stage."""
    scatter, work = bench.scatter, Workload(**bench.workload)
    if scatter is not None and scatter.costs is not None:
        for segments in dict.fromkeys(tuple(r.segments) for r in scatter.runs if r.workload != SHORT):
            request = Request(segments, work.system + work.query)
            name = f"{len(segments)} segments, {sum(segments)} tokens"
            found.simulated[name] = {n: 1e3 * simulate(scatter.costs, n, [request])[0].ttft for n in SIMULATED}
        (out / "costs.json").write_bytes(_json(scatter.costs))
    for name, part in (("node", found), ("bench", bench), ("replay", replay)):
        (out / f"{name}.json").write_bytes(_json(part))
    with contextlib.suppress(ImportError):
        if scatter is not None:
            scatter_report.plot(scatter, out / "scatter.png")
        if replay.engines:
            replay_report.plot(replay, out / "replay.png")
    (out / "summary.md").write_text("\n".join(_summary(found, bench, replay)) + "\n")


def _json(part: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(part, enc_hook=str), indent=1) + b"\n"


def _summary(found: NodeResult, bench: BenchResult, replay: ReplayResult) -> Iterator[str]:
    took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in found.seconds.items())
    yield f"# {found.workers} workers: {sum(found.seconds.values()):.0f} s of {found.budget:.0f} ({took})\n"
    if bench.dummy_horizon:
        yield f"* dummy weights; the linear layers of all servers remember over {bench.dummy_horizon:,} tokens"
    for name, why in found.failed.items():
        lines = why.splitlines()
        yield f"* **{name} failed**: {' ... '.join(dict.fromkeys((lines[0], lines[-1])))}"
    if bench.scatter is not None and (bench.scatter.runs or bench.scatter.stock):
        work = Workload(**bench.workload)
        for left in bench.scatter.left_out:
            yield f"* {left.splitlines()[0]}"
        yield "\n| target | found | met |\n| --- | --- | --- |"
        for verdict in scatter_report.verdicts(bench.scatter, work):
            yield f"| {verdict.target} | {verdict.found} | { {True: 'yes', False: '**no**', None: ''}[verdict.met] } |"
        yield ""
        yield from markdown_table(scatter_report.table(bench.scatter, work))
    for name, entry in found.answers.items():
        numbers = f"worst error {entry['worst_error']}, tolerance {entry['tolerance']}"
        yield f"* {name.rpartition('/')[2]} of a tiny model across workers: {entry['status']}, {numbers}; {entry['detail']}"
    for way, told in found.transfers.items():
        if "failed" in told:
            yield f"* transfer, {way}: failed, {told['failed']}"
            continue
        rate = told["gb_per_s"]
        yield (
            f"* transfer, {way}: {rate['median']:.2f} GB/s ({rate['min']:.2f} to {rate['max']:.2f}), "
            f"round trip {told['round_trip_ms']:.2f} ms"
        )
    for prompt, times in found.simulated.items():
        yield f"* simulated from these costs, {prompt}: " + ", ".join(f"{n}: {t:.0f} ms" for n, t in times.items())
    if replay.engines:
        *_, rates = replay_report.tables(replay)
        yield ""
        yield from markdown_table(rates)
