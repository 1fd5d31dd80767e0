"""What the demo asks and what must come out.

Three questions to one set of documents: as ordinary requests, which is full recompute; marked, on an empty cache; again;
with the documents in another order; under a new head; in the next turn of a conversation. Warm answers are compared with the
answer to the same prompt after `/flush_cache`, and every answer with what the documents say. ``checks`` has P1 and P4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hypic.demo.checks import COMPILED, HIT, TOLERANCE, CheckRow, answer_without_seams, describe, distance, segments
from hypic.demo.client import ChatAnswer, Client
from hypic.demo.pages import QUESTIONS, Prompt, is_right, prompts

COLD = ", cold"
"""Ends the names of requests that were sent again on an empty cache, to compare with."""

ORDER, HEAD, TURN = "in another order", "new head and order", "the next turn"

MAX_TOKENS = 8


class Answer(msgspec.Struct, kw_only=True):
    """An answer, and the right one by the documents in the order in which they were sent."""

    question: str
    kind: str
    text: str
    expected: str

    @property
    def right(self) -> bool:
        return is_right(self.text, self.expected)


class RequestRow(msgspec.Struct, kw_only=True):
    """A prompt of the demo with each question in turn; counts and times are those of the first request.

    Attributes:
        name: what was sent.
        ttft_ms: time to first token at the client, HTTP and tokenising included; one request, not a median.
        prompt_tokens, reused_radix, reused_artifacts, recomputed, compiled: as hypic reports them.
        cached_tokens: as SGLang's ``usage`` has it.
        outcomes: of each marked segment, in natural order.
        delta: largest difference of logprobs between answers and those to the same prompts on an empty cache.
        compared: number of logprobs in ``delta``.
        answers: one for each question.
        problems: what is not as it must be; a wrong answer is the model's affair and not among them.
    """

    name: str
    ttft_ms: float
    prompt_tokens: int
    reused_radix: int
    reused_artifacts: int
    recomputed: int
    compiled: int
    cached_tokens: int
    outcomes: list[str]
    delta: float | None = None
    compared: int = 0
    answers: list[Answer] = []
    problems: list[str] = []


class Contrast(msgspec.Struct, kw_only=True):
    """What the figures of the table are to be seen beside; neither is an error.

    Attributes:
        full: largest difference of logprobs between the first prompt served with and without marks, which is what
            position-independent caching approximates.
        order: the same between the first prompt and the one with its documents in another order.
        without_seams: the oracle's answers to the prompts in another order if all of every segment comes from its artifact
            (w = 0), which is what a wrong method would say.
    """

    full: float
    order: float
    without_seams: list[Answer] = []


class DemoResult(msgspec.Struct, kw_only=True):
    """All that the demo found; what ``hypic demo --json`` prints."""

    model: str
    random_weights: bool
    tolerance: float
    seconds: float
    requests: list[RequestRow]
    checks: list[CheckRow]
    contrast: Contrast

    @property
    def problems(self) -> list[str]:
        rows: list[RequestRow | CheckRow] = [*self.requests, *self.checks]
        return [f"{row.name}: {problem}" for row in rows for problem in row.problems]


class _Session:
    """Requests as rows of the table."""

    def __init__(self, client: Client, say: Callable[[str], None]) -> None:
        self.rows: list[RequestRow] = []
        self._client, self._say = client, say

    def ask(
        self, name: str, asked: Sequence[Prompt], outcomes: frozenset[str], *, marked: bool = True, empty: bool = False
    ) -> list[ChatAnswer]:
        """Send the prompts ``asked``, each to an empty cache if ``empty``, and add their row."""
        self._say(name)
        answers, rows = [], []
        for prompt in asked:
            if empty:
                self._client.flush_cache()
            answer = self._client.chat(prompt.messages(marked), MAX_TOKENS)
            row = _row(name, answer, len(prompt.documents) if marked else 0, outcomes)
            row.answers.append(_answer(prompt, answer.text))
            answers.append(answer)
            rows.append(row)
        first, *others = rows
        for row in others:
            first.answers += row.answers
            first.problems += row.problems
        self.rows.append(first)
        return answers


def run_requests(
    client: Client, documents: Sequence[str], say: Callable[[str], None]
) -> tuple[list[RequestRow], Contrast, list[Prompt]]:
    """The rows of the table in the order in which requests are sent, their contrast, and the prompts that P4 is to judge.

    Raises:
        RequestError: a request failed.
    """
    first, permuted, other = ([*p] for p in zip(*(prompts(documents, q) for q in QUESTIONS), strict=True))
    # Whatever happens once in a server's life must not count: a document of its own, compiled and hit.
    for _ in range(2):
        client.chat(first[0]._replace(documents=["hello world " * 100]).messages(), MAX_TOKENS)
    session = _Session(client, say)
    rows = session.rows
    full = session.ask("nothing marked", first, frozenset(), marked=False, empty=True)
    cold = session.ask("cold", first, COMPILED, empty=True)
    again = session.ask("the same again", first, HIT)
    _compare(rows[-1], again, cold)
    warm = {
        name: (asked, session.ask(name, asked, HIT), rows[-1]) for name, asked in ((ORDER, permuted), (HEAD, other))
    }
    before = [(prompt.question, answer.text) for prompt, answer in zip(other, warm[HEAD][1], strict=True)]
    turns = [prompt._replace(before=[before[i - 1]]) for i, prompt in enumerate(other)]
    warm[TURN] = (turns, session.ask(TURN, turns, HIT), rows[-1])
    for name, (asked, answers, row) in warm.items():
        _compare(row, answers, session.ask(name + COLD, asked[:1], COMPILED, empty=True))
    contrast = Contrast(full=_distance(full[0], cold[0])[0], order=_distance(cold[0], warm[ORDER][1][0])[0])
    return rows, contrast, [first[0], permuted[2], turns[1]]


def without_seams(client: Client, oracle: Any, documents: Sequence[str]) -> list[Answer]:
    """The questions to the documents in another order, answered without any seam: see Contrast."""
    asked = [prompts(documents, question)[1] for question in QUESTIONS]
    return [_answer(prompt, answer_without_seams(client, oracle, prompt)) for prompt in asked]


def _answer(prompt: Prompt, text: str) -> Answer:
    return Answer(question=prompt.question.text, kind=prompt.question.kind, text=text, expected=prompt.expected)


def _compare(row: RequestRow, warm: Sequence[ChatAnswer], cold: Sequence[ChatAnswer]) -> None:
    """As many warm answers as there are cold ones."""
    found = [_distance(a, b) for a, b in zip(warm, cold, strict=False)]
    row.delta, row.compared = max(d for d, _ in found), sum(n for _, n in found)
    if not row.delta <= TOLERANCE:
        row.problems.append(f"logprobs differ from the cold answer's by {row.delta:.1e}")


def _row(name: str, answer: ChatAnswer, marked: int, outcomes: frozenset[str]) -> RequestRow:
    report = answer.report
    found = [s.outcome for s in segments(report)]
    problems = []
    if len(found) != marked or not set(found) <= outcomes:
        wanted = " or ".join(sorted(outcomes)) or "none"
        problems.append(f"segments {describe(found)}, not {marked} {wanted}")
    reused = report.reused_radix + report.reused_artifacts
    if answer.cached_tokens != reused:
        problems.append(f"cached_tokens {answer.cached_tokens}, but the report has {reused}")
    if outcomes == HIT and (report.compiled or not reused):
        problems.append(f"{reused} tokens reused and {report.compiled} compiled, of a prompt that was seen before")
    if outcomes != HIT and reused:
        problems.append(f"{reused} tokens reused on an empty cache")
    return RequestRow(
        name=name,
        ttft_ms=answer.ttft * 1e3,
        prompt_tokens=report.prompt_tokens,
        reused_radix=report.reused_radix,
        reused_artifacts=report.reused_artifacts,
        recomputed=report.recomputed,
        compiled=report.compiled,
        cached_tokens=answer.cached_tokens,
        outcomes=found,
        problems=problems,
    )


def _distance(a: ChatAnswer, b: ChatAnswer) -> tuple[float, int]:
    taken = [(x.token, y.token) for x, y in zip(a.steps, b.steps, strict=False)]
    n = len(taken)  # answers of different lengths differ in a token before the shorter one ends
    return distance([s.top for s in a.steps[:n]], [s.top for s in b.steps[:n]], taken)
