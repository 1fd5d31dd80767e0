"""What the demo asks and what must come out.

One RAG prompt in four forms: cold, again, with its documents in another order, under a new head with a new question.
Each warm answer is compared with the answer to the same prompt after `/flush_cache`. Then the P1 and P4 on the
same documents: full recompute by the server itself, and the oracle, which shares no code with the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from hypic.demo.client import ChatAnswer, Client, TokenAnswer
from hypic.report import Report

TOLERANCE = 1e-4
"""Bound on differences of logprobs; the demo serves in float32 (docs/SEMANTICS.md)."""

COLD = ", cold"
"""Ends the names of requests that were sent again on an empty cache, to compare with."""

NEW_TOKENS = 8
_P1_TOKENS = 4
_WATCHED = 4096
"""Most token ids whose logprobs P1 compares at every step."""

_COMPILED = frozenset({"compiled"})
_HIT = frozenset({"hit_device", "hit_radix"})


class RequestRow(msgspec.Struct, kw_only=True):
    """One request of the demo.

    Attributes:
        name: what was sent.
        ttft_ms: time to first token at the client, HTTP and tokenising included; one request, not a median.
        prompt_tokens, reused_radix, reused_artifacts, recomputed, compiled: as hypic reports them.
        cached_tokens: as SGLang's ``usage`` has it.
        outcomes: of each marked segment, in natural order.
        delta: largest difference of logprobs between this answer and the one to the same prompt on an empty cache.
        compared: number of logprobs in ``delta``.
        problems: what is not as it must be.
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
    problems: list[str] = []


class CheckRow(msgspec.Struct, kw_only=True):
    """P1 or P4 on the demo's documents: the largest difference of logprobs, and how many were compared."""

    name: str
    what: str
    delta: float
    compared: int
    problems: list[str] = []


class Contrast(msgspec.Struct, kw_only=True):
    """What the figures of the table are to be seen beside; neither is an error.

    Attributes:
        full: largest difference of logprobs between the first prompt served with and without marks, which is what
            position-independent caching approximates.
        order: the same between the first prompt and the one with its documents in another order.
    """

    full: float
    order: float


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


class Prompt(NamedTuple):
    """A chat prompt of documents, each of them a segment."""

    head: str
    documents: Sequence[str]
    question: str

    def messages(self, marked: bool = True) -> list[dict[str, Any]]:
        mark = {"cache_control": {"type": "segment"}} if marked else {}
        parts: list[dict[str, Any]] = [{"type": "text", "text": text, **mark} for text in self.documents]
        parts.append({"type": "text", "text": self.question})
        return [{"role": "system", "content": self.head}, {"role": "user", "content": parts}]


def load_documents() -> list[str]:
    """The texts that come with the demo, by name."""
    files = sorted((resources.files("hypic.demo") / "documents").iterdir(), key=lambda f: f.name)
    return [f.read_text(encoding="utf-8").strip() for f in files if f.name.endswith(".md")]


def prompts(documents: Sequence[str]) -> tuple[Prompt, Prompt, Prompt]:
    """The first prompt, the same in another order, and one with a new head and question."""
    first = Prompt(
        "Answer from the documents.",
        documents,
        "\n\nFor how long must an oxygen atom be left in peace to shine red, and at what height is that possible?",
    )
    shuffled = [*documents[1::2], *reversed(documents[::2])]
    other = Prompt(
        "You help visitors of a small museum of science. Today is Thursday; the reading room closes at six. Use nothing "
        "but the texts below, and say so if they do not hold the answer.",
        shuffled[3:] + shuffled[:3],
        "\n\nBy how much was the platinum bar of 1799 too short?",
    )
    return first, first._replace(documents=shuffled), other


def run_requests(
    client: Client, documents: Sequence[str], say: Callable[[str], None]
) -> tuple[list[RequestRow], Contrast]:
    """The rows of the table, in the order in which the requests are sent, and their contrast. Raises RequestError."""
    first, permuted, other = prompts(documents)
    # Whatever happens once in a server's life must not count: a document of its own, compiled and hit.
    for _ in range(2):
        client.chat(Prompt("Warm up.", ["hello world " * 100], "Ready?").messages(), NEW_TOKENS)
    rows: list[RequestRow] = []

    def ask(name: str, prompt: Prompt, outcomes: frozenset[str], *, marked: bool = True) -> ChatAnswer:
        say(name)
        answer = client.chat(prompt.messages(marked), NEW_TOKENS)
        rows.append(_row(name, answer, len(documents) if marked else 0, outcomes))
        return answer

    def compare(row: RequestRow, warm: ChatAnswer, cold: ChatAnswer) -> None:
        row.delta, row.compared = _distance(warm, cold)
        if not row.delta <= TOLERANCE:
            row.problems.append(f"logprobs differ from the cold answer's by {row.delta:.1e}")

    client.flush_cache()
    full = ask("nothing marked", first, frozenset(), marked=False)
    client.flush_cache()
    cold = ask("cold", first, _COMPILED)
    again = ask("the same again", first, _HIT)
    compare(rows[-1], again, cold)
    warm = []
    for name, prompt in (("in another order", permuted), ("new head and question", other)):
        warm.append((name, prompt, ask(name, prompt, _HIT), rows[-1]))
    for name, prompt, answer, row in warm:
        client.flush_cache()
        compare(row, answer, ask(name + COLD, prompt, _COMPILED))
    return rows, Contrast(full=_distance(full, cold)[0], order=_distance(cold, warm[0][2])[0])


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
    if outcomes == _HIT and (report.compiled or not reused):
        problems.append(f"{reused} tokens reused and {report.compiled} compiled, of a prompt that was seen before")
    if outcomes != _HIT and reused:
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


def run_checks(client: Client, oracle: Any, documents: Sequence[str], say: Callable[[str], None]) -> list[CheckRow]:
    """P1 on every document and P4 on every prompt, all warm. Raises RequestError.

    Args:
        oracle: :class:`hypic.check.oracle.Oracle` of the served model.
    """
    say("P4: the oracle reads the prompts")
    p4 = CheckRow(name="P4", what="the oracle", delta=0.0, compared=0)
    asked = [client.chat_tokens(p.messages(), NEW_TOKENS) for p in prompts(documents)]
    for answer in asked:
        found = segments(answer.report)
        if len(found) != len(documents) or not {s.outcome for s in found} <= _HIT:
            p4.problems.append(f"segments {describe([s.outcome for s in found])}, not {len(documents)} hits")
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


def _check_p1(client: Client, asked: TokenAnswer, watched: int, row: CheckRow) -> None:
    """Every other segment of ``asked``, then its question: as an ordinary request, compiled and joined, and joined again."""
    found = segments(asked.report)
    question = asked.prompt[found[-1].end :]
    for i, (start, end, _) in enumerate(found[::2]):
        ids = asked.prompt[start:end] + question
        full = client.generate(ids, (), f"P1 full {i}", _P1_TOKENS, watched)
        for outcomes in (_COMPILED, _HIT):
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


class Segment(NamedTuple):
    """Tokens [start, end) of a prompt, and what became of them."""

    start: int
    end: int
    outcome: str


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


def _distance(a: ChatAnswer, b: ChatAnswer) -> tuple[float, int]:
    taken = [(x.token, y.token) for x, y in zip(a.steps, b.steps, strict=True)]
    return distance([s.top for s in a.steps], [s.top for s in b.steps], taken)


def describe(outcomes: Sequence[str]) -> str:
    """``8 hit_device``, in order of first appearance."""
    return ", ".join(f"{n} {name}" for name, n in Counter(outcomes).items()) or "none"
