"""Tables and the plot of a replay, and the table of a trace's summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from hypic.traces.figures import Quantiles
from hypic.traces.result import EngineReplay, ReplayResult, Run
from hypic.traces.search import FOUND
from hypic.traces.summary import Spread, Summary

FAILED = "failed"
COLUMNS = (
    "TTFT p50", "p90", "p95", "p99", "TPOT p50", "p95", "E2E p50", "p95", "saved", "met SLO", "goodput",
)  # fmt: skip


def summary_table(summary: Summary, title: str) -> Table:
    """What a trace holds and what caches can save of it at best."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    s = summary
    behind = f", behind {s.warmup} of warm-up" if s.warmup else ""
    table.add_row(f"requests{behind}", f"{s.requests:,} in {s.seconds:,.0f} s: {s.qps:.3g}/s")
    for name, spread in (("prompt tokens", s.input), ("answer tokens", s.output), ("segments of a prompt", s.segments)):
        table.add_row(f"{name}: mean, p50, p95, max", _spread(spread))
    table.add_row("requests that continue a conversation", _percent(s.later_turns))
    table.add_row("distinct segments, and their tokens", f"{s.distinct:,}, {s.distinct_tokens:,}")
    table.add_row("segments seen before", _percent(s.segments_seen))
    table.add_row("prompt tokens a prefix cache can save, with no limit", _percent(s.prefix))
    table.add_row("prompt tokens PIC and prefix cache can save, with no limit", _percent(s.pic))
    if s.capacity is not None and s.pic_capacity is not None and s.segments_kept is not None:
        c = s.capacity
        room = f"{c.total:,.0f} ({c.per_segment:,.0f} each + {c.per_token:,.0f} a token)"
        table.add_row(f"the same, segments limited to {room}", _percent(s.pic_capacity))
        table.add_row("segments seen before and still there", _percent(s.segments_kept))
    return table


def tables(result: ReplayResult) -> Iterator[Table]:
    """The trace, all runs, and the rates found."""
    yield summary_table(result.summary, result.trace)
    rows = [(e, r) for e in result.engines for r in e.runs]
    if timed := [(e, r) for e, r in rows if r.kind != "sweep"]:
        yield _runs(timed, "Runs: seconds from when a request was due", sweep=False)
    if swept := [(e, r) for e, r in rows if r.kind == "sweep"]:
        yield _runs(swept, "Cached share of segment tokens, one request at a time", sweep=True)
    if result.plan.find:
        yield _rates(result)


def _runs(rows: list[tuple[EngineReplay, Run]], title: str, sweep: bool) -> Table:
    table = Table(title=title)
    table.add_column("engine")
    for column in ("cached" if sweep else "QPS", "n", *COLUMNS):
        table.add_column(column, justify="right")
    table.add_column("remarks")
    for engine, run in rows:
        f = run.figures
        rate = _percent(run.share) if run.share is not None else f"{run.qps or f.offered:.2f}"
        times = [*_at(f.ttft, "p50", "p90", "p95", "p99"), *_at(f.tpot, "p50", "p95"), *_at(f.e2e, "p50", "p95")]
        goodput = "" if sweep else f"{f.goodput:.2f}"
        table.add_row(
            engine.name, rate, str(f.requests), *times, _percent(f.cached), _percent(f.met), goodput, remarks(run)
        )
    return table


def remarks(run: Run) -> str:
    """What keeps a run from being taken at face value."""
    f = run.figures
    found = [f"{f.errors} errors: {'; '.join(f.first_errors)[:80]}"] * bool(f.errors)
    found += [f"{f.timeouts} timeouts"] * bool(f.timeouts) + [f"{f.cut} not waited for"] * bool(f.cut)
    found += {"slo": ["SLO lost, given up"], "budget": ["time ran out"]}.get(run.end, [])
    if not f.kept_up:
        found.append(f"INVALID: the client was late (p99 {f.lag['p99'] or 0:.3f} s)")
    return ", ".join(found)


def _rates(result: ReplayResult) -> Table:
    slo = result.plan.slo
    wanted = f"TTFT within {slo.ttft} s" + (f", TPOT within {slo.tpot} s" if slo.tpot is not None else "")
    table = Table(title=f"Highest rate at which {100 * slo.share:.0f}% of the requests have {wanted}")
    table.add_column("engine")
    for column in ("QPS kept", "QPS lost", "of prefix cache", "of no cache", "saved there"):
        table.add_column(column, justify="right")
    table.add_column("search")
    found = {e.name: e.highest for e in result.engines if e.search_end == FOUND}
    for engine in result.engines:
        own = engine.highest
        other = [_base(engine.name, name, found) if engine.name in found else None for name in ("prefix", "none")]
        ratios = [f"{own / o:.2f}x" if own and o else "" for o in other]  # an unfinished search has no ratio
        there = [r for r in engine.runs if r.passed and r.qps == own]
        saved = _percent(there[-1].figures.cached) if there else ""
        kept, lost = (f"{q:.2f}" if q else "-" for q in (own, engine.failed))
        table.add_row(engine.name, kept, lost, *ratios, saved, engine.search_end or "cut short")
    return table


def _base(engine: str, name: str, found: dict[str, float | None]) -> float | None:
    """The rate of what an engine is held against: as many servers, the best way of placing prompts on them."""
    _, several, rest = engine.partition(":")
    if not several:
        return found.get(name)
    rates = [rate for n, rate in found.items() if rate and n.split(":")[:2] == [name, rest.split(":")[0]]]
    return max(rates, default=None)


def _at(quantiles: Quantiles, *names: str) -> list[str]:
    return ["" if not quantiles else FAILED if (q := quantiles[n]) is None else f"{q:.3f}" for n in names]


def _spread(s: Spread) -> str:
    return f"{s.mean:,.0f}, {s.p50:,.0f}, {s.p95:,.0f}, {s.max:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def plot(result: ReplayResult, path: Path) -> bool:
    """Write a picture: distribution of TTFT, p95 TTFT over the rate, TTFT over the cached share; False without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rated = {e.name: [r for r in e.runs if r.kind != "sweep" and r.figures.kept_up] for e in result.engines}
    swept = {
        e.name: sorted((r for r in e.runs if r.kind == "sweep"), key=lambda r: r.share or 0) for e in result.engines
    }
    panels = [name for name, runs in (("cdf", rated), ("rate", rated), ("sweep", swept)) if any(runs.values())]
    if not panels:
        return True
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels, strict=True):
        for engine in result.engines:
            if panel == "cdf" and (run := shown(engine)):
                points = [(t, i) for i, t in enumerate(run.figures.ttft_cdf) if t is not None]
                rate = run.qps or run.figures.offered
                axis.plot([t for t, _ in points], [i for _, i in points], label=f"{engine.name}, {rate:.2f} requests/s")
            elif panel == "rate":
                rates = sorted(
                    (r.qps or r.figures.offered, t) for r in rated[engine.name] if (t := r.figures.ttft["p95"])
                )
                axis.plot([q for q, _ in rates], [t for _, t in rates], marker="o", label=engine.name)
            elif panel == "sweep":
                shares = [(100 * (r.share or 0), t) for r in swept[engine.name] if (t := r.figures.ttft["p50"])]
                axis.plot([x for x, _ in shares], [t for _, t in shares], marker="o", label=engine.name)
        if panel == "rate" and result.plan.slo.ttft:
            axis.axhline(result.plan.slo.ttft, linestyle=":", color="black")
        labels = {
            "cdf": ("TTFT, s", "% of the requests"), "rate": ("requests/s", "p95 TTFT, s"),
            "sweep": ("cached share of segment tokens, %", "median TTFT, s"),
        }  # fmt: skip
        axis.set(xlabel=labels[panel][0], ylabel=labels[panel][1])
        axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def shown(engine: EngineReplay) -> Run | None:
    """The run whose distribution is drawn: at the highest rate that kept the SLO, else the last that was whole."""
    runs = [r for r in engine.runs if r.kind != "sweep" and r.figures.kept_up]
    best = [r for r in runs if r.passed and r.qps == engine.highest]
    return next(iter(best or [r for r in reversed(runs) if r.end == "complete"]), None)
