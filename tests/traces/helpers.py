"""Traces written by hand, and a target whose answers take a known time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from hypic.traces.format import Span, TraceRequest
from hypic.traces.play import Due, Seen
from hypic.traces.prompts import Prompt


def request(
    *spans: tuple[str, int] | Span, rest: int = 5, at: float = 0.0, output: int = 2, **more: object
) -> TraceRequest:
    """Spans as (id, len), an id in brackets is plain; `rest` new tokens behind them."""
    made = [s if isinstance(s, Span) else Span(s[0].strip("()"), s[1], plain=s[0].startswith("(")) for s in spans]
    return TraceRequest(at, sum(s.len for s in made) + rest, output, segments=made, **more)  # type: ignore[arg-type]


def due(times: Sequence[float], output: int = 1) -> list[Due]:
    return [Due(i, request(output=output), t) for i, t in enumerate(times)]


class Timed:
    """`seconds` for each token of an answer, `at_once` requests at a time; of the asked, `broken` fail and `stuck` never end."""

    def __init__(
        self, seconds: float, at_once: int = 1000, broken: Sequence[int] = (), stuck: Sequence[int] = ()
    ) -> None:
        self.seconds, self.broken, self.stuck = seconds, broken, stuck
        self.asked, self.aborted, self.flushed = 0, 0, 0
        self.room = asyncio.Semaphore(at_once)
        self.prompts: list[Prompt] = []

    async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncIterator[Seen]:
        number = self.asked
        self.asked += 1
        self.prompts.append(prompt)
        ended = False
        try:
            async with self.room:
                for i in range(new_tokens):
                    await asyncio.sleep(self.seconds)
                    if number in self.broken:
                        raise ValueError("broken")
                    if number in self.stuck:
                        await asyncio.sleep(1e6)
                    ended = i == new_tokens - 1
                    yield Seen(i + 1, 3)
        finally:
            self.aborted += not ended

    async def flush(self) -> None:
        self.flushed += 1
