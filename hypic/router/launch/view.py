"""What `GET /workers` says, as tables and bars for a terminal, and as a plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

_STYLES = {"compile": "yellow", "transfer": "cyan", "link": "green", "decode": "blue"}
_GLYPHS = {"compile": "█", "transfer": "▒", "link": "▓", "decode": "─"}


class Bar(NamedTuple):
    """One stretch of a request's Gantt chart, in milliseconds since its arrival."""

    worker: str
    kind: str
    begin: float
    end: float


def bars(request: Mapping[str, Any]) -> list[Bar]:
    """Scatter, transfer and combine of a request, as far as they have come."""
    out = []
    combine, ready = request["combine"], request["forwarded"]
    for line in request["segments"]:
        if line["begun"] is not None and line["done"] is not None:
            out.append(Bar(line["worker"], "compile", line["begun"], line["done"]))
            ready = max(ready or 0.0, line["done"])
        if line["arrived"] is not None:
            out.append(Bar(combine, "transfer", line["sent"], line["arrived"]))
            ready = max(ready or 0.0, line["arrived"])
    if request["first_token"] is not None and ready is not None:
        out.append(Bar(combine, "link", min(ready, request["first_token"]), request["first_token"]))
        if request["ended"] is not None:
            out.append(Bar(combine, "decode", request["first_token"], request["ended"]))
    return out


def workers_table(snapshot: Mapping[str, Any]) -> Table:
    """One row for each worker."""
    alive = sum(w["state"] != "absent" for w in snapshot["workers"])
    costs = snapshot["costs"]
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{alive} of {len(snapshot['workers'])} workers alive, {snapshot['policy']}",
        caption=f"transfers {costs['transfer_gb_s']:.2f} GB/s, messages {1e3 * costs['message_s']:.1f} ms, as measured",
    )
    right = ("port", "restarts", "run", "link", "compile", "queued", "tok/s", "held", "arena", "used")
    for column in ("worker", "state", *right):
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for w in snapshot["workers"]:
        if w["state"] == "absent":
            table.add_row(w["name"], "[red]absent[/]", "", str(w.get("restarts", "")))
            continue
        used = 1 - w["arena_free"] / w["arena_bytes"] if w["arena_bytes"] else 0.0
        state = f"[{'green' if w['state'] == 'alive' else 'yellow'}]{w['state']}[/]"
        counts = (str(w[k]) for k in ("running", "linking", "compiling", "queued_tokens"))
        table.add_row(
            w["name"], state, w["http"].rpartition(":")[2], str(w.get("restarts", "")), *counts,
            f"{w['tokens_per_s']:.0f}", str(w["artifacts"]), size(w["arena_bytes"]), f"{100 * used:.0f}%",
        )  # fmt: skip
    return table


def requests_table(requests: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each request, the newest first."""
    table = Table(title="last requests, ms since arrival", box=SIMPLE_HEAD)
    right = ("tokens", "forwarded", "first", "ended")
    for column in ("request", "combine", *right, "segments", "outcome"):
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for r in reversed(requests):
        roles: dict[str, int] = {}
        for line in r["segments"]:
            roles[line["role"]] = roles.get(line["role"], 0) + 1
        times = ("" if r[k] is None else f"{r[k]:.0f}" for k in ("forwarded", "first_token", "ended"))
        kinds = ", ".join(f"{n} {role}" for role, n in sorted(roles.items()))
        table.add_row(
            r["rid"][:12],
            r["combine"],
            str(r["prompt_tokens"]),
            str(len(r["segments"])),
            *times,
            kinds,
            r["outcome"] or "…",
        )
    return table


def gantt(request: Mapping[str, Any], width: int = 72) -> Iterator[Text]:
    """A line for each worker: who compiled, what was on its way, the link."""
    found = bars(request)
    end = max((b.end for b in found), default=0.0)
    if not end:
        return
    begin = min(0.0, min(b.begin for b in found))
    scale = width / (end - begin)
    for worker in sorted({b.worker for b in found}):
        cells = [(" ", "")] * width
        for bar in sorted((b for b in found if b.worker == worker), key=lambda b: list(_GLYPHS).index(b.kind)):
            first = min(int((bar.begin - begin) * scale), width - 1)
            last = max(int((bar.end - begin) * scale), first + 1)
            cells[first:last] = [(_GLYPHS[bar.kind], _STYLES[bar.kind])] * (min(last, width) - first)
        line = Text(f"{worker:>8} ")
        for glyph, style in cells:
            line.append(glyph, style=style)
        yield line
    yield Text(f"{'':>8} {begin:<{width // 2}.0f}{end:>{width - width // 2}.0f} ms")


def screen(snapshot: Mapping[str, Any], requests: int = 8, width: int = 72) -> Group:
    """All of it: workers, the last requests, and the bars of the last ones that had segments."""
    shown = snapshot["requests"][-requests:]
    parts: list[Any] = [workers_table(snapshot), requests_table(shown)]
    for request in [r for r in shown if r["segments"]][-3:][::-1]:
        name = f"{request['rid'][:8]}: {request['prompt_tokens']} tokens, {len(request['segments'])} segments"
        parts += [Text(""), Text(name, style="bold"), *gantt(request, width)]
    legend = Text("\n")
    for kind, glyph in _GLYPHS.items():
        legend.append(f"{glyph} {kind}   ", style=_STYLES[kind])
    return Group(*parts, legend)


def plot(request: Mapping[str, Any], path: Path) -> None:
    """The Gantt chart of one request. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    found = bars(request)
    workers = sorted({b.worker for b in found}, reverse=True)
    rows = [(w, row) for w in workers for row in (("compile", "link", "decode"), ("transfer",))]
    rows = [(w, kinds) for w, kinds in rows if any(b.worker == w and b.kind in kinds for b in found)]
    colours = {"compile": "tab:orange", "transfer": "tab:cyan", "link": "tab:green", "decode": "tab:blue"}
    figure, axis = pyplot.subplots(figsize=(10, 1.2 + 0.5 * len(rows)), layout="constrained")
    for y, (worker, kinds) in enumerate(rows):
        for b in (b for b in found if b.worker == worker and b.kind in kinds):
            axis.barh(y, b.end - b.begin, left=b.begin, color=colours[b.kind], edgecolor="white", linewidth=0.5)
    axis.set_yticks(range(len(rows)), [f"{w} in" if kinds == ("transfer",) else w for w, kinds in rows])
    title = f"{request['prompt_tokens']} tokens, {len(request['segments'])} segments, combined by {request['combine']}"
    axis.set(xlabel="ms since arrival", title=title)
    axis.legend(handles=[Patch(color=colours[k], label=k) for k in colours if any(b.kind == k for b in found)])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def size(nbytes: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError
