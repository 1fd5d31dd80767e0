"""LongBench (arXiv 2308.14508, MIT licence): HotpotQA, TriviaQA, MultiNews and GovReport from its JSONL files.

Prompts, metrics and output limits are LongBench's. What each file's ``context`` is made of becomes segments: passages;
TriviaQA's solved examples and the passage of the question; parts of about 2,000 characters of a government report.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hypic.eval.data import fetch
from hypic.eval.data.common import Loaded, Wanted
from hypic.eval.data.errors import DataError
from hypic.eval.items import Item, Piece


class Task(NamedTuple):
    """One of LongBench's tasks.

    Attributes:
        prompt: with {context} and perhaps {input}. closed_book: ours; LongBench has none.
        chat: false where LongBench leaves the chat template out (few-shot tasks).
        first_line: LongBench judges the first line of the answer.
        starts: where a segment of the context begins; None for parts of a size.
    """

    prompt: str
    closed_book: str
    metric: str
    max_new_tokens: int
    starts: re.Pattern[str] | None
    chat: bool = True
    first_line: bool = False


PART = 2000
"""Characters of a segment where the context has no passages."""
_PASSAGE = re.compile(r"^Passage \d+:", re.M)
_EXAMPLE = re.compile(r"^Passage:", re.M)
_QUESTION = "\nQuestion:"
_ONLY = "Only give me the answer and do not output any other words."
_FEW_SHOT = f"Answer the question based on the given passage. {_ONLY} The following are some examples.\n\n"
_NEWS = "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}\n\n"
)

TASKS: Mapping[str, Task] = {
    "hotpotqa": Task(
        f"Answer the question based on the given passages. {_ONLY}\n\nThe following are given passages.\n{{context}}\n\n"
        f"Answer the question based on the given passages. {_ONLY}\n\nQuestion: {{input}}\nAnswer:",
        f"Answer the question. {_ONLY}\n\nQuestion: {{input}}\nAnswer:",
        "f1",
        32,
        _PASSAGE,
    ),
    "triviaqa": Task(
        _FEW_SHOT + "{context}\n\n{input}",
        f"Answer the question. {_ONLY} The following are some examples.\n\n{{context}}\n\n{{input}}",
        "f1",
        32,
        _EXAMPLE,
        chat=False,
        first_line=True,
    ),
    "multi_news": Task(
        _NEWS + "Now, write a one-page summary of all the news.\n\nSummary:",
        _NEWS + "Now, write a one-page summary of all the news.\n\nSummary:",
        "rouge_l",
        512,
        _PASSAGE,
    ),
    "gov_report": Task(
        _REPORT + "Now, write a one-page summary of the report.\n\nSummary:",
        _REPORT + "Now, write a one-page summary of the report.\n\nSummary:",
        "rouge_l",
        512,
        None,
    ),
}


def load(wanted: Wanted) -> Loaded:
    """One option: TASK=FILE."""
    if len(wanted.options) != 1:
        raise DataError(f"{wanted.spec}: should read longbench:TASK=FILE, with TASK one of {', '.join(TASKS)}")
    wanted.only(*TASKS)
    name, file = next(iter(wanted.options.items()))
    path = Path(file).expanduser()
    rows = list(read(path, name))
    if wanted.n is not None and wanted.n < len(rows):
        rows = wanted.rng().sample(rows, wanted.n)
    notes: Counter[str] = Counter()
    items = [_item(wanted, name, row, notes) for row in rows]
    source = f"{path.name} sha256 {fetch.sha256(path)}"
    licence = "LongBench: MIT; the texts are those of its sources"
    return Loaded(wanted, items, source=source, licence=licence, notes=notes)


def read(path: Path, task: str) -> Iterator[dict[str, Any]]:
    """The rows of a file, each with an ``_id`` of its own. Raises DataError with file, line and what is missing."""
    seen: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if line.strip():
                    row = _row(line, task, f"{path}:{number}")
                    row["_id"] = str(row.get("_id") or number)
                    first = seen.setdefault(row["_id"], number)
                    if first != number:
                        raise DataError(
                            f"{path}:{number}: _id {row['_id']!r} is that of line {first}: remove one of them"
                        )
                    yield row
    except FileNotFoundError:
        remedy = f"get {task}.jsonl from LongBench's data.zip and give its path"
        raise DataError(f"longbench: {path} does not exist: {remedy}") from None
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: {e}: it should be a UTF-8 file of LongBench's JSON lines") from None


def _row(line: str, task: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as e:
        raise DataError(f"{place}: no JSON ({e}): every line is one object, download the file again") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__} instead of an object")
    for field in ("context", "input"):
        if not isinstance(row.get(field), str):
            raise DataError(f"{place}: {field!r} should be a text, and is {_kind(row, field)}")
    if not row["context"].strip():
        raise DataError(f"{place}: 'context' is empty")
    answers = row.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) for a in answers):
        raise DataError(f"{place}: 'answers' should be a list of texts, and is {_kind(row, 'answers')}")
    if row.get("dataset", task) not in (task, f"{task}_e"):
        raise DataError(f"{place}: a line of {row['dataset']}, but the file was given as {task}")
    return row


def _kind(row: Mapping[str, Any], field: str) -> str:
    if field not in row:
        return "missing"
    return "empty" if row[field] == [] else type(row[field]).__name__


def _item(wanted: Wanted, name: str, row: Mapping[str, Any], notes: Counter[str]) -> Item:
    task = TASKS[name]
    few_shot = task.starts is _EXAMPLE
    pieces = _fill(task.prompt, _segments(row["context"], task), _input(row["input"], task))
    examples = [Piece(_without_passages(row["context"]))] if few_shot else []
    asked = _without_passages(row["input"]) if few_shot else row["input"]
    closed = _fill(task.closed_book, examples, [Piece(asked)])
    room = task.max_new_tokens
    return Item(
        id=f"{name}/{row['_id']}",
        dataset=name,
        pieces=wanted.template.write(pieces, room, notes, chat=task.chat),
        closed_book=wanted.template.write(closed, room, chat=task.chat),
        answers=tuple(row["answers"]),
        metric=task.metric,
        max_new_tokens=room,
        first_line=task.first_line,
    )


def _fill(prompt: str, context: list[Piece], question: list[Piece]) -> list[Piece]:
    fields = {"{context}": context, "{input}": question}
    return [p for part in re.split(r"(\{context\}|\{input\})", prompt) for p in fields.get(part, [Piece(part)])]


def _segments(context: str, task: Task) -> list[Piece]:
    """The context as segments that join to it exactly; what stands before the first passage is plain."""
    if task.starts is None:
        return [Piece(p, True) for p in parts(context, PART)]
    starts = [m.start() for m in task.starts.finditer(context)]
    if not starts:
        return [Piece(context, True)]
    ends = [*starts[1:], len(context)]
    return [Piece(context[: starts[0]]), *(Piece(context[a:b], True) for a, b in zip(starts, ends, strict=True))]


def _input(text: str, task: Task) -> list[Piece]:
    """TriviaQA's question comes behind a passage of its own."""
    at = text.rfind(_QUESTION)
    if task.starts is not _EXAMPLE or at < 0:
        return [Piece(text)]
    return [Piece(text[: at + 1], True), Piece(text[at + 1 :])]


def _without_passages(text: str) -> str:
    """TriviaQA's examples as question and answer alone."""
    return re.sub(r"^Passage:.*?(?=^Question:)", "", text, flags=re.M | re.S)


def parts(text: str, size: int) -> list[str]:
    """``text`` cut behind line breaks, else behind sentences, else words, into parts of ``size`` characters at most."""
    out = []
    while len(text) > size:
        ends = (text.rfind(mark, 0, size) + len(mark) for mark in ("\n", ". ", " "))
        cut = next((end for end in ends if size // 2 < end <= size), size)
        out.append(text[:cut])
        text = text[cut:]
    return [*out, text]
