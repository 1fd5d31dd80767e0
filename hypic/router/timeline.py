"""What happened to a request, and when: read off the messages that pass the router, for reports, `/workers` and `hypic top`.

All times are milliseconds since the request arrived at the front. Workers say how long things took, not when: what began
elsewhere is placed before the message that told its end.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from hypic.router import messages as m
from hypic.router.actions import Action, Broken, Forward, Prompt, Send
from hypic.router.schedule import Placement
from hypic.segment import span_id

RECENT = 32
"""Requests that are remembered after their end."""


class SegmentLine(msgspec.Struct, kw_only=True):
    """One distinct segment of a request.

    Attributes:
        id: name of its content, as in the report.
        role: how the combine worker was to come by its artifact (:data:`hypic.router.schedule.Role`).
        worker: who holds it or compiles it; after a reroute, the last one.
        begun, done: the forward pass that compiled it, others perhaps with it, if it was compiled for this request.
        sent, arrived: its way to the combine worker.
        rerouted: how many times its source was replaced.
    """

    id: str
    tokens: int
    nbytes: int
    role: str
    worker: str
    begun: float | None = None
    done: float | None = None
    sent: float | None = None
    arrived: float | None = None
    rerouted: int = 0


class Timeline(msgspec.Struct, kw_only=True):
    """One attempt to serve a request.

    Attributes:
        request: the router's name of the attempt.
        rid: SGLang's request id.
        started: wall-clock time of its arrival.
        combine: the worker that links, decodes and streams.
        scattered: whether another worker was told to compile for it.
        placed, expected, forwarded, first_token, ended: when; null if it has not come to that.
        outcome: "" while it runs.
    """

    request: str
    rid: str
    started: float
    prompt_tokens: int
    combine: str = ""
    scattered: bool = False
    segments: list[SegmentLine] = []
    placed: float | None = None
    expected: float | None = None
    forwarded: float | None = None
    first_token: float | None = None
    ended: float | None = None
    outcome: str = ""

    def for_report(self) -> dict[str, Any]:
        """What the client's report says of it."""
        out = msgspec.to_builtins(self)
        for field in ("request", "rid", "started", "prompt_tokens", "outcome", "ended"):
            del out[field]
        return {k: v for k, v in out.items() if v is not None}


class _Pass:
    """Compiles of one worker that ended together: each says what its share of the time was."""

    def __init__(self, begun: float):
        self.begun = self.done = begun
        self.seconds = 0.0
        self.lines: list[tuple[float, SegmentLine]] = []


class Recorder:
    """Timelines of the requests under way and of the last ones."""

    def __init__(self) -> None:
        self._passes: dict[str, _Pass] = {}
        self.recent: deque[Timeline] = deque(maxlen=RECENT)
        self._live: OrderedDict[str, tuple[Timeline, float, dict[bytes, SegmentLine]]] = OrderedDict()

    def begin(self, request: str, rid: str, prompt_tokens: int, now: float) -> Timeline:
        """`now` and all later times are a monotonic clock's."""
        timeline = Timeline(
            request=request, rid=rid, started=time.time() - (time.monotonic() - now), prompt_tokens=prompt_tokens
        )
        self._live[request] = timeline, now, {}
        return timeline

    def placed(self, request: str, placement: Placement, prompts: Sequence[Prompt], now: float) -> None:
        timeline, start, lines = self._live[request]
        timeline.placed, timeline.combine, timeline.scattered = _ms(start, now), placement.combine, placement.scattered
        for p in prompts:
            if p.key not in lines:
                role, worker = placement.sources[p.key]
                n = len(p.tokens) // 8
                lines[p.key] = SegmentLine(
                    id=span_id(memoryview(p.tokens).cast("q")), tokens=n, nbytes=p.nbytes, role=role, worker=worker
                )
        timeline.segments = list(lines.values())

    def first_token(self, request: str, now: float) -> None:
        if request in self._live:
            timeline, start, _ = self._live[request]
            timeline.first_token = timeline.first_token or _ms(start, now)

    def end(self, request: str, outcome: str, now: float) -> Timeline | None:
        """Safe to call again: None then."""
        if (found := self._live.pop(request, None)) is None:
            return None
        timeline, start, _ = found
        timeline.ended, timeline.outcome = _ms(start, now), outcome
        self.recent.append(timeline)
        return timeline

    def received(self, worker: str, message: Any, now: float) -> None:
        """A message of a worker."""
        if isinstance(message, m.Compiled) and message.ok:
            self._compiled(worker, message, now)
        elif isinstance(message, m.Arrived):
            for start, line in self._lines(message.key, (message.request,)):
                if message.ok:
                    line.arrived, line.sent = _ms(start, now), _ms(start, now - message.seconds)
        elif isinstance(message, m.Expecting) and (found := self._live.get(message.request)):
            found[0].expected = _ms(found[1], now)

    def _compiled(self, worker: str, message: m.Compiled, now: float) -> None:
        found = self._passes.get(worker)
        if found is None or now - message.seconds > found.done:
            found = self._passes[worker] = _Pass(now)
        found.seconds += message.seconds
        found.begun, found.done = now - found.seconds, now
        for start, line in self._lines(message.key, self._live):
            if line.done is None and line.role != "here":
                line.done = _ms(start, now)
                found.lines.append((start, line))
        for start, line in found.lines:
            line.begun = _ms(start, found.begun)

    def acted(self, actions: Iterable[Action], now: float) -> None:
        """What the coordinator decided."""
        for action in actions:
            if isinstance(action, Forward) and (found := self._live.get(action.request)):
                found[0].forwarded = _ms(found[1], now)
            elif isinstance(action, Broken):
                self.end(action.request, f"{action.worker} was lost", now)
            elif isinstance(action, Send) and isinstance(action.message, m.Reroute):
                for _, line in self._lines(action.message.key, (action.message.request,)):
                    line.worker, line.rerouted, line.done = action.message.source, line.rerouted + 1, None

    def timelines(self) -> list[Timeline]:
        """Oldest first, those under way last."""
        return [*self.recent, *(t for t, _, _ in self._live.values())]

    def _lines(self, key: bytes, requests: Iterable[str]) -> list[tuple[float, SegmentLine]]:
        found = (self._live.get(r) for r in requests)
        return [(start, lines[key]) for _, start, lines in filter(None, found) if key in lines]


def _ms(start: float, now: float) -> float:
    return round(1e3 * (now - start), 3)
