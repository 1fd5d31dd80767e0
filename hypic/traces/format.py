"""One request of a trace, a line of JSON: Mooncake's fields, and the spans that its prompt is made of (traces/README.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec


class TraceError(ValueError):
    """A trace or spec that cannot be used; the text begins with file and line."""


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stretch of the prompt whose content has a name: wherever the id stands again, the same tokens stand again.

    Attributes:
        id: names the content. len: its tokens, at least 1.
        plain: not to be marked as a segment: system prompt, header, what user and model said.
        text, token_ids: the content itself, at most one of them; without, the replay draws tokens from the id.
    """

    id: str | int
    len: int
    plain: bool = False
    text: str | None = None
    token_ids: list[int] | None = None


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request.

    Attributes:
        timestamp: arrival, in ms from any origin; not before that of the request in front.
        input_length, output_length: tokens of the prompt and of the answer.
        hash_ids: ids of the prompt's blocks, each a hash of all up to its end (Mooncake).
        segments: the prompt's spans from its start on, in natural order. Tokens behind the last one occur nowhere else.
        tenant: whom caches must keep apart from others.
        conversation, turn: which conversation this belongs to, and its place in it, from 0.
        meta: anything else, ignored.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] | None = None
    segments: list[Span] = []
    tenant: str | None = None
    conversation: str | int | None = None
    turn: int | None = None
    meta: dict[str, Any] | None = None


def problem(request: TraceRequest) -> str | None:
    """What is wrong with `request` taken alone."""
    if not 0 <= request.timestamp < float("inf"):
        return f"timestamp {request.timestamp}: not a time in ms"
    for field in ("input_length", "output_length"):
        if (value := getattr(request, field)) < 1:
            return f"{field} {value}: must be at least 1"
    total = 0
    for i, span in enumerate(request.segments):
        name = f"segments[{i}] (id {span.id!r})"
        if span.len < 1:
            return f"{name}: len {span.len} must be at least 1"
        if span.text is not None and span.token_ids is not None:
            return f"{name}: has text and token_ids; give one"
        if span.token_ids is not None and len(span.token_ids) != span.len:
            return f"{name}: {len(span.token_ids)} token_ids, but len {span.len}"
        if span.token_ids is not None and min(span.token_ids) < 0:
            return f"{name}: negative token ids"
        total += span.len
    if total > request.input_length:
        return f"segments have {total} tokens, more than input_length {request.input_length}"
    if (request.turn is None) != (request.conversation is None):
        return "conversation and turn come together"
    if request.turn is not None and request.turn < 0:
        return f"turn {request.turn}: counts from 0"
    return None


class Checker:
    """What must hold between the lines of a trace: times do not go back, an id always names the same content.

    It remembers a length and a hash for each id.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._known: dict[str | int, tuple[int, int, str]] = {}

    def check(self, request: TraceRequest, where: str) -> TraceRequest:
        """`request` itself. Raises TraceError, beginning with `where`."""
        if found := problem(request) or self._against_others(request, where):
            raise TraceError(f"{where}: {found}")
        self._last = request.timestamp
        return request

    def _against_others(self, request: TraceRequest, where: str) -> str | None:
        if request.timestamp < self._last:
            return f"timestamp {request.timestamp} is before {self._last} of the line in front: sort the file by time"
        for span in request.segments:
            content = hash(span.text if span.token_ids is None else tuple(span.token_ids))
            length, digest, first = self._known.setdefault(span.id, (span.len, content, where))
            if length != span.len:
                return f"id {span.id!r} has {span.len} tokens, at {first} it had {length}"
            if digest != content:
                return f"id {span.id!r} has another content than at {first}"
        return None


def read_lines(path: Path, decode: Callable[[bytes], TraceRequest]) -> Iterator[tuple[str, TraceRequest]]:
    """`(file:line, request)` of a file of JSON lines; empty lines are passed over. Raises TraceError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", decode(line)
                except (msgspec.DecodeError, ValueError) as e:
                    raise TraceError(f"{path}:{number}: {e}") from None
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None


def read_native(path: Path) -> Iterator[TraceRequest]:
    """The requests of a trace in our own format, one at a time. Raises TraceError."""
    decoder, checker = msgspec.json.Decoder(TraceRequest), Checker()
    for where, request in read_lines(path, decoder.decode):
        yield checker.check(request, where)


def write(requests: Iterable[TraceRequest], path: Path) -> int:
    """Write a trace; returns the number of requests. Raises TraceError for what :func:`read_native` would refuse."""
    encoder, checker, n = msgspec.json.Encoder(), Checker(), 0
    with path.open("wb") as file:
        for n, request in enumerate(requests, 1):
            file.write(encoder.encode(checker.check(request, f"{path}:{n}")) + b"\n")
    return n
