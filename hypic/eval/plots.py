"""Pictures of a summary: accuracy against work, error behind the seam, error per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypic.eval.methods import CLOSED_BOOK, FULL
from hypic.eval.summary import Row, Summary

SHOWN_DISTANCE = 64
"""Tokens behind the start of a document that the seam plot shows."""


def draw(summary: Summary, out_dir: Path) -> list[str]:
    """Write what there is data for; the names of the files, none if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = []
    for name, picture in (("pareto", _pareto), ("seam", _seam), ("layers", _layers)):
        figure = picture(pyplot, summary)
        if figure is not None:
            figure.savefig(out_dir / f"{name}.png", dpi=110)
            pyplot.close(figure)
            done.append(f"{name}.png")
    return done


def _family(method: str) -> str:
    """Methods that differ in their window or share alone: joined by a line."""
    name = method.split(" w=")[0].rstrip("0123456789%").rstrip("-")
    if name.startswith("legolink") and method == "legolink-0":
        return method  # compiled behind dummy tokens: a method of its own
    return f"{name} w=share" if method.endswith("%") and name == "hypic" else name


def _pareto(pyplot: Any, summary: Summary) -> Any:
    """Score against the share that was computed; a panel for each data set and kind."""
    panels = list(dict.fromkeys((r.dataset, r.kind) for r in summary.rows))
    if not panels:
        return None
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns + 2, 4.2 * lines), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    families = list(dict.fromkeys(_family(r.method) for r in summary.rows))
    colours = dict(zip(families, pyplot.cm.tab20.colors * (1 + len(families) // 20), strict=False))
    for axis, (dataset, kind) in zip(axes.flat, panels, strict=False):
        rows = [r for r in summary.rows if (r.dataset, r.kind) == (dataset, kind)]
        for family in dict.fromkeys(_family(r.method) for r in rows):
            mine = sorted((r for r in rows if _family(r.method) == family), key=lambda r: 1 - r.reused)
            if family == CLOSED_BOOK.name:
                handles[family] = axis.axhline(mine[0].score.value, color="grey", linestyle=":", label=family)
                continue
            handles[family] = _points(axis, mine, family, colours[family])
        axis.set(title=f"{dataset} {kind}".rstrip(), xlabel="share of the prompt computed", ylabel=rows[0].metric)
        if all(r.reused < 1 for r in rows):  # at least one token is always computed
            axis.set_xscale("log")
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.legend(list(handles.values()), list(handles), loc="outside right upper", fontsize="small")
    return figure


def _points(axis: Any, rows: list[Row], label: str, colour: Any) -> Any:
    x = [1 - r.reused for r in rows]
    y = [r.score.value for r in rows]
    below = [r.score.value - (r.score.value if r.score.low is None else r.score.low) for r in rows]
    above = [(r.score.value if r.score.high is None else r.score.high) - r.score.value for r in rows]
    marker = "*" if label == FULL.name else "o"
    bars = axis.errorbar(x, y, (below, above), marker=marker, markersize=7, capsize=2, color=colour, label=label)
    if len(rows) > 1:
        for r, at_x, at_y in zip(rows, x, y, strict=True):
            text = r.method.rsplit("=", 1)[-1].rsplit("-", 1)[-1]
            axis.annotate(text, (at_x, at_y), textcoords="offset points", xytext=(4, 4), fontsize="x-small")
    return bars


def _seam(pyplot: Any, summary: Summary) -> Any:
    """Error by distance from the start of a document, which should be gone after the first tokens."""
    curves = {
        m: list(d.distance.mean[:SHOWN_DISTANCE])
        for m, d in summary.deviations.items()
        if d.distance.mean and m != FULL.name
    }
    if not curves:
        return None
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for colour, (method, values) in zip(_colours(pyplot, len(curves)), curves.items(), strict=False):
        axis.plot(range(len(values)), [v or float("nan") for v in values], marker=".", label=method, color=colour)
    axis.set(xlabel="tokens from the start of the document", ylabel="relative error", yscale="log")
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _layers(pyplot: Any, summary: Summary) -> Any:
    """Error per layer: of its output behind the last document, and of what it holds by then."""
    found = {m: d for m, d in summary.deviations.items() if d.hidden and m != FULL.name}
    if not found:
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    for axis, part in zip(axes, ("hidden", "kept"), strict=True):
        for colour, (method, d) in zip(_colours(pyplot, len(found)), found.items(), strict=False):
            values = [v or float("nan") for v in getattr(d, part)]
            axis.plot(range(len(values)), values, marker="o", markersize=3, label=method, color=colour)
        kinds = next(iter(found.values())).layers
        axis.set_xticks(range(len(kinds)), [f"{i}{'A' if k == 'attention' else ''}" for i, k in enumerate(kinds)])
        title = "output at the tokens behind the documents" if part == "hidden" else "what it holds of the documents"
        axis.set(title=title, xlabel="layer (A: attention)", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative error")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def _colours(pyplot: Any, n: int) -> Any:
    return [pyplot.cm.turbo(i / max(1, n - 1)) for i in range(n)]
