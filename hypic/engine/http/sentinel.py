"""Finding marked text again in a prompt that a chat template rendered.

A template may put anything around a piece of content, join it with others, trim it, dump it as JSON, repeat it or drop
it. So the text is wrapped in sentinels, rendered, and looked up. The sentinels are random for each request (text cannot
forge them) and alphanumeric (JSON dumps and escaping leave them alone). Two guards make the result trustworthy:

* each sentinel must be there exactly once, else that mark is missing;
* the render without its sentinels must equal the render of the unmarked prompt, else nothing can be said.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple


class Open(NamedTuple):
    """The mark begins here."""

    mark: int


class Close(NamedTuple):
    """The mark ends here."""

    mark: int


Item = str | Open | Close
"""A text with marks in it is a list of items."""


class Found(NamedTuple):
    """A mark in the unmarked render: characters [start, end) of its text number ``text``."""

    text: int
    start: int
    end: int
    mark: int


class Sentinels:
    """The sentinel strings of one request."""

    def __init__(self) -> None:
        self._stem = f"zq{secrets.token_hex(8)}"
        self._pattern = re.compile(self._stem + r"([oc])(\d+)z")

    def open(self, mark: int) -> str:
        return f"{self._stem}o{mark}z"

    def close(self, mark: int) -> str:
        return f"{self._stem}c{mark}z"

    def write(self, items: Sequence[Item], inner: bool) -> str:
        """The text with sentinels for its marks.

        ``inner`` puts them behind leading and before trailing white space, where trimming templates keep them.
        """
        out = []
        for item in _inner(items) if inner else items:
            if isinstance(item, str):
                out.append(item)
            else:
                out.append(self.open(item.mark) if isinstance(item, Open) else self.close(item.mark))
        return "".join(out)

    def locate(self, marked: Sequence[str], plain: Sequence[str], marks: int) -> list[Found] | None:
        """Where each mark is, in order of place. Marks that are not there exactly once are left out.

        A mark that has only an opening sentinel stands for the JSON object around it (a tool).

        Args:
            marked: texts rendered with sentinels.
            plain: the same texts rendered without.
            marks: marks are numbered 0..marks-1.

        Returns:
            None if the renders differ by more than the sentinels.
        """
        if len(marked) != len(plain):
            return None
        hits: dict[tuple[str, int], list[tuple[int, re.Match[str]]]] = {}
        shifts = []
        for i, (with_sentinels, without) in enumerate(zip(marked, plain, strict=True)):
            if self._pattern.sub("", with_sentinels) != without:
                return None
            matches = list(self._pattern.finditer(with_sentinels))
            shifts.append(_Shift(matches))
            for m in matches:
                hits.setdefault((m[1], int(m[2])), []).append((i, m))
        found = []
        for mark in range(marks):
            opens, closes = hits.get(("o", mark), []), hits.get(("c", mark), [])
            if len(opens) != 1 or len(closes) > 1:
                continue
            text, first = opens[0]
            if not closes:
                extent = _json_object_around(marked[text], first.group(), first.start())
            elif closes[0][0] == text:
                extent = first.end(), closes[0][1].start()
            else:
                extent = None
            if extent:
                found.append(Found(text, shifts[text](extent[0]), shifts[text](extent[1]), mark))
        return _disjoint(found)


class _Shift:
    """Maps positions in a text with sentinels to the text without."""

    def __init__(self, matches: Sequence[re.Match[str]]) -> None:
        self._ends = [m.end() for m in matches]
        self._total = [0, *accumulate(len(m.group()) for m in matches)]

    def __call__(self, at: int) -> int:
        return at - self._total[bisect_right(self._ends, at)]


def plain_text(items: Sequence[Item]) -> str:
    return "".join(item for item in items if isinstance(item, str))


def _inner(items: Sequence[Item]) -> list[Item]:
    """Move each Open behind the white space that follows it, and each Close before the white space it follows."""
    out: list[Item] = []
    waiting: Open | None = None
    for item in items:
        if isinstance(item, Open):
            waiting = item
        elif isinstance(item, str):
            body = item.lstrip() if waiting else item
            out += [item[: len(item) - len(body)], waiting, body] if waiting else [item]
            waiting = None
        else:
            last = out[-1] if out else None
            if isinstance(last, str):
                body = last.rstrip()
                out[-1:] = [body, item, last[len(body) :]]
            else:
                out.append(item)
    return out


def _json_object_around(text: str, sentinel: str, at: int) -> tuple[int, int] | None:
    """The outermost JSON object around ``at`` that describes a tool whose name or description holds the sentinel."""
    decoder, extent, start = json.JSONDecoder(), None, at
    for _ in range(256):
        start = text.rfind("{", 0, start)
        if start < 0:
            break
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError:
            continue
        if end > at and _describes(value, sentinel):
            extent = (start, end)
    return extent


def _describes(value: Any, sentinel: str) -> bool:
    fields = value.get("function", value)
    return isinstance(fields, dict) and any(
        isinstance(fields.get(k), str) and sentinel in fields[k] for k in ("name", "description")
    )


def _disjoint(found: list[Found]) -> list[Found]:
    """In order of place; what is empty or overlaps the one before it is left out."""
    out: list[Found] = []
    for f in sorted(found):
        if f.start < f.end and not (out and out[-1].text == f.text and f.start < out[-1].end):
            out.append(f)
    return out
