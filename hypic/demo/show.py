"""The demo's table."""

from __future__ import annotations

import os
import platform

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hypic.demo.scenario import CheckRow, DemoResult, RequestRow, describe

_COLUMNS = (
    "request",
    "TTFT ms",
    "prompt",
    "radix",
    "artifacts",
    "recomputed",
    "compiled",
    "segments",
    "max |Δlogprob|",
)
_LEFT = ("request", "segments")
_MINUS = "-"


def show(result: DemoResult, console: Console) -> None:
    """One row for each request, one for P1 and one for P4, and under them what the figures are."""
    table = Table(
        title="A prompt of documents through /v1/chat/completions", title_justify="left", caption=_caption(result)
    )
    table.caption_justify = "left"
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _LEFT else "right")
    for i, row in enumerate(result.requests):
        table.add_row(*_request(row), end_section=i == len(result.requests) - 1)
    for check in result.checks:
        table.add_row(*_check(check))
    console.print(table)
    for problem in result.problems:
        console.print(Text(f"wrong: {problem}", style="red"))


def _request(row: RequestRow) -> list[Text | str]:
    counts = (row.prompt_tokens, row.reused_radix, row.reused_artifacts, row.recomputed, row.compiled)
    return [row.name, f"{row.ttft_ms:.0f}", *(f"{n:,}" for n in counts), describe(row.outcomes), _delta(row)]


def _check(row: CheckRow) -> list[Text | str]:
    blank = [""] * (len(_COLUMNS) - 3)
    return [f"{row.name}: {row.what}", *blank, f"{row.compared:,} logprobs", _delta(row)]


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
        "request. max |Δlogprob|: against the same prompt after /flush_cache, or as the check says; "
        f"bound {result.tolerance:.0e}."
    )
