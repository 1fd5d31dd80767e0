"""P6 of docs/SEMANTICS.md: the next turn of a conversation finds the linked prefix in SGLang's own radix tree.

How much it must find is worked out here from the spans alone, with no radix tree and no marked keys: two prompts share
KV as far as their tokens agree *and* every token lies in the same segment interior, or in none, in both. Of that, an
attention-only model reuses all; a hybrid reuses up to a position at which SGLang kept a state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hypic.check.checks import explain, tokens
from hypic.check.judge import Judge
from hypic.check.result import Tally
from hypic.check.session import Answer, Prompt, Session, distance

_ANSWER = 6
Span = tuple[int, int]


class Turn(NamedTuple):
    """A prompt that was answered, and the documents that its tenant has brought so far."""

    prompt: Prompt
    answer: Answer
    documents: frozenset[tuple[int, ...]]


class Expectation:
    """How many tokens of a prompt the radix tree must hold, by the kind of the model and SGLang's settings.

    Args:
        settings: the scheduler's resolved ServerArgs.
        w: the seam window.
    """

    def __init__(self, settings: dict[str, object], w: int) -> None:
        self.hybrid = bool(settings["uses_mamba_radix_cache"])
        self.tracked = self.hybrid and settings["mamba_radix_cache_strategy"] != "no_buffer"
        self._overlap = not settings["disable_overlap_schedule"]
        """The overlap scheduler has run one more step by the time it sees the end: KV of the last token is there too."""
        self._page = int(str(settings["page_size"]))
        self.interval = int(str(settings["mamba_track_interval"]))
        self._w = w

    def __str__(self) -> str:
        return (
            ("hybrid, states tracked" if self.tracked else "hybrid, states at ends")
            if self.hybrid
            else "attention only"
        )

    def reused(self, earlier: Turn, prompt: Prompt) -> int:
        """Tokens of `prompt` that are found once `earlier` has been answered, both linked, by the same tenant."""
        before = earlier.prompt
        held = [*before.ids, *(earlier.answer.ids if self._overlap else earlier.answer.ids[:-1])]
        same = self._common(held, before.segments, prompt)
        if self.hybrid:
            ends = (self._aligned(len(before.ids)),) if self.tracked else (len(before.ids), len(held))
            return max((end for end in ends if end <= same), default=0)
        hit = self._aligned(same)
        for lo, hi in self._interiors(prompt.segments):
            if lo < hit < hi:  # the head of an interior is of no use
                return self._aligned(lo)
        return hit

    def _common(self, held: Sequence[int], segments: Sequence[Span], prompt: Prompt) -> int:
        """Leading tokens that have the same KV in both. At least one token of a prompt is computed."""
        a, b = self._labels(held, segments), self._labels(prompt.ids, prompt.segments)
        limit = min(len(a), len(b) - 1)
        return next((i for i in range(limit) if a[i] != b[i]), limit)

    def _labels(self, ids: Sequence[int], segments: Sequence[Span]) -> list[tuple[int, int]]:
        """Each token with the start of the interior that it lies in, -1 outside."""
        label = [-1] * len(ids)
        for lo, hi in self._interiors(segments):
            label[lo:hi] = [lo] * (hi - lo)
        return list(zip(ids, label, strict=True))

    def _interiors(self, segments: Sequence[Span]) -> Iterator[Span]:
        return ((start + self._w, end) for start, end in segments if end - start > self._w)

    def _aligned(self, n: int) -> int:
        return n // self._page * self._page


class Conversation:
    """The first turn of the conversation that every case goes on from, and what may come next."""

    def __init__(self, rng: random.Random, session: Session, interval: int) -> None:
        self._rng, self._session = rng, session
        head, gap = self.text(17), self.text(5)
        first, second = self.text(100), self.text(64)
        self.a = (len(head), len(head) + len(first))
        self.b = (self.a[1] + len(gap), self.a[1] + len(gap) + len(second))
        ids = head + first + gap + second + self.text(20)
        while (len(ids) + 2 * _ANSWER) % interval < 4 * _ANSWER:  # a decode step here would keep another state
            ids += self.text(_ANSWER)
        self.first = Prompt(ids, [self.a, self.b], _ANSWER)
        self.document = self.text(90)

    def text(self, n: int) -> list[int]:
        """Random tokens that appear nowhere else."""
        return tokens(self._rng, self._session, n)

    def prompt(self, ids: Sequence[int], *segments: Span) -> Prompt:
        """`ids` and a new question."""
        return Prompt([*ids, *self.text(15)], list(segments), _ANSWER)

    def with_document(self, ids: Sequence[int], *segments: Span) -> Prompt:
        """`ids`, the further document, and a new question."""
        start = len(ids) + 3
        return self.prompt([*ids, *self.text(3), *self.document], *segments, (start, start + len(self.document)))

    def followers(self, answer: Answer) -> Iterator[tuple[str, Prompt]]:
        """What may come after the first turn, each with a name; all by the same tenant and linked."""
        ids, a, b = list(self.first.ids), self.a, self.b
        history = [*ids, *answer.ids]
        yield "next turn", self.prompt(history, a, b)
        yield "next turn with a new document", self.with_document(history, a, b)
        yield "another question after the same prompt", self.prompt(ids, a, b)
        yield "another second document", self.with_document(ids[: b[0]], a)
        yield "second segment plain", self.prompt(history, a)
        yield "first segment one token shorter", self.prompt(history, (a[0] + 1, a[1]), b)
        yield "second segment one token longer", self.prompt(history, a, (b[0], b[1] + 1))
        yield "both segments in one", self.prompt(history, (a[0], b[1]))
        yield "first segment cut in two", self.prompt(history, (a[0], a[0] + 50), (a[0] + 50, a[1]), b)


def check_p6(session: Session, judge: Judge, seed: int) -> Tally:
    """Reuse by the next turn is exact; plain requests, other tenants and other span boundaries never see it."""
    tally = judge.tally("P6", session, pairs=True)
    cases = _Cases(tally, session)
    talk = Conversation(random.Random(seed), session, cases.expect.interval)
    probe = session.ask(talk.first._replace(tenant="P6 probe"))
    for name, prompt in talk.followers(probe):
        cases.follow(name, cases.begin(name, talk.first), prompt)
    history = [*talk.first.ids, *probe.ids]
    third_turn(cases, talk, history)
    known_document(cases, talk, history)
    strangers(cases, talk, history)
    tally.note(f"{cases.expect}: {cases.count} turns, up to {cases.most} tokens found in the radix tree")
    return tally


def third_turn(cases: _Cases, talk: Conversation, history: list[int]) -> None:
    """Reuse goes on after a turn that was itself put together from the radix tree and a new document."""
    name = "third turn"
    second = cases.follow(name, cases.begin(name, talk.first), talk.with_document(history, talk.a, talk.b))
    ids = [*second.prompt.ids, *second.answer.ids]
    cases.follow(name, second, talk.prompt(ids, *second.prompt.segments))


def known_document(cases: _Cases, talk: Conversation, history: list[int]) -> None:
    """A new turn's document that another conversation of the tenant has brought is joined on top of the radix hit."""
    name = "next turn with a known document"
    other = cases.begin(name, talk.with_document(talk.text(9)))
    first = cases.begin(name, talk.first)
    first = first._replace(documents=first.documents | other.documents)
    cases.follow(name, first, talk.with_document(history, talk.a, talk.b))


def strangers(cases: _Cases, talk: Conversation, history: list[int]) -> None:
    """Neither a plain request nor another tenant sees a linked prefix, and a linked request sees no plain one."""
    linked, plain = talk.prompt(history, talk.a, talk.b), talk.prompt(history)
    first = cases.begin("plain after linked", talk.first)
    cases.meet("plain after linked", plain._replace(tenant=first.prompt.tenant))
    cases.meet("another tenant", linked._replace(tenant=f"{first.prompt.tenant}+"))
    first = cases.begin("linked after plain", talk.first._replace(segments=()))
    cases.meet("linked after plain", linked._replace(tenant=first.prompt.tenant))


class _Cases:
    """Asks and compares. Each case is a tenant of its own, so it meets an empty cache."""

    def __init__(self, tally: Tally, session: Session) -> None:
        self.tally, self.session = tally, session
        self.expect = Expectation(session.settings, session.method().seam_window)
        self.count = self.most = 0

    def begin(self, name: str, prompt: Prompt) -> Turn:
        """The first turn of a case."""
        prompt = prompt._replace(tenant=f"P6 {name}")
        return Turn(prompt, self.session.ask(prompt), documents_of(prompt))

    def follow(self, name: str, earlier: Turn, prompt: Prompt) -> Turn:
        """The turn after `earlier`: it finds exactly what it must."""
        reused = self.expect.reused(earlier, prompt)
        w = self.session.method().seam_window
        joined = sum(
            end - start - w
            for start, end in prompt.segments
            if end > reused and tuple(prompt.ids[start:end]) in earlier.documents
        )
        prompt = prompt._replace(tenant=earlier.prompt.tenant)
        return Turn(prompt, self._ask(name, prompt, reused, joined), earlier.documents | documents_of(prompt))

    def meet(self, name: str, prompt: Prompt) -> None:
        """A request that must find nothing."""
        self._ask(name, prompt, 0, 0)

    def _ask(self, name: str, prompt: Prompt, radix: int, joined: int) -> Answer:
        answer = self.session.ask(prompt)
        found = answer.report.reused_radix, answer.cached_tokens
        self.tally.require(
            found == (radix, radix + joined),
            f"{name}: {found[0]} tokens from the radix tree and cached_tokens {found[1]}, "
            f"not {radix} and {radix + joined} ({explain(answer)})",
        )
        self.count, self.most = self.count + 1, max(self.most, found[0])
        cold = self.session.ask(prompt._replace(tenant=f"P6 cold {self.count}"))
        self.tally.error(distance(answer, cold), f"{name}, against an empty cache")
        return answer


def documents_of(prompt: Prompt) -> frozenset[tuple[int, ...]]:
    """The segments of a prompt, by their tokens."""
    return frozenset(tuple(prompt.ids[start:end]) for start, end in prompt.segments)


def other_strategy(settings: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags under which SGLang keeps the states of a hybrid in the other way than `settings` say; none where there is no
    other way, or where the user's `flags` have chosen one."""
    chosen = {"mamba_radix_cache_strategy", "disable_overlap_schedule", "disable_radix_cache"} & flags.keys()
    if chosen or not settings["uses_mamba_radix_cache"] or settings["page_size"] > 1:
        return {}
    tracks = settings["mamba_radix_cache_strategy"] != "no_buffer"
    strategy = "no_buffer" if tracks else "extra_buffer"
    return {"mamba_radix_cache_strategy": strategy, "disable_overlap_schedule": tracks}
