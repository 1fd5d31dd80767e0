"""What ``hypic eval`` leaves in its folder: eval.json, eval.md and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hypic.eval import plots
from hypic.eval.items import Item, Outcome, Probe
from hypic.eval.methods import CLOSED_BOOK
from hypic.eval.stats import Estimate
from hypic.eval.summary import Row, Summary, summarise

LEGEND = """\
Score: the data set's official metric in points of 100; [95% interval], drawn over sets of documents, 2,000 times. Where all
sets agree the interval has no width; with n questions all right, up to 3/n may still be wrong. Against full: the mean
difference to full recompute, question by question. Guessed: the score without documents. KL, agreement: of each token of full
recompute's answer, forced on the method, in nats and as the share of tokens where both have the same most likely one.
Computed: the share of prompt tokens that was not reused.
"""


def write(
    outcomes: Iterable[Outcome],
    items: Iterable[Item],
    out_dir: Path,
    meta: Mapping[str, Any],
    probes: Iterable[Probe] = (),
) -> Summary:
    """Write eval.json, eval.md and, if matplotlib is there, pareto.png, seam.png and layers.png.

    Args:
        outcomes: of every method, in any order; a method may lack items, the report says so.
        items: all that were asked.
        out_dir: made if need be.
        meta: what the run says of itself, JSON values only: versions, machine, model, seeds, command, and under "data"
            the ``about`` of every loaded data set.
        probes: for the seam and layer plots.
    Returns:
        what eval.json holds, read back with ``msgspec.json.decode(..., type=Summary)``.
    Raises:
        ValueError: items or outcomes contradict each other (:func:`hypic.eval.summary.summarise`).
    """
    summary = summarise(outcomes, items, meta, probes)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "eval.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    pictures = plots.draw(summary, out_dir)
    (out_dir / "eval.md").write_text(markdown(summary, pictures))
    return summary


def markdown(summary: Summary, pictures: Iterable[str] = ()) -> str:
    """A table per data set and kind, what the run says of itself, and the pictures."""
    parts = ["# hypic eval\n", _meta(summary.meta), LEGEND]
    for dataset, kind in dict.fromkeys((r.dataset, r.kind) for r in summary.rows):
        rows = [r for r in summary.rows if (r.dataset, r.kind) == (dataset, kind)]
        parts.append(_table(f"{dataset} {kind}".rstrip(), rows))
    parts += [f"![{Path(p).stem}]({p})\n" for p in pictures]
    return "\n".join(parts)


def _meta(meta: Mapping[str, Any]) -> str:
    lines = []
    for key, value in meta.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        lines.append(f"- {key}: {text}")
    return "\n".join(lines) + "\n"


def _table(title: str, rows: list[Row]) -> str:
    metric, most = rows[0].metric, max(r.n for r in rows)
    sets = max(r.sets for r in rows)
    guessed = next((r.score for r in rows if r.method == CLOSED_BOOK.name), None)
    head = ("method", metric, "against full", "guessed", "exact", "contains", "KL", "agreement", "computed")
    lines = [f"## {title}\n", f"n = {most} questions about {sets} set{'s' * (sets != 1)} of documents.\n"]
    lines += ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for r in rows:
        closed = r.method == CLOSED_BOOK.name
        cells = (
            r.method + (f" (n = {r.n})" if r.n != most else ""),
            _interval(r.score),
            _interval(r.difference, "+"),
            "" if closed or guessed is None else f"{guessed.value:.1f}",
            f"{r.exact.value:.1f}",
            f"{r.contains.value:.1f}",
            "" if r.kl is None else f"{r.kl.value:.4f}",
            "" if r.agreement is None else f"{100 * r.agreement.value:.1f}%",
            "" if closed else f"{100 * (1 - r.reused):.1f}%",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _interval(e: Estimate | None, sign: str = "") -> str:
    if e is None:
        return ""
    value = f"{e.value:{sign}.1f}"
    return value if e.low is None or e.high is None else f"{value} [{e.low:{sign}.1f}, {e.high:{sign}.1f}]"
