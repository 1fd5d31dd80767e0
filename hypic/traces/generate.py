"""Draws a trace from a Spec. The same spec is the same trace: every draw comes from ``random.Random`` seeded with strings."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from hypic.traces.format import Span, TraceError, TraceRequest
from hypic.traces.readers import MOONCAKE_BLOCK, read
from hypic.traces.spec import Lengths, Spec


def generate(spec: Spec) -> Iterator[TraceRequest]:
    """The requests of `spec`, in order of time, one at a time.

    Raises:
        TraceError: recorded arrivals are too few.
    """
    starts, timing = _starts(spec), Random(f"{spec.seed}:turns")
    corpus, numbers = _Documents(spec), itertools.count()
    retrieved: deque[list[int]] = deque(maxlen=spec.retrieval.window)
    due: list[tuple[float, int, _Conversation]] = []
    blocks = _Blocks()
    next_start = next(starts, None)
    for n in range(spec.requests):
        while next_start is not None and (not due or next_start < due[0][0]):
            name = next(numbers)
            heapq.heappush(due, (next_start, name, _Conversation(spec, name, _turns(timing, spec.chat.turns))))
            next_start = next(starts, None)
        if not due:
            raise TraceError(f"{spec.arrivals.path}: arrivals for {n} requests, and {spec.requests} were asked for")
        now, name, conversation = heapq.heappop(due)
        corpus.replace_until(now)
        yield conversation.ask(now, n, corpus, retrieved, blocks)
        if conversation.turn < conversation.turns:
            gap = draw(timing, spec.chat.gap)
            heapq.heappush(due, (now + gap, name, conversation))


def draw(rng: Random, length: Lengths) -> int:
    return max(length.min, min(length.max, round(rng.lognormvariate(math.log(length.median), length.sigma))))


def _turns(rng: Random, mean: float) -> int:
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean)) if mean > 1 else 1


def _starts(spec: Spec) -> Iterator[float]:
    """Seconds at which conversations begin."""
    arrivals = spec.arrivals
    if arrivals.kind == "recorded":
        path = Path(arrivals.path or "")
        first = last = count = 0.0
        for count, request in enumerate(read(path), 1):
            first, last = (request.timestamp if count == 1 else first), request.timestamp
        own = 1e3 * (count - 1) / (last - first) if last > first else 0.0
        stretch = own * spec.chat.turns / arrivals.qps if arrivals.qps and own else 1.0
        for request in read(path):
            yield (request.timestamp - first) / 1e3 * stretch
        return
    rng, now = Random(f"{spec.seed}:arrivals"), 0.0
    while True:
        yield now
        now += rng.expovariate(arrivals.qps / spec.chat.turns)


class _Documents:
    """Documents by popularity; a place in the order keeps its popularity when a new document takes it."""

    def __init__(self, spec: Spec) -> None:
        corpus = spec.corpus
        self._spec, self._rng = spec, Random(f"{spec.seed}:corpus")
        weights = [(k + 1) ** -corpus.zipf for k in range(corpus.documents)]
        self._upto = list(itertools.accumulate(weights))
        self._version: dict[int, int] = {}
        self._rate = corpus.replaced_per_hour * corpus.documents / 3600
        self._next = self._rng.expovariate(self._rate) if self._rate else math.inf

    def replace_until(self, now: float) -> None:
        while self._next <= now:
            place = self._rng.randrange(self._spec.corpus.documents)
            self._version[place] = self._version.get(place, 0) + 1
            self._next += self._rng.expovariate(self._rate)

    def retrieve(self, rng: Random, n: int) -> list[int]:
        """`n` places, all different, the first drawn first."""
        found: dict[int, None] = {}
        while len(found) < n:
            found[bisect_left(self._upto, rng.random() * self._upto[-1])] = None
        return list(found)

    def span(self, tenant: str, place: int) -> Span:
        name = f"{tenant}d{place}.{self._version.get(place, 0)}"
        return Span(name, draw(Random(f"{self._spec.seed}:{name}"), self._spec.corpus.tokens))


class _Conversation:
    """What has been said and retrieved so far: documents in front, then turns of [documents, question, answer]."""

    def __init__(self, spec: Spec, name: int, turns: int) -> None:
        self.name, self.turn, self.turns, self._spec = name, 0, turns, spec
        self._rng = Random(f"{spec.seed}:conversation:{name}")
        self._tenant = self._rng.randrange(spec.tenants) if spec.tenants > 1 else None
        self._prefix = "" if self._tenant is None else f"t{self._tenant}/"
        self._replacing = self._rng.random() < spec.chat.replacing
        self._front: list[Span] = []
        self._said: list[list[Span]] = []

    def ask(
        self, now: float, number: int, corpus: _Documents, retrieved: deque[list[int]], blocks: _Blocks
    ) -> TraceRequest:
        spec, rng = self._spec, self._rng
        query = Span(f"c{self.name}.q{self.turn}", draw(rng, spec.prompt.query), plain=True)
        head = [Span(f"header{number}", spec.prompt.header, plain=True)] if spec.prompt.header else []
        if spec.prompt.system:
            head.append(Span(f"{self._prefix}system", spec.prompt.system, plain=True))
        fresh = self._retrieve(corpus, retrieved)
        in_front = self.turn == 0 or self._replacing
        if in_front:
            self._front = fresh
        self._said.append([*([] if in_front else fresh), query])
        self._shorten(spec.prompt.budget - sum(s.len for s in head), fresh)
        spans = [*head, *self._front, *(s for turn in self._said for s in turn)]
        answer = Span(f"c{self.name}.a{self.turn}", draw(rng, spec.output), plain=True)
        self._said[-1].append(answer)
        self.turn += 1
        return TraceRequest(
            timestamp=round(now * 1e3, 3),
            input_length=sum(s.len for s in spans),
            output_length=answer.len,
            hash_ids=blocks.ids(self._prefix, spans),
            segments=spans,
            tenant=None if self._tenant is None else f"t{self._tenant}",
            conversation=self.name,
            turn=self.turn - 1,
        )

    def _retrieve(self, corpus: _Documents, retrieved: deque[list[int]]) -> list[Span]:
        spec, rng = self._spec, self._rng
        if self.turn == 0 and retrieved and rng.random() < spec.retrieval.repeated:
            places = rng.choice(retrieved)
        elif self.turn == 0 or self._replacing:
            places = corpus.retrieve(rng, draw(rng, spec.retrieval.segments))
        elif spec.chat.added is not None:
            had = {s.id for s in self._front} | {s.id for turn in self._said for s in turn}
            places = corpus.retrieve(rng, draw(rng, spec.chat.added))
            return [s for s in (corpus.span(self._prefix, p) for p in places) if s.id not in had]
        else:
            return []
        if self.turn == 0:
            retrieved.append(places)
        return [corpus.span(self._prefix, p) for p in places]

    def _shorten(self, budget: int, fresh: list[Span]) -> None:
        """Leave out what a prompt of `budget` tokens has no room for."""
        new = {s.id for s in fresh[1:]}

        def size() -> int:
            return sum(s.len for s in self._front) + sum(s.len for turn in self._said for s in turn)

        for documents in (self._said[-1], self._front):
            for span in reversed(documents):
                if span.id in new and size() > budget:
                    documents.remove(span)
        while size() > budget and len(self._said) > 1:
            self._said.pop(0)
        while size() > budget and self._front:
            self._front.pop()


class _Blocks:
    """Mooncake's hash_ids of prompts that are given as spans: a number for every block behind every prefix."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}

    def ids(self, tenant: str, spans: Sequence[Span]) -> list[int]:
        found: list[int] = []
        parent: object = tenant
        block: list[object] = []
        room = MOONCAKE_BLOCK
        for span in spans:
            at = 0
            while at < span.len:
                n = min(room, span.len - at)
                block += (span.id, at, n)
                at, room = at + n, room - n
                if not room:
                    parent = self._number(parent, block)
                    found.append(parent)
                    block, room = [], MOONCAKE_BLOCK
        if block:
            found.append(self._number(parent, block))
        return found

    def _number(self, parent: object, block: list[object]) -> int:
        return self._known.setdefault((parent, *block), len(self._known))
