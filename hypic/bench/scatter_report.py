"""What the scatter suite says: costs, the simulation and the bounds beside what was measured, a table, verdicts, a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, linear_regression
from typing import NamedTuple

import msgspec
from rich.table import Table

from hypic.bench.scatter import SHORT
from hypic.bench.scatter_result import ScatterResult, ScatterRun, StockRun
from hypic.bench.workload import Workload
from hypic.router.costs import Costs
from hypic.router.schedule import lower_bound
from hypic.router.simulate import Request, simulate

IDEAL, BOUND, PREDICTED = 0.9, 1.1, 0.15
"""Targets: of T_compile / N + T_link; of the makespan bound; of the simulation."""
STEADY = 1.1
"""By what factor the time of the same work may change before two policies cannot be compared."""


class Verdict(NamedTuple):
    """A target and what was found; `met` is None where nothing can be said."""

    target: str
    found: str
    met: bool | None


def alone(result: ScatterResult, run: ScatterRun) -> ScatterRun | None:
    """The same prompts on one worker."""
    return next((r for r in result.runs if r.workers == 1 and r.segments == run.segments), None)


def measured_costs(result: ScatterResult, costs: Costs) -> Costs:
    """The router's `costs`, with speed, link and shortest pass of one worker where that was timed."""
    alone = [r for r in result.runs if r.workers == 1]
    one = next((r for r in alone if r.workload == "equal"), None)
    if one is None:
        return costs
    short = next((r for r in alone if r.workload == SHORT), None)
    link, link_segment = _line([(len(r.segments), r.median("link") / 1e3) for r in alone])
    return msgspec.structs.replace(
        costs,
        source="hypic bench --suites scatter",
        tokens_per_s=1e3 * sum(one.segments) / one.median("compile"),
        forward_s=short.median("compile") / 1e3 if short else costs.forward_s,
        link_s=link,
        link_segment_s=link_segment,
        link_token_s=0.0,
    )


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Least squares: where the line begins and how steep it is, neither below 0."""
    slope = begin = 0.0
    if len({x for x, _ in points}) > 1:
        slope, begin = linear_regression(*zip(*points, strict=True))
    if slope <= 0:
        return fmean(y for _, y in points), 0.0
    return max(begin, 0.0), slope


def reckon(result: ScatterResult, work: Workload) -> None:
    """Fill in what follows from the runs."""
    if result.costs is None or not result.runs:
        return
    costs = result.costs = measured_costs(result, result.costs)
    for run in result.runs:
        request = Request(tuple(run.segments), work.system + work.query)
        run.predicted = 1e3 * simulate(costs, run.workers, [request], run.policy)[0].ttft  # type: ignore[arg-type]
        speed = costs.tokens_per_s
        if (one := alone(result, run)) is not None:
            run.ideal = one.median("compile") / run.workers + one.median("link")
            speed = 1e3 * sum(one.segments) / one.median("compile")
        run.makespan_bound = 1e3 * lower_bound(run.segments, run.workers) / speed


def verdicts(result: ScatterResult, work: Workload) -> Iterator[Verdict]:
    """Every target of the suite. That of T_compile / N is for equal segments: one that is much longer than the others bounds what
    any number of workers can do, and the makespan's bound says so."""
    lpt = [r for r in result.runs if r.policy == "lpt"]
    several = [r for r in lpt if r.workers > 1]
    shares = [(r.ideal / r.median("ttft"), r) for r in lpt if r.ideal and r.workload == "equal"]
    target = f"equal segments: speed at least {IDEAL:.0%} of T1 / (T_compile / N + T_link)"
    yield _worst(target, shares, IDEAL, least=True)
    bounds = [(r.median("compile") / r.makespan_bound, r) for r in several if r.makespan_bound]
    yield _worst(f"LPT within {BOUND - 1:.0%} of the makespan's bound", bounds, BOUND)
    other = {(r.workers, tuple(r.segments)): r for r in result.runs if r.policy == "round_robin"}
    pairs = [(o, r) for r in several if (o := other.get((r.workers, tuple(r.segments))))]
    slower = [(r.median("ttft") / o.median("ttft"), r) for o, r in pairs]
    yield _worst("LPT no slower than round robin (5% of noise)", slower, 1.05)
    links = [(o.median("link") / r.median("link"), r) for o, r in pairs if r.median("link")]
    steady = _worst("", [(max(x, 1 / x), r) for x, r in links if x], STEADY)
    drift = "; the machine's speed was different, so that policies cannot be compared" * (steady.met is False)
    target = f"round robin's links, the same work minutes later, within {STEADY - 1:.0%} of LPT's (reported)"
    yield Verdict(target, steady.found + drift, None)
    misses = [(abs(r.predicted / r.median("ttft") - 1), r) for r in result.runs if r.predicted]
    yield _worst(f"simulation within {PREDICTED:.0%}", misses, PREDICTED)
    found = result.agreement
    if found is None:
        yield Verdict("several workers answer as one", "not compared", None)
    else:
        text = (
            f"{found.same_tokens} of {found.prompts} answers the same, {found.split} compiled by several; logprobs differ by "
            f"{found.worst:.1e} at most, tolerance {found.tolerance:.1e}; another document would change {found.signal:.1e}"
        )
        text += ": too little to tell (random weights?)" * (found.passed is None)
        yield Verdict("several workers answer as one", text, found.passed)
    for run in result.stock:
        ours = [r for r in lpt if r.segments == run.segments]
        if ours:
            best = min(ours, key=lambda r: r.median("ttft"))
            ratio = run.median / best.median("ttft")
            text = f"{run.median:.0f} ms; hypic on {best.workers} workers {best.median('ttft'):.0f} ms: {ratio:.2f}x"
            yield Verdict(f"{name_of(run)} cold, {_prompt(run)} (reported)", text, None)


def _worst(target: str, values: list[tuple[float, ScatterRun]], bound: float, least: bool = False) -> Verdict:
    if not values:
        return Verdict(target, "not measured", None)
    value, run = (min if least else max)(values, key=lambda pair: pair[0])
    where = f"{100 * value:.0f}% at worst: {_prompt(run)}, {run.policy}, {run.workers} workers"
    return Verdict(target, where, value >= bound if least else value <= bound)


def _prompt(run: ScatterRun | StockRun) -> str:
    return f"{len(run.segments)} {run.workload}, {sum(run.segments):,} tokens"


def name_of(run: StockRun) -> str:
    return "stock" if run.gpus == 1 else f"stock, TP {run.gpus}"


def table(result: ScatterResult, work: Workload) -> Table:
    long = 4 * work.segment_tokens
    title = f"scatter: cold prompts (uneven: one segment of {long} tokens, the others up to {work.segment_tokens})"
    out = Table(
        title=title,
        caption="TTFT over HTTP, ms. of ideal: T_compile / N + T_link of one worker, over TTFT. of bound: compile over the "
        "makespan that no schedule beats. GB/s: one transfer",
    )
    columns = ("segments", "policy", "workers", "n", "TTFT", "min", "max", "speed-up", "of ideal", "compile")
    for column in (*columns, "of bound", "exposed", "link", "GB/s", "predicted"):
        out.add_column(column, justify="left" if column in ("segments", "policy") else "right")
    order = {tuple(r.segments): i for i, r in enumerate(result.runs)}
    for run in sorted(result.runs, key=lambda r: (order[tuple(r.segments)], r.policy, r.workers)):
        ttft, one = run.median("ttft"), alone(result, run)
        values = [s.ttft for s in run.samples]
        compiled = run.median("compile")
        out.add_row(
            f"{len(run.segments)} {run.workload}",
            run.policy,
            str(run.workers),
            str(len(values)),
            *(f"{x:.1f}" for x in (ttft, min(values), max(values))),
            f"{one.median('ttft') / ttft:.2f}" if one else "",
            f"{100 * run.ideal / ttft:.0f}%" if run.ideal else "",
            f"{compiled:.1f}",
            f"{100 * compiled / run.makespan_bound:.0f}%" if run.makespan_bound else "",
            *(f"{run.median(field):.1f}" for field in ("exposed", "link")),
            f"{run.gb_per_s:.2f}" if run.gb_per_s else "",
            f"{run.predicted:.1f}" if run.predicted else "",
        )
    for line in result.stock:
        times = [f"{x:.1f}" for x in (line.median, min(line.values), max(line.values))]
        ours = next((r for r in result.runs if r.workers == 1 and r.segments == line.segments), None)
        speed_up = f"{ours.median('ttft') / line.median:.2f}" if ours else ""
        name = f"{len(line.segments)} {line.workload}"
        out.add_row(name, name_of(line), "", str(len(line.values)), *times, speed_up)
    return out


def verdict_table(result: ScatterResult, work: Workload) -> Table:
    out = Table(title="scatter: targets", caption="\n".join(result.left_out) or None)
    for column in ("target", "found", "met"):
        out.add_column(column)
    for verdict in verdicts(result, work):
        out.add_row(verdict.target, verdict.found, {True: "yes", False: "NO", None: ""}[verdict.met])
    return out


def plot(result: ScatterResult, path: Path) -> None:
    """TTFT over workers for each workload, measured and predicted, and what it is made of.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    prompts = list(dict.fromkeys(tuple(r.segments) for r in result.runs if r.workload != SHORT))
    if not prompts:
        return
    size = (5 * len(prompts), 8)
    figure, axes = pyplot.subplots(2, len(prompts), figsize=size, squeeze=False, layout="constrained")
    for (top, below), prompt in zip(axes.T, prompts, strict=True):
        own = [r for r in result.runs if tuple(r.segments) == prompt]
        for policy in dict.fromkeys(r.policy for r in own):
            runs = sorted((r for r in own if r.policy == policy or r.workers == 1), key=lambda r: r.workers)
            counts = [r.workers for r in runs]
            (line,) = top.plot(counts, [r.median("ttft") for r in runs], marker="o", label=policy)
            if all(r.predicted for r in runs):
                top.plot(
                    counts, [r.predicted for r in runs], ls=":", color=line.get_color(), label=f"{policy}, simulated"
                )
        for i, stock in enumerate(s for s in result.stock if tuple(s.segments) == prompt):
            top.axhline(stock.median, color="black", ls=("-", "--")[i % 2], label=name_of(stock))
        top.set(title=f"{_prompt(own[0])}, cold", xlabel="workers", ylabel="TTFT, ms", ylim=(0, None))
        top.set_xticks(sorted({r.workers for r in own}))
        top.legend()
        lpt = sorted((r for r in own if r.policy == "lpt"), key=lambda r: r.workers)
        names, bottom = [str(r.workers) for r in lpt], [0.0] * len(lpt)
        for part in ("compile", "exposed", "link"):
            heights = [r.median(part) for r in lpt]
            below.bar(names, heights, bottom=bottom, label=part)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        rest = [max(r.median("ttft") - b, 0.0) for r, b in zip(lpt, bottom, strict=True)]
        below.bar(names, rest, bottom=bottom, label="router, HTTP")
        below.set(title="LPT: what it is made of", xlabel="workers", ylabel="ms")
        below.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
