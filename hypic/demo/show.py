"""The demo's table."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hypic.demo.scenario import COLD, CheckRow, DemoResult, RequestRow, describe

_COLUMNS = (
    "request",
    "TTFT\nms",
    "prompt\ntokens",
    "\nradix",
    "arti-\nfacts",
    "recom-\nputed",
    "com-\npiled",
    "\nsegments",
    "max\n|Δ|",
)
_LEFT = (0, 7)
_MINUS = "-"


def show(result: DemoResult, console: Console) -> None:
    """One row for each request, one for P1 and one for P4, and under them what the figures are."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if i in _LEFT else "right", no_wrap=True)
    rows = _paired(result.requests)
    for i, row in enumerate(rows):
        table.add_row(*_request(row), end_section=i == len(rows) - 1)
    for check in result.checks:
        table.add_row(*_check(check))
    console.print(table)
    console.print(Text(f"\n{_caption(result)}", style="dim"))
    for problem in result.problems:
        console.print(Text(f"wrong: {problem}", style="red"))


def _paired(rows: Sequence[RequestRow]) -> list[RequestRow]:
    """Every cold answer right behind the warm one that it was compared with; they were sent in another order."""
    cold = {row.name: row for row in rows if row.name.endswith(COLD)}
    out = []
    for row in rows:
        if row.name not in cold:
            out += [row, *([cold[row.name + COLD]] if row.name + COLD in cold else [])]
    return out


def _request(row: RequestRow) -> list[Text | str]:
    counts = (row.prompt_tokens, row.reused_radix, row.reused_artifacts, row.recomputed, row.compiled)
    name = "  the same, cold" if row.name.endswith(COLD) else row.name
    return [name, f"{row.ttft_ms:.0f}", *(f"{n:,}" for n in counts), describe(row.outcomes), _delta(row)]


def _check(row: CheckRow) -> list[Text | str]:
    blank = [""] * (len(_COLUMNS) - 3)
    return [f"{row.name}: {row.what}", *blank, f"{row.compared:,} values", _delta(row)]


def _delta(row: RequestRow | CheckRow) -> Text | str:
    if row.delta is None:
        return Text("wrong", style="red") if row.problems else _MINUS
    return Text(f"{row.delta:.1e}", style="red" if row.problems else "green")


def _caption(result: DemoResult) -> str:
    weights = "random weights, so the answers say nothing" if result.random_weights else "its own weights"
    return (
        f"{result.model}: {weights}; float32, SGLang's torch_native attention, {os.cpu_count()} CPU cores "
        f"({platform.machine()}). "
        "TTFT: from sending the request to the first token at the client, one request each, batch 1. radix and artifacts: "
        "tokens reused from SGLang's prefix cache and from artifacts. compiled: tokens of segments compiled for the "
        "request. max |Δ|: largest difference of logprobs to the same prompt on an empty cache, or as the check says; "
        f"bound {result.tolerance:.0e}. To compare with: the first prompt with nothing marked differs from cold by "
        f"{result.contrast.full:.1e}, which is what position-independent caching approximates, and by "
        f"{result.contrast.order:.1e} with its documents in another order."
    )
