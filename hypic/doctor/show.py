"""Findings as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hypic.doctor.findings import Findings, ModelFinding

_GOOD, _BAD = Text("ok", style="green"), Text("no", style="bold red")


def show(found: Findings, console: Console) -> None:
    """Print everything; what is wrong comes last, so that it is read."""
    _versions(found, console)
    if found.hooks:
        _hooks(found, console)
    _flags(found, console)
    if found.model is not None and found.model.families:
        _model(found.model, console)
    for problem in found.problems:
        console.print(Text(f"problem: {problem}", style="red"))
    if not found.problems:
        fits = f"hypic fits SGLang {found.supported_sglang} on this machine"
        console.print(Text(fits + (f", and {found.model.path}" if found.model else ""), style="green"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _versions(found: Findings, console: Console) -> None:
    table = _table("Installation", "", "package", "version", "")
    for v in found.versions:
        table.add_row(_BAD if v.problem else _GOOD, v.name, v.version or "-", v.problem or "")
    console.print(table)
    if (p := found.platform) is not None:
        free, total = size(p.memory_free), size(p.memory_total)
        console.print(f"\n{p.mode}: {p.description}; {free} of {total} free\n")


def _hooks(found: Findings, console: Console) -> None:
    broken = sum(h.problem is not None for h in found.hooks)
    table = _table(f"Hooks on SGLang: {len(found.hooks) - broken} in force, {broken} not", "", "target", "kind", "why")
    for h in found.hooks:
        table.add_row(_BAD if h.problem else _GOOD, h.target, h.kind, h.problem or h.reason)
    console.print(table)
    console.print()


def _flags(found: Findings, console: Console) -> None:
    table = _table("Flags that hypic refuses", "flag", "because")
    for r in found.refused_flags:
        table.add_row(Text(r.flag, style="bold red" if r.given else ""), r.reason)
    console.print(table)
    console.print()


def _model(model: ModelFinding, console: Console) -> None:
    known = "" if model.tested else "; not among the architectures of hypic's tests, the start-up self-check decides"
    table = _table(f"{model.path}: {model.architecture}, {model.dtype}, TP {model.tp_size}{known}", "", "")
    if model.weight_bytes is not None:
        there = f"{size(model.weight_bytes)} in all"
        table.add_row(
            "weights", there if model.weight_bytes else "no *.safetensors there; --load-format dummy needs none"
        )
    for f in model.families:
        table.add_row(f.family, f"{f.layers} layers: {f.shape}")
    fixed = model.transition_bytes + model.state_bytes + model.conv_bytes
    parts = f"T {size(model.transition_bytes)}, S {size(model.state_bytes)}, conv {size(model.conv_bytes)}"
    table.add_row("artifact, fixed part", f"{size(fixed)} ({parts})")
    table.add_row("artifact, each interior token", size(model.token_bytes))
    table.add_row("arena", f"{size(model.arena_bytes)} ({model.arena_source})")
    for s in model.segments:
        table.add_row(f"segment of {s.tokens} tokens", f"{size(s.bytes)}; the arena holds {s.fit}")
    console.print(table)
    console.print("All sizes are for one rank.\n")


def size(nbytes: int) -> str:
    """``1536`` -> ``1.5 KiB``."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" or value >= 100 else f"{value:.1f} {units[0]}"
