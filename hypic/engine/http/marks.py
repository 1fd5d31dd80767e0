"""What a chat request marks as segments: ``cache_control`` on parts, messages and tools, separators in content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from hypic.engine.http.options import BadRequest
from hypic.engine.http.sentinel import Close, Item, Open, Sentinels, plain_text
from hypic.segment import Piece, split_at

_SEGMENT = "segment"
_SHOWN = 60
"""Characters of a mark that an error repeats."""


class Place(NamedTuple):
    """A text of the request: the content of message ``message``, or its content part ``part``."""

    message: int
    part: int | None


class Marks:
    """The marks of one chat request, numbered in the order of the request, and copies of it that carry them.

    Attributes:
        count: marks that can be looked up in the rendered prompt.
        declined: reasons of those that cannot.
        cuts: content holds separators, so not even a request without marks may be rendered as it came.
    """

    def __init__(self) -> None:
        self.count = 0
        self.declined: list[str] = []
        self.cuts = False
        self._texts: dict[Place, list[Item]] = {}
        self._tools: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self.count or self.declined or self.cuts)

    @classmethod
    def of(cls, request: Any, separator: str) -> Marks:
        """Read the marks of a ChatCompletionRequest; ``separator`` "" cuts nothing."""
        marks = cls()
        for i, message in enumerate(request.messages):
            marks._read_message(i, message, separator)
        for i, tool in enumerate(request.tools or ()):
            if is_segment(tool):
                marks._tools[i] = marks._next()
        return marks

    def without_separators(self, request: Any) -> Any:
        """The request as the model shall see it; the very same object if it holds no separator."""
        return self._copy(request, plain_text) if self.cuts else request

    def with_sentinels(self, request: Any, sentinels: Sentinels, inner: bool) -> Any:
        """A copy of the request whose marked texts carry sentinels (see :meth:`Sentinels.write` on ``inner``)."""
        copy = self._copy(request, lambda items: sentinels.write(items, inner))
        for i, mark in self._tools.items():
            function = copy.tools[i].function
            field = "description" if function.description else "name"
            setattr(function, field, sentinels.open(mark) + getattr(function, field))
        return copy

    def _read_message(self, i: int, message: Any, separator: str) -> None:
        if isinstance(message.content, str):
            self._read_text(Place(i, None), message.content, is_segment(message), separator)
            return
        parts = message.content or []
        texts = [j for j, part in enumerate(parts) if part.type == "text"]
        inside = any(is_segment(part) for part in parts)
        whole = is_segment(message)
        if whole and inside:
            self.declined.append("nested")
        elif whole and not any(parts[j].text.strip() for j in texts):
            self.declined.append("empty")
            whole = False
        elif whole and not (separator and any(separator in parts[j].text for j in texts)):
            self._mark_all(i, parts, texts)
            return
        for j, part in enumerate(parts):
            if part.type == "text":
                self._read_text(Place(i, j), part.text, is_segment(part) or (whole and not inside), separator)
            elif is_segment(part):
                self.declined.append("not_text")

    def _read_text(self, place: Place, text: str, marked: bool, separator: str) -> None:
        """A marked text is one segment; between separators lie segments, behind the last one only in a marked text."""
        if separator and separator in text:
            self.cuts = True
            pieces = split_at(text, separator, last_is_segment=marked)
        elif not marked:
            return
        elif not text.strip():
            self.declined.append("empty")
            return
        else:
            pieces = [Piece(text, True)]
        items: list[Item] = []
        for piece in pieces:
            if piece.segment:
                mark = self._next()
                items += [Open(mark), piece.text, Close(mark)]
            else:
                items.append(piece.text)
        self._texts[place] = items

    def _mark_all(self, i: int, parts: Sequence[Any], texts: Sequence[int]) -> None:
        """One mark from the first text of a message to the last, with whatever the template puts in between."""
        filled = [j for j in texts if parts[j].text.strip()]
        mark = self._next()
        for j in {filled[0], filled[-1]}:
            items: list[Item] = [parts[j].text]
            if j == filled[0]:
                items.insert(0, Open(mark))
            if j == filled[-1]:
                items.append(Close(mark))
            self._texts[Place(i, j)] = items

    def _next(self) -> int:
        self.count += 1
        return self.count - 1

    def _copy(self, request: Any, write: Callable[[list[Item]], str]) -> Any:
        copy = request.model_copy(deep=True)
        for (i, j), items in self._texts.items():
            if j is None:
                copy.messages[i].content = write(items)
            else:
                copy.messages[i].content[j].text = write(items)
        return copy


def is_segment(marked: Any) -> bool:
    """Whether a part, message or tool carries ``"cache_control": {"type": "segment"}``; anything else is ignored.

    Raises:
        BadRequest: what is there is nearly that.
    """
    control = getattr(marked, "cache_control", None)
    if isinstance(control, dict) and control.get("type") == _SEGMENT:
        return True
    for word in _words(control):
        if get_close_matches(word.strip().lower(), [_SEGMENT], cutoff=0.75):
            shown = repr(control)
            shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            raise BadRequest(f'cache_control: {shown} marks nothing; did you mean {{"type": "{_SEGMENT}"}}?')
    return False


def _words(control: Any) -> Iterator[str]:
    """The strings of a JSON value that is not deep: where a mark could be that was written wrong."""
    if isinstance(control, str):
        yield control
    elif isinstance(control, dict | list):
        parts = (*control, *control.values()) if isinstance(control, dict) else control
        yield from (part for part in parts if isinstance(part, str))
