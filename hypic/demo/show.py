"""The demo's tables: what was reused and how exact it is, and the answers."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hypic.demo.checks import CheckRow, describe
from hypic.demo.scenario import COLD, HEAD, ORDER, TURN, Answer, DemoResult, RequestRow

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
_ANSWERS = {
    "nothing marked": "nothing\nmarked",
    "cold": "\ncold",
    ORDER: "other\norder",
    HEAD: "new head\nand order",
    TURN: "next\nturn",
}
"""Rows whose answers are shown; those to the same prompt again are the same."""


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
    if not result.random_weights:
        console.print()
        console.print(_answers(result))
    console.print(Text(f"\n{_caption(result)}", style="dim"))
    for problem in result.problems:
        console.print(Text(f"wrong: {problem}", style="red"))


def _answers(result: DemoResult) -> Table:
    """A row for each question, a column for each way to ask it."""
    by_name = {row.name: row.answers for row in result.requests}
    columns = {title: by_name[name] for name, title in _ANSWERS.items() if name in by_name}
    columns["other order\nno seams"] = result.contrast.without_seams
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in ("\nWhat is the", *columns):
        table.add_column(title, no_wrap=True)
    for i, first in enumerate(next(iter(columns.values()), [])):
        asked = f"{first.question.removeprefix('What is the ')}\n  {first.kind}"
        table.add_row(asked, *(_judged(answers[i]) for answers in columns.values()))
    return table


def _judged(answer: Answer) -> Text:
    words = " ".join(answer.text.split())
    return Text(words, style="green") if answer.right else Text(f"{words} ✗ {answer.expected}", style="red")


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
    if result.random_weights:
        weights = "random weights, so its answers say nothing and are not shown"
        about_answers = ""
    else:
        weights = "its own weights"
        answers = [answer for row in result.requests for answer in row.answers]
        about_answers = (
            f"Answers: {sum(a.right for a in answers)} of {len(answers)} are right by the documents in the order in which "
            "they were sent; ✗: wrong, and what is right. no seams: the oracle's answers if the first tokens of a document "
            "came from the cache too, computed behind nothing. "
        )
    return (
        f"{result.model}: {weights}; float32, SGLang's torch_native attention, {os.cpu_count()} CPU cores "
        f"({platform.machine()}). {about_answers}"
        "Counts and TTFT are those of a row's first question. TTFT: from sending the request to the first token at the "
        "client, one request each, batch 1. radix and artifacts: "
        "tokens reused from SGLang's prefix cache and from artifacts. compiled: tokens of segments compiled for the "
        "request. max |Δ|: largest difference of logprobs to the same prompt on an empty cache, or as the check says; "
        f"bound {result.tolerance:.0e}. To compare with: the first prompt with nothing marked differs from cold by "
        f"{result.contrast.full:.1e}, which is what position-independent caching approximates, and by "
        f"{result.contrast.order:.1e} with its documents in another order."
    )
