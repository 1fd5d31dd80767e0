"""Named segments in prompts: where a request names one, its tokens are put in, as a segment.

| prompt | where |
| --- | --- |
| chat | a content part ``{"type": "segment", "id": ...}`` |
| text | ``hypic.insert`` maps texts of the client's choice, which stand in the prompt, to ids |
| token ids | ``hypic.insert`` lists ``[position, id]`` |

In chat a random word stands for each while the template renders. So templates cannot change a segment, only move, drop or
repeat it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypic.engine.http.options import BadRequest
from hypic.segment import Bounds, Piece

Use = Callable[[str], Sequence[int]]
"""The tokens of a segment that this request may use; raises UnknownSegment."""


def stand_ins(request: Any, use: Use) -> tuple[Any, dict[str, Sequence[int]]]:
    """A chat request with words for its named segments, and the tokens of each word; the very same request if it has none.

    Raises:
        UnknownSegment: an id that names nothing.
    """
    named = [(i, j) for i, m in enumerate(request.messages) for j in _named_parts(m)]
    if not named:
        return request, {}
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageContentTextPart as TextPart

    request = request.model_copy(deep=True)
    stem, words = f"zq{secrets.token_hex(8)}s", {}
    for n, (i, j) in enumerate(named):
        word, parts = f"{stem}{n}z", request.messages[i].content
        words[word] = use(parts[j].id)
        parts[j] = TextPart(type="text", text=word)
    return request, words


def has_named_parts(request: Any) -> bool:
    return any(_named_parts(m) for m in request.messages)


def _named_parts(message: Any) -> list[int]:
    parts = message.content if isinstance(message.content, list) else []
    return [j for j, part in enumerate(parts) if part.type == "segment"]


def cut_at(pieces: Sequence[Piece], words: Mapping[str, Sequence[int]]) -> list[Piece]:
    """The pieces, cut where they hold one of the words; the tokens of that word are a segment in its place."""
    if not words:
        return list(pieces)
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
    out = []
    for piece in pieces:
        at = 0
        for m in pattern.finditer(piece.text):
            out += [_rest(piece, at, m.start()), Piece(m[0], True, words[m[0]])]
            at = m.end()
        out.append(_rest(piece, at, len(piece.text)))
    return [p for p in out if p.text]


def _rest(piece: Piece, start: int, end: int) -> Piece:
    text = piece.text[start:end]
    return Piece(text, piece.segment and bool(text.strip()))


def words_of(raw: Any, texts: Sequence[str], use: Use) -> dict[str, Sequence[int]]:
    """``hypic.insert`` for a prompt of text: {word: tokens}.

    Raises:
        BadRequest: it is no such mapping, or a word stands in none of the texts.
        UnknownSegment: an id that names nothing.
    """
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(k and isinstance(k, str) and isinstance(v, str) for k, v in raw.items()):
        raise BadRequest('hypic.insert: for a prompt of text send {"a text in the prompt": "id of a segment", ...}')
    for word in raw:
        if not any(word in t for t in texts):
            raise BadRequest(f"hypic.insert: {word!r} does not stand in the prompt")
    return {word: use(name) for word, name in raw.items()}


def splice(ids: list[int], cached: Sequence[Bounds], raw: Any, use: Use, where: str) -> tuple[list[int], list[Bounds]]:
    """``hypic.insert`` for a prompt of token ids: the prompt with the segments in it, and the bounds of all segments.

    Args:
        ids: the prompt as it was sent, whose positions count.
        cached: segments that it holds already.
        raw: ``[[position, id], ...]``; several at one position stand there in this order.
        where: what errors call it.

    Raises:
        BadRequest: a pair that is none, or a position outside of the prompt or inside of a segment.
        UnknownSegment: an id that names nothing.
    """
    if raw is None:
        return ids, list(cached)
    places = []
    for n, pair in enumerate(raw if isinstance(raw, list) else [raw]):
        at = f"{where}[{n}]"
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], str)):
            raise BadRequest(f"{at}: must be [position, id of a segment], got {pair!r:.80}")
        position, name = pair
        if not 0 <= position <= len(ids):
            raise BadRequest(f"{at}: position {position} leaves the prompt of {len(ids)} tokens")
        if inside := next((b for b in cached if b.start < position < b.end), None):
            raise BadRequest(f"{at}: position {position} is inside of the segment [{inside.start}, {inside.end}]")
        places.append((position, n, use(name)))
    out: list[int] = []
    bounds, done = [], 0
    cuts = sorted([(p, 0, n, tokens) for p, n, tokens in places] + [(b.start, 1, b.end, ()) for b in cached])
    for position, kind, end, tokens in cuts:
        out += ids[done:position]
        done = position
        if kind == 0:
            bounds.append(Bounds(len(out), len(out) + len(tokens)))
            out += tokens
        else:
            bounds.append(Bounds(len(out), len(out) + end - position))
    return out + ids[done:], bounds
