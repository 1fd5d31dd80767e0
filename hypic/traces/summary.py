"""What a trace holds, and what caches could save of it at best: the figures to expect before anything is measured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from hypic.traces.format import TraceRequest


class Capacity(msgspec.Struct, frozen=True):
    """A cache of segments: how much it holds, and what a segment takes of it (in tokens, or in bytes)."""

    total: float
    per_segment: float = 0.0
    per_token: float = 1.0


class Spread(msgspec.Struct, frozen=True):
    """Of a quantity over requests."""

    mean: float
    p50: float
    p95: float
    max: float


class Summary(msgspec.Struct, kw_only=True):
    """Counts behind the first `warmup` requests; those only fill the caches.

    Attributes:
        seconds, qps: from the first arrival to the last, and requests in it.
        input, output, segments: tokens of prompts and answers, marked segments of a prompt.
        later_turns: share of requests that continue a conversation.
        distinct, distinct_tokens: segments by id, and their tokens.
        prefix: share of prompt tokens that an infinite prefix cache has (spans in the same order from the prompt's start on).
        pic: the same with segments that occurred before wherever they stand, on top of `prefix`.
        pic_capacity: as `pic`, with a cache of segments that holds `capacity` and drops what was not used for longest.
        segments_seen: share of segments that occurred before; segments_kept: and are still there at that capacity.
    """

    requests: int
    warmup: int
    seconds: float
    qps: float
    input: Spread
    output: Spread
    segments: Spread
    later_turns: float
    distinct: int
    distinct_tokens: int
    prefix: float
    pic: float
    segments_seen: float
    capacity: Capacity | None = None
    pic_capacity: float | None = None
    segments_kept: float | None = None


def summarise(
    requests: Iterable[TraceRequest], *, warmup: int = 0, capacity: Capacity | None = None, min_segment: int = 64
) -> Summary:
    """Walk through a trace once. Segments below `min_segment` tokens count as plain.

    Raises:
        ValueError: there is no request behind the warm-up.
    """
    prefixes: set[int] = set()
    seen: dict[Any, int] = {}
    store = _Store(capacity)
    inputs, outputs, counts, times = [], [], [], []
    reused_prefix = reused = reused_kept = hits = kept_hits = marked = later = 0
    number = 0
    for number, request in enumerate(requests, 1):
        counting = number > warmup
        prefix = min(_prefix(request, prefixes), request.input_length - 1)
        own = [s for s in request.segments if not s.plain and s.len >= min_segment]
        had = kept = end = 0
        for span in request.segments:
            end += span.len
            if span.plain or span.len < min_segment:
                continue
            key = (request.tenant, span.id)
            beyond = min(span.len, max(0, end - prefix))
            known, there = key in seen, key in store
            had += beyond * known
            kept += beyond * there
            hits += known and counting
            kept_hits += there and counting
        for span in own:
            seen[(request.tenant, span.id)] = span.len
            store.use((request.tenant, span.id), span.len)
        if not counting:
            continue
        times.append(request.timestamp)
        inputs.append(request.input_length)
        outputs.append(request.output_length)
        counts.append(len(own))
        marked += len(own)
        later += bool(request.turn)
        reused_prefix += prefix
        reused += min(prefix + had, request.input_length - 1)
        reused_kept += min(prefix + kept, request.input_length - 1)
    if not inputs:
        raise ValueError(f"{number} requests, and the warm-up alone takes {warmup} (--warmup)")
    total, seconds = sum(inputs), (times[-1] - times[0]) / 1e3
    return Summary(
        requests=len(inputs),
        warmup=warmup,
        seconds=seconds,
        qps=(len(inputs) - 1) / seconds if seconds else 0.0,
        input=_spread(inputs),
        output=_spread(outputs),
        segments=_spread(counts),
        later_turns=later / len(inputs),
        distinct=len(seen),
        distinct_tokens=sum(seen.values()),
        prefix=reused_prefix / total,
        pic=reused / total,
        segments_seen=hits / marked if marked else 0.0,
        capacity=capacity,
        pic_capacity=reused_kept / total if capacity else None,
        segments_kept=(kept_hits / marked if marked else 0.0) if capacity else None,
    )


def _prefix(request: TraceRequest, known: set[int]) -> int:
    """Tokens at the start of the prompt that stood at the start of an earlier one; remembers this one's."""
    tokens = 0
    chain, going = hash(("prefix", request.tenant)), True
    for span in request.segments:
        chain = hash((chain, span.id))
        going = going and chain in known
        if going:
            tokens += span.len
        known.add(chain)
    return tokens


class _Store:
    """Segments in order of use, the longest unused dropped when there is no room."""

    def __init__(self, capacity: Capacity | None) -> None:
        self._capacity, self._room = capacity, capacity.total if capacity else 0.0
        self._costs: OrderedDict[Any, float] = OrderedDict()

    def __contains__(self, key: Any) -> bool:
        return key in self._costs

    def use(self, key: Any, tokens: int) -> None:
        if self._capacity is None:
            return
        if key in self._costs:
            self._costs.move_to_end(key)
            return
        cost = self._capacity.per_segment + self._capacity.per_token * tokens
        if cost > self._capacity.total:
            return
        self._costs[key] = cost
        self._room -= cost
        while self._room < 0:
            self._room += self._costs.popitem(last=False)[1]


def _spread(values: list[int]) -> Spread:
    import numpy as np  # late: `hypic --help` need not wait for it

    array = np.array(values)
    p50, p95 = (float(np.percentile(array, p, method="inverted_cdf")) for p in (50, 95))
    return Spread(float(array.mean()), p50, p95, float(array.max()))
