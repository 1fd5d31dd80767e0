"""How answers are judged: by logprobs against another answer, against full recompute (P1), against the oracle (P4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from hypic.demo.client import Client, TokenAnswer
from hypic.demo.pages import Prompt, Question, facts
from hypic.report import Report

TOLERANCE = 1e-4
"""Bound on differences of logprobs; the demo serves in float32 (docs/SEMANTICS.md)."""

COMPILED = frozenset({"compiled"})
HIT = frozenset({"hit_device", "hit_radix"})

_P1_TOKENS = 2
_WATCHED = 4096
"""Most token ids whose logprobs P1 compares at every step."""


class CheckRow(msgspec.Struct, kw_only=True):
    """P1 or P4 on the demo's documents: the largest difference of logprobs, and how many were compared."""

    name: str
    what: str
    delta: float
    compared: int
    problems: list[str] = []


class Segment(NamedTuple):
    """Tokens [start, end) of a prompt, and what became of them."""

    start: int
    end: int
    outcome: str


def run_checks(
    client: Client, oracle: Any, asked: Sequence[Prompt], max_tokens: int, say: Callable[[str], None]
) -> list[CheckRow]:
    """P4 on the prompts ``asked`` and P1 on the documents of the first, all warm. Raises RequestError.

    Args:
        oracle: :class:`hypic.check.oracle.Oracle` of the served model.
    """
    say("P4: the oracle reads the prompts")
    p4 = CheckRow(name="P4", what="the oracle", delta=0.0, compared=0)
    answers = [client.chat_tokens(prompt.messages(), max_tokens) for prompt in asked]
    for prompt, answer in zip(asked, answers, strict=True):
        found = segments(answer.report)
        if len(found) != len(prompt.documents) or not {s.outcome for s in found} <= HIT:
            p4.problems.append(f"segments {describe([s.outcome for s in found])}, not {len(prompt.documents)} hits")
        truth = oracle.link(
            answer.prompt,
            [(s.start, s.end) for s in found],
            w=answer.report.seam_window,
            n_new=len(answer.ids),
            forced=answer.ids,
        )
        rows = zip(truth.logprobs, answer.steps, strict=True)
        _absorb(p4, answer, [{token: float(row[token]) for token in step} for row, step in rows])
    say("P1: documents by themselves")
    p1 = CheckRow(name="P1", what="full recompute", delta=0.0, compared=0)
    _check_p1(client, asked[0], min(truth.logprobs.shape[1], _WATCHED), p1)
    for row in (p1, p4):
        if not row.delta <= TOLERANCE:
            row.problems.append(f"logprobs differ by {row.delta:.1e}")
    return [p1, p4]


def answer_without_seams(client: Client, oracle: Any, prompt: Prompt) -> str:
    """What the oracle answers, in one token, if all of every segment comes from its artifact (w = 0)."""
    asked = client.chat_tokens(prompt.messages(), 1)
    truth = oracle.link(asked.prompt, [(s.start, s.end) for s in segments(asked.report)], w=0, n_new=1)
    return client.text(truth.ids)


def _check_p1(client: Client, first: Prompt, watched: int, row: CheckRow) -> None:
    """Every other document of ``first``, then a question that it answers: as an ordinary request, compiled and joined, and
    joined again."""
    for i, document in enumerate(first.documents[::2]):
        attribute, name = next(iter(facts([document])))
        prompt = Prompt(first.head, [document], Question("", attribute, name))
        asked = client.chat_tokens(prompt.messages(), 1)
        ((start, end, _),) = segments(asked.report)
        ids = asked.prompt[start:]
        full = client.generate(ids, (), f"P1 full {i}", _P1_TOKENS, watched)
        for outcomes in (COMPILED, HIT):
            linked = client.generate(ids, [(0, end - start)], "P1", _P1_TOKENS, watched)
            became = [s.outcome for s in segments(linked.report)]
            if len(became) != 1 or became[0] not in outcomes:
                row.problems.append(f"document {i}: {describe(became)}, not {' or '.join(sorted(outcomes))}")
            _absorb(row, linked, full.steps, full.ids)


def _absorb(
    row: CheckRow, answer: TokenAnswer, truth: Sequence[dict[int, float]], ids: Sequence[int] | None = None
) -> None:
    delta, compared = distance(answer.steps, truth, list(zip(answer.ids, ids or answer.ids, strict=True)))
    row.delta, row.compared = max(row.delta, delta), row.compared + compared


def segments(report: Report) -> list[Segment]:
    """The segments of a report, in natural order."""
    return [Segment(s.start, s.start + s.tokens, s.outcome or "") for s in report.spans if s.kind == "segment"]


def distance(
    a: Sequence[dict[Any, float]], b: Sequence[dict[Any, float]], tokens: Sequence[tuple[Any, Any]]
) -> tuple[float, int]:
    """The largest difference of logprobs, and how many were compared.

    Args:
        a, b: for each step logprobs by token; a step where either has none is passed over.
            What only one side lists is at most as likely on the other as the least
            likely that the other lists, and is compared with that where it is above it.
        tokens: what was chosen at each step; once the two differ, what follows answers another question.
    """
    worst, compared = 0.0, 0
    for x, y, (taken, other) in zip(a, b, tokens, strict=True):
        known = x and y
        floor = {id(x): min(x.values()), id(y): min(y.values())} if known else {}
        for token in x.keys() | y.keys() if known else ():
            if token in x and token in y:
                error = abs(x[token] - y[token])
                compared += 1
            else:
                there, missing = (x, y) if token in x else (y, x)
                error = max(there[token] - floor[id(missing)], 0.0)
            worst = max(worst, math.inf if math.isnan(error) else error)
        if taken != other:
            break
    return worst, compared


def describe(outcomes: Sequence[str]) -> str:
    """``8 hit_device``, in order of first appearance."""
    return ", ".join(f"{n} {name}" for name, n in Counter(outcomes).items()) or "none"
