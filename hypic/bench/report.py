"""Tables, the fit and the plot of a BenchResult."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from hypic.bench import scatter_report
from hypic.bench.artifact_cost import arithmetic
from hypic.bench.dummy import told
from hypic.bench.result import BenchResult, EngineRun, Timing
from hypic.bench.suites import COMPOSITION, KERNELS
from hypic.bench.workload import Workload

FIT_TERMS = ("fixed", "per segment", "per computed token", "per cached token", "per attended pair")


def fit(points: Sequence[Timing]) -> dict[str, float] | None:
    """Least squares, no coefficient below 0, of TTFT in ms over the scale suite's points; None if there are too few.

    TTFT = fixed + segments + computed tokens + cached tokens + attended pairs, each with its coefficient; "worst" is the
    largest relative error of the fit at a point.
    """
    if len(points) <= len(FIT_TERMS):
        return None
    shapes = [p.shape for p in points]
    columns = [[1, s["segments"], s["computed"], s["tokens"] - s["computed"], s["pairs"]] for s in shapes]
    a, y = np.array(columns, float), np.array([p.median for p in points])
    weights = 1 / y  # relative error counts: the points span two orders of magnitude
    used = list(range(len(FIT_TERMS)))
    while True:
        x, *_ = np.linalg.lstsq(a[:, used] * weights[:, None], y * weights, rcond=None)
        if (x >= 0).all():
            break
        used.pop(int(np.argmin(x * a[:, used].mean(axis=0))))
    found = dict.fromkeys(FIT_TERMS, 0.0) | {FIT_TERMS[i]: float(v) for i, v in zip(used, x, strict=True)}
    found["worst"] = float(np.abs(a[:, used] @ x / y - 1).max())
    return found


def tables(result: BenchResult) -> Iterator[Table]:
    """One table per suite, and one of the fit."""
    for suite in dict.fromkeys(t.suite for e in result.engines for t in e.timings):
        if suite in (KERNELS, COMPOSITION):
            yield _kernels_table(result) if suite == KERNELS else _composition_table(result)
        else:
            yield _suite_table(suite, result)
    if result.scatter is not None:
        work = Workload(**result.workload)
        yield scatter_report.table(result.scatter, work)
        yield scatter_report.verdict_table(result.scatter, work)
    if result.fit:
        table = Table(title="TTFT of a warm link in ms, fitted to the points of the scale suite")
        for name in result.fit:
            table.add_column(name, justify="right")
        table.add_row(*(f"{100 * v:.0f}%" if k == "worst" else f"{v:.3g}" for k, v in result.fit.items()))
        yield table


def markdown(result: BenchResult) -> Iterator[str]:
    """Lines of bench.md: the tables, what the weights were, and what building artifacts costs."""
    for table in tables(result):
        yield from markdown_table(table)
    dummies = [e.settings["dummy_decays"] for e in result.engines if "dummy_decays" in e.settings]
    for line in dict.fromkeys(map(told, dummies)):
        yield f"* {line}"
    if result.artifact_cost is not None:
        yield f"* {arithmetic(result.artifact_cost)}"
    yield f"* `{shlex.join(result.command)}`"


def markdown_table(table: Table) -> Iterator[str]:
    """A rich table as one of Markdown's."""
    yield f"**{table.title}**\n"
    yield "| " + " | ".join(str(c.header) for c in table.columns) + " |"
    yield "|" + " --- |" * len(table.columns)
    for row in zip(*(c.cells for c in table.columns), strict=True):
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""


def _kernels_table(result: BenchResult) -> Table:
    work = result.workload
    table = Table(title=f"kernels, n = {work['reps']}: {work['segments']} segments of {work['segment_tokens']} tokens")
    for column in ("case", "median ms", "min", "max", "layers", "GB/s"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for t in (t for e in result.engines for t in e.timings if t.suite == KERNELS):
        rate = f"{t.shape['bytes'] / t.median / 1e6:,.0f}" if "bytes" in t.shape else ""
        numbers = [f"{x:.4f}" for x in (t.median, min(t.values), max(t.values))]
        table.add_row(t.case, *numbers, str(t.shape.get("layers", "")), rate)
    if result.artifact_cost is not None:
        table.caption = arithmetic(result.artifact_cost)
    return table


def _composition_table(result: BenchResult) -> Table:
    timings = [t for e in result.engines for t in e.timings if t.suite == COMPOSITION]
    shape = timings[0].shape
    title = f"state of one layer after {shape['segments']} segments of {shape['segment_tokens']} tokens: |h - truth| / |truth|"
    table = Table(title=f"{title}, {shape['heads']} heads")
    for column in ("way", "median head", "worst head", "worst / stock's worst"):
        table.add_column(column, justify="left" if column == "way" else "right")
    stock = max(timings[0].values)
    for t in timings:
        worst = max(t.values)
        table.add_row(t.case, f"{t.median:.2g}", f"{worst:.2g}", f"{worst / stock:.2f}" if stock else "")
    return table


def _suite_table(suite: str, result: BenchResult) -> Table:
    work = result.workload
    tokens = work["system"] + work["segments"] * work["segment_tokens"] + work["query"]
    shape = f"{tokens} tokens in {work['segments']} segments of {work['segment_tokens']}"
    table = Table(title=f"{suite}, n = {work['reps']}" + ("" if suite == "scale" else f": {shape}"))
    for column in ("engine", "case", "median", "min", "max", "unit", "cached tokens"):
        table.add_column(column, justify="left" if column in ("engine", "case", "unit") else "right")
    base = _cold(result.engines) if suite == "ttft" else None
    if base is not None:
        table.add_column("stock cold / this", justify="right")
    for engine in result.engines:
        for t in (t for t in engine.timings if t.suite == suite):
            comparable = base is not None and t.unit == "ms" and t.case != "ordinary"
            ratio = [] if base is None else [f"{base / t.median:.2f}x" if comparable else ""]
            numbers = [f"{x:,.1f}" for x in (t.median, min(t.values), max(t.values))]
            table.add_row(engine.name, t.case, *numbers, t.unit, str(t.cached[-1]) if t.cached else "", *ratio)
    return table


def _cold(engines: Sequence[EngineRun]) -> float | None:
    """The fastest full recompute of all stock engines: what ours is held against."""
    colds = [t.median for e in engines if e.name != "hypic" for t in e.timings if (t.suite, t.case) == ("ttft", "cold")]
    return min(colds, default=None)


def plot(result: BenchResult, path: Path) -> bool:
    """Write a picture of the timings; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    suites = [
        s for s in ("ttft", "concurrency", "scale") if any(t.suite == s for e in result.engines for t in e.timings)
    ]
    if not suites:
        return True
    figure, axes = pyplot.subplots(1, len(suites), figsize=(6 * len(suites), 4.5), squeeze=False, layout="constrained")
    for axis, suite in zip(axes[0], suites, strict=True):
        axis.set_title(suite)
        if suite == "ttft":
            bars = [
                (f"{e.name}: {t.case}", t)
                for e in result.engines
                for t in e.timings
                if t.suite == suite and t.unit == "ms"
            ]
            bars.reverse()
            axis.barh([name for name, _ in bars], [t.median for _, t in bars])
            axis.set_xlabel("TTFT, ms")
        elif suite == "concurrency":
            for engine in result.engines:
                own = [t for t in engine.timings if t.suite == suite]
                axis.plot([t.shape["together"] for t in own], [t.median for t in own], marker="o", label=engine.name)
            axis.set(xlabel="requests at once", ylabel="worst TTFT, ms")
            axis.legend()
        else:
            points = [t for e in result.engines for t in e.timings if t.suite == suite]
            for length in sorted({t.shape["segment_tokens"] for t in points}):
                line = sorted((t.shape["segments"], t.median) for t in points if t.shape["segment_tokens"] == length)
                axis.plot([x for x, _ in line], [y for _, y in line], marker="o", label=f"{length} tokens each")
            axis.set(xlabel="segments", ylabel="TTFT of a warm link, ms")
            axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
