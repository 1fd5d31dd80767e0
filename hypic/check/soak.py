"""P5 of docs/SEMANTICS.md: a soak that leaves nothing behind, and answers as a quiet engine does.

The engine of the soak has little of everything: an arena of a few artifacts, so that requests wait for memory, evict,
or are served with what fits; chunks of a few tokens, so that chunk borders fall into seams, interiors of compiles and
queries; KV for a few requests; and SGLang's own test switch that retracts running requests. Clients leave at any moment.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from hypic.check.checks import assemble, explain, tokens
from hypic.check.judge import Judge
from hypic.check.layouts import document_pool, random_layout
from hypic.check.result import Tally
from hypic.check.session import Aborted, Answer, Prompt, Session, SessionError, distance

LONGEST = 300
"""Tokens of the longest prompt."""
FLAGS: dict[str, Any] = {
    "chunked_prefill_size": 32,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "max_mamba_cache_size": 40,
}
ENVIRONMENT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}

_LONGEST_DOCUMENT = 200
_ARENA_ARTIFACTS = 2
_NEW_TOKENS = 8
_ABORTED_SHARE = 0.15
_IN_FLIGHT = 12

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


def soak_prompts(session: Session, seed: int, n: int) -> list[Prompt]:
    """Random layouts over a pool of documents, most of one tenant and some of another."""
    rng = random.Random(seed)
    pool = document_pool(rng, session.vocab_size)
    prompts = []
    for _ in range(n):
        layout = random_layout(rng, session.vocab_size, max_tokens=LONGEST, pool=pool)
        tenant = "P5 other" if rng.random() < 0.1 else "P5"
        prompts.append(Prompt(layout.ids, layout.cached, rng.randint(1, _NEW_TOKENS), tenant))
    return prompts


def small_arena(session: Session) -> int:
    """Bytes of an arena that holds a few artifacts of the model of `session`."""
    session.flush()
    session.ask(assemble(random.Random(0), session, [tokens(random.Random(0), session, _LONGEST_DOCUMENT)]))
    (artifact,) = session.dump().values()
    return _ARENA_ARTIFACTS * 4 * sum(part.numel() for name, part in artifact.items() if "@" not in name)


def quiet_answers(session: Session, prompts: Sequence[Prompt], progress: Progress) -> list[Answer]:
    """The answer to each prompt, alone, on an engine with room."""
    answers = []
    for i, prompt in enumerate(prompts):
        progress("P5 quiet", i, len(prompts))
        answers.append(session.ask(prompt))
    return answers


def check_p5(
    session: Session, judge: Judge, seed: int, prompts: Sequence[Prompt], quiet: Sequence[Answer], progress: Progress
) -> Tally:
    """Soak `session`: slot sets are exact afterwards, and who was not aborted got the quiet engine's answer."""
    tally = judge.tally("P5", session, pairs=True)
    soak = _Soak(session, random.Random(seed), prompts, progress)
    session.run(soak.drive())
    for problem in soak.problems:
        tally.require(False, problem)
    _audit(tally, session, "after the soak")
    for i, answer in soak.answers.items():
        _same_answer(tally, session, prompts[i], answer, quiet[i], f"request {i}")
    session.flush()
    _audit(tally, session, "after a flush")
    tally.note(soak.summary())
    return tally


def _audit(tally: Tally, session: Session, when: str) -> None:
    try:
        session.audit()
    except AssertionError as e:
        tally.require(False, f"{when}: {e}")


def _same_answer(tally: Tally, session: Session, prompt: Prompt, answer: Answer, quiet: Answer, what: str) -> None:
    report = answer.report
    counted = report.reused_radix + report.reused_artifacts
    tally.require(answer.cached_tokens == counted, f"{what}: cached_tokens {answer.cached_tokens}, reported {counted}")
    if answer.linked != quiet.linked:
        # Segments that found no room, or whose compile was aborted, are plain; what is left must be right.
        reasons = {s.reason for s in report.spans if s.outcome == "declined"} - {"prompt_end"}
        tally.require(reasons <= {"arena_full", "compile_failed"}, f"{what}: {explain(answer)}")
        session.flush()
        quiet = session.ask(prompt._replace(segments=answer.linked))
        tally.require(quiet.linked == answer.linked, f"{what}: what was linked does not fit an empty arena")
    for asked, given in stretches(prompt, answer):
        if len(asked.ids) > len(prompt.ids):
            session.flush()
            quiet = session.ask(asked)
        tally.error(distance(given, quiet), what)


def stretches(prompt: Prompt, answer: Answer) -> Iterator[tuple[Prompt, Answer]]:
    """The answer in stretches that had the same segments linked, each behind the prompt that it is an answer to.

    There is more than one where the request was retracted and a segment could not be linked again: the rest is an answer to the
    prompt and the tokens so far, without that segment.
    """
    until = {s.start: s.until for s in answer.report.spans if s.until is not None}
    for at, end in pairwise([0, *sorted(set(until.values())), len(answer.ids)]):
        left = tuple(s for s in answer.linked if until.get(s[0], end) > at)
        yield (
            Prompt([*prompt.ids, *answer.ids[:at]], left, end - at, prompt.tenant, prompt.method),
            _stretch(answer, at, end),
        )


def _stretch(answer: Answer, start: int, end: int) -> Answer:
    rows = answer.logprobs
    first = len(answer.ids) - len(rows)
    return answer._replace(ids=answer.ids[start:end], logprobs=rows[max(start - first, 0) : max(end - first, 0)])


class _Soak:
    """Sends all prompts, a few at a time, and takes some of them back."""

    def __init__(self, session: Session, rng: random.Random, prompts: Sequence[Prompt], progress: Progress) -> None:
        self._session, self._rng, self._prompts, self._progress = session, rng, prompts, progress
        self._in_flight: set[int] = set()
        self._aborted: set[int] = set()
        """Requests that we aborted; those that had already ended have an answer all the same."""
        self.answers: dict[int, Answer] = {}
        self.problems: list[str] = []

    async def drive(self) -> None:
        """Returns when every request has ended."""
        room = asyncio.Semaphore(_IN_FLIGHT)
        everything = self._rng.randrange(len(self._prompts))
        tasks = []
        for i in range(len(self._prompts)):
            await room.acquire()
            self._progress("P5 soak", i, len(self._prompts))
            self._in_flight.add(i)
            tasks.append(asyncio.ensure_future(self._one(i, self._patience(), room)))
            if self._rng.random() < 0.5:
                await asyncio.sleep(self._rng.uniform(0.0, 0.1))
            if i == everything:
                self._aborted |= self._in_flight
                self._session.abort_all()
        await asyncio.gather(*tasks)

    def _patience(self) -> float | None:
        """Seconds after which the client leaves: any moment from before the request arrives to its last token."""
        return 10 ** self._rng.uniform(-3.0, 0.3) if self._rng.random() < _ABORTED_SHARE else None

    async def _one(self, i: int, patience: float | None, room: asyncio.Semaphore) -> None:
        rid = f"soak-{i:06d}"
        request = asyncio.ensure_future(self._session.answer(self._prompts[i], rid))
        try:
            if patience is not None:
                await asyncio.wait([request], timeout=patience)
                if not request.done():
                    self._aborted.add(i)
                    self._session.abort(rid)
            self.answers[i] = await request
        except SessionError:
            raise
        except Exception as e:
            if i not in self._aborted or not (isinstance(e, Aborted) or "abort" in str(e).lower()):
                self.problems.append(f"request {i} ended with {type(e).__name__}: {e}")
        finally:
            self._in_flight.discard(i)
            room.release()

    def summary(self) -> str:
        """What the soak went through."""
        outcomes = Counter(o for a in self.answers.values() for o in a.outcomes)
        retracted = sum(a.retractions > 0 for a in self.answers.values())
        return (
            f"{len(self._prompts)} requests, {len(self._prompts) - len(self.answers)} aborted, {retracted} retracted; "
            f"segments {', '.join(f'{o} {n}' for o, n in sorted(outcomes.items()))}"
        )
