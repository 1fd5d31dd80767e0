"""The ``"hypic": {...}`` object of a request, checked: every error names the input and the remedy.

All errors are ValueErrors, which SGLang answers with status 400.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from hypic.segment import Bounds


class BadRequest(ValueError):
    """The request cannot be served as written; the text says what to change."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may ask for in ``"hypic"``.

    Attributes:
        separator: cut text here, for this request; "" turns the server's own separator off; null leaves it on.
        segments: ``[[start, end], ...]`` in token ids input, one such list for each prompt of a batch.
        insert: named segments to put into the prompt (:mod:`hypic.engine.http.insert`).
        report: put the report into the response.
        method: name of the caching method; null for the server's default.
    """

    separator: str | None = None
    segments: Any = None
    insert: Any = None
    report: bool = False
    method: str | None = None

    @classmethod
    def parse(cls, raw: Any) -> Options:
        """Check a decoded ``"hypic"`` value; null is the defaults. Raises BadRequest."""
        if raw is None:
            return cls()
        if not isinstance(raw, dict):
            raise BadRequest(f"hypic: must be an object with the keys {_keys()}, got {type(raw).__name__}")
        for key in raw:
            if key not in cls.__struct_fields__:
                raise BadRequest(f"hypic: unknown key {key!r}; valid keys are {_keys()}")
        separator, report = raw.get("separator"), raw.get("report")
        if separator is not None and not isinstance(separator, str):
            raise BadRequest(f"hypic.separator: must be a string, got {_show(separator)}")
        if report is not None and not isinstance(report, bool):
            raise BadRequest(f"hypic.report: must be true or false, got {_show(report)}")
        segments = raw.get("segments")
        if segments is not None and not isinstance(segments, list):
            raise BadRequest(f"hypic.segments: must be a list of [start, end] pairs, got {_show(segments)}")
        method = raw.get("method")
        if method is not None and not isinstance(method, str):
            raise BadRequest(f"hypic.method: must be a string, got {_show(method)}")
        return cls(separator=separator, segments=segments, insert=raw.get("insert"), report=bool(report), method=method)

    def bounds(self, prompts: Sequence[int], batch: bool) -> list[tuple[Bounds, ...]]:
        """Segments of each prompt, sorted.

        Args:
            prompts: the length of each prompt in tokens.
            batch: the client sent a list of prompts; then ``segments`` holds one list (or null) for each.

        Raises:
            BadRequest: an entry is no pair of integers, is empty, overlaps another or leaves its prompt.
        """
        if self.segments is None:
            return [()] * len(prompts)
        if not batch:
            return [_bounds(self.segments, prompts[0], "hypic.segments")]
        if len(self.segments) != len(prompts) or not all(s is None or _is_list_of_lists(s) for s in self.segments):
            raise BadRequest(
                f"hypic.segments: for a batch of {len(prompts)} prompts send {len(prompts)} lists of [start, end] "
                f"pairs, one for each prompt (null or [] where it has none), got {_show(self.segments)}"
            )
        return [
            _bounds(s or [], n, f"hypic.segments[{i}]")
            for i, (s, n) in enumerate(zip(self.segments, prompts, strict=True))
        ]

    def refuse_segments(self, remedy: str) -> None:
        """Raises BadRequest if ``segments`` came with text, which has no token positions yet."""
        if self.segments is not None:
            raise BadRequest(f"hypic.segments: are token positions and need a prompt of token ids; {remedy}")

    def method_of(self, names: Collection[str]) -> str:
        """The method's name, "" for the first of ``names``, the default. Raises BadRequest if the server's are others."""
        if self.method is not None and self.method not in names:
            raise BadRequest(
                f"hypic.method {_show(self.method)}: this server has {', '.join(names)} (--hypic-methods); pick one or none"
            )
        return self.method if self.method and self.method != next(iter(names)) else ""

    def refuse_insert(self, remedy: str) -> None:
        """Raises BadRequest if ``insert`` came where it has no meaning."""
        if self.insert is not None:
            raise BadRequest(f"hypic.insert: {remedy}")

    def inserted(self) -> list[str]:
        """Every id in ``insert``, as far as it is well-formed."""

        def ids(value: Any) -> Iterator[str]:
            if isinstance(value, str):
                yield value
            elif isinstance(value, (dict, list)):
                for one in value.values() if isinstance(value, dict) else value:
                    yield from ids(one)

        return list(ids(self.insert))

    def insert_of(self, i: int, prompts: int, batch: bool) -> tuple[Any, str]:
        """``insert`` of prompt ``i``, and what errors call it. Raises BadRequest if a batch has not one list for each."""
        if not batch or self.insert is None:
            return self.insert, "hypic.insert"
        if not isinstance(self.insert, list) or len(self.insert) != prompts:
            raise BadRequest(
                f"hypic.insert: for a batch of {prompts} prompts send {prompts} lists of [position, id], one for each (null "
                f"or [] where it has none), got {_show(self.insert)}"
            )
        return self.insert[i], f"hypic.insert[{i}]"

    def refuse_separator(self) -> None:
        """Raises BadRequest if a separator came with token ids, which hold no text to cut."""
        if self.separator:
            raise BadRequest(
                f"hypic.separator {_show(self.separator)}: cuts text, but the prompt is token ids; "
                "send text, or the positions as hypic.segments"
            )


def _bounds(entries: list[Any], tokens: int, where: str) -> tuple[Bounds, ...]:
    for i, entry in enumerate(entries):
        at = f"{where}[{i}]"
        if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and all(type(n) is int for n in entry)):
            raise BadRequest(f"{at}: must be two integers [start, end], got {_show(entry)}")
        start, end = entry
        if start >= end:
            raise BadRequest(f"{at} = [{start}, {end}]: is empty; end is exclusive and must be greater than start")
        if start < 0 or end > tokens:
            raise BadRequest(f"{at} = [{start}, {end}]: leaves the prompt of {tokens} tokens")
    order = sorted(range(len(entries)), key=lambda i: entries[i])
    for a, b in pairwise(order):
        if entries[b][0] < entries[a][1]:
            raise BadRequest(
                f"{where}[{b}] = {list(entries[b])} overlaps {where}[{a}] = {list(entries[a])}; "
                "segments may touch but not share tokens"
            )
    return tuple(Bounds(*entries[i]) for i in order)


def _is_list_of_lists(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, (list, tuple)) for v in value)


def _keys() -> str:
    return ", ".join(sorted(Options.__struct_fields__))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
