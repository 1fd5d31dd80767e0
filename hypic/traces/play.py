"""Sends requests when they are due, whether or not earlier ones have been answered (an open loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Literal, NamedTuple, Protocol

import msgspec

from hypic.traces.format import TraceRequest
from hypic.traces.prompts import Prompt, PromptMaker

Status = Literal["ok", "error", "timeout", "cut"]
HEAD_START = 0.05
"""Seconds before the first request is due, to make its prompt."""
LOOK_EVERY = 0.02


class Seen(NamedTuple):
    """What a target says with every chunk: answer tokens so far, and the prompt's cached tokens."""

    tokens: int
    cached: int


class Target(Protocol):
    """What is asked. Closing `ask` before its end must abort the request. `ask` raises for a request that failed."""

    def ask(self, prompt: Prompt, new_tokens: int) -> AsyncIterator[Seen]: ...

    async def flush(self) -> None:
        """Empty all caches. Raises RuntimeError if that cannot be done."""


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one request; times are seconds from the start of the run.

    Attributes:
        number: of the request in its trace. due, sent: when it should have been sent, and when it was.
        first, last: when its first and last token came.
        status: "timeout": no end within the limit. "cut": the run ended before it did.
    """

    number: int
    due: float
    prompt_tokens: int
    wanted: int
    sent: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    cached: int = 0
    status: Status = "cut"
    error: str | None = None
    conversation: str | int | None = None
    turn: int | None = None

    @property
    def ttft(self) -> float:
        """From when it was due; infinite for a request that was not answered to its end."""
        return self.first - self.due if self.status == "ok" and self.first is not None else float("inf")

    @property
    def e2e(self) -> float:
        return self.last - self.due if self.status == "ok" and self.last is not None else float("inf")

    @property
    def tpot(self) -> float | None:
        """Per token after the first; None for an answer of one token."""
        if self.status != "ok" or self.first is None or self.last is None:
            return float("inf") if self.wanted > 1 else None
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class Due(NamedTuple):
    """A request, its number in the trace, and when it is due, in seconds from the start of the run."""

    number: int
    request: TraceRequest
    at: float


class Limits(NamedTuple):
    """When to stop.

    Attributes:
        timeout: seconds for one request, from when it is due.
        deadline: `time.perf_counter()` at which all ends.
        ttft, lost: give up as soon as more than `lost` requests have, or are certain to have, a TTFT above `ttft`.
    """

    timeout: float
    deadline: float = float("inf")
    ttft: float = float("inf")
    lost: int = 0


class Played(NamedTuple):
    """All requests, those that were never sent included, and why the run ended: "complete", "slo" or "budget"."""

    outcomes: list[Outcome]
    end: str


def scaled(
    requests: Sequence[TraceRequest], first: int, *, qps: float | None = None, speedup: float = 1.0
) -> list[Due]:
    """Requests with times from 0; at a mean of `qps` if given, else `speedup` times as fast as recorded."""
    origin = requests[0].timestamp if requests else 0.0
    span = (requests[-1].timestamp - origin) / 1e3 if requests else 0.0
    if qps is not None:
        speedup = qps * span / (len(requests) - 1) if span else float("inf")
    return [Due(first + i, r, (r.timestamp - origin) / 1e3 / speedup) for i, r in enumerate(requests)]


async def play(
    requests: Sequence[Due],
    target: Target,
    maker: PromptMaker,
    limits: Limits,
    done: Callable[[Outcome], None] = lambda _: None,
) -> Played:
    """Send `requests`, sorted by time, each when it is due. `done` gets each as it ends."""
    outcomes = [
        Outcome(
            number=d.number, due=d.at, prompt_tokens=d.request.input_length, wanted=d.request.output_length,
            conversation=d.request.conversation, turn=d.request.turn,
        )
        for d in requests
    ]  # fmt: skip
    began = time.perf_counter() + HEAD_START
    tasks: list[asyncio.Task[None]] = []

    async def one(outcome: Outcome, prompt: Prompt) -> None:
        await _ask(outcome, prompt, target, began, limits.timeout)
        done(outcome)

    async def send() -> None:
        for due, outcome in zip(requests, outcomes, strict=True):
            try:
                prompt = maker.make(due.request, due.number)
            except ValueError as e:
                outcome.status, outcome.error = "error", str(e)
                done(outcome)
                continue
            outcome.prompt_tokens = len(prompt.ids)
            await asyncio.sleep(max(0.0, began + due.at - time.perf_counter()))
            tasks.append(asyncio.create_task(one(outcome, prompt)))
        await asyncio.gather(*tasks)

    sending, end = asyncio.create_task(send()), "complete"
    try:
        while not (await asyncio.wait([sending], timeout=LOOK_EVERY))[0]:
            now = time.perf_counter()
            if now > limits.deadline:
                end = "budget"
            elif _lost(outcomes, now - began, limits.ttft) > limits.lost:
                end = "slo"
            if end != "complete":
                break
    finally:
        for task in (sending, *tasks):
            task.cancel()
        ended = await asyncio.gather(sending, *tasks, return_exceptions=True)
    for fault in ended:
        if isinstance(fault, Exception):
            raise fault
    return Played(outcomes, end)


def _lost(outcomes: Sequence[Outcome], now: float, ttft: float) -> int:
    """Requests whose TTFT is above `ttft`, or will be."""
    late = 0
    for o in outcomes:
        if now - o.due <= ttft:
            break  # sorted by time: the rest is not late yet
        late += o.first is None or o.first - o.due > ttft or o.status in ("error", "timeout")
    return late


async def _ask(outcome: Outcome, prompt: Prompt, target: Target, began: float, timeout: float) -> None:
    try:
        outcome.sent = time.perf_counter() - began
        async with asyncio.timeout(max(0.0, outcome.due + timeout - outcome.sent)):
            async with aclosing(target.ask(prompt, outcome.wanted)) as chunks:  # type: ignore[type-var]
                async for tokens, cached in chunks:
                    now = time.perf_counter() - began
                    if not tokens:
                        continue
                    outcome.cached = outcome.cached or cached  # a server may tell it in its last chunk only
                    if outcome.first is None:
                        outcome.first = now
                    if tokens > outcome.tokens:
                        outcome.last, outcome.tokens = now, tokens
        outcome.status = "ok" if outcome.tokens else "error"
        outcome.error = None if outcome.tokens else "ended without a token"
    except TimeoutError:
        outcome.status = "timeout"
    except asyncio.CancelledError:
        outcome.status = "cut"
        raise
    except Exception as e:  # whatever a target raises belongs to this request
        outcome.status, outcome.error = "error", f"{type(e).__name__}: {e}"


async def fill(
    requests: Sequence[Due], target: Target, maker: PromptMaker, *, at_once: int, deadline: float = float("inf")
) -> bool:
    """Send `requests` as fast as they are answered, `at_once` at a time, one token each; False if time ran out.

    Raises:
        RuntimeError: one of them failed, so the caches do not hold what they should.
    """
    waiting = iter(requests)

    async def work() -> None:
        for due in waiting:
            if time.perf_counter() > deadline:
                return
            try:
                async with aclosing(target.ask(maker.make(due.request, due.number), 1)) as chunks:  # type: ignore[type-var]
                    async for _ in chunks:
                        pass
            except Exception as e:
                raise RuntimeError(f"request {due.number} of the warm-up failed: {e}") from e

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return time.perf_counter() <= deadline
