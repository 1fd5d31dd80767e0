"""Chat requests: finding marked content in the rendered prompt, and its token ids.

SGLang renders and tokenises in one step. To see the text in between without a copy of its code, the step runs on a
stand-in of the handler whose tokenizer renders as usual but writes down what it is asked to encode. It runs twice, with
and without sentinels; then the text is cut at the marks and every piece is tokenised by itself.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hypic.engine.http.insert import cut_at
from hypic.engine.http.marks import Marks
from hypic.engine.http.options import BadRequest
from hypic.engine.http.sentinel import Found, Sentinels
from hypic.segment import Declined, Piece, SegmentTokenizer, Tokens

logger = logging.getLogger(__name__)

Convert = Callable[..., tuple[Any, Any]]
"""``OpenAIServingChat._convert_to_internal_request``: (handler, request, raw) -> (GenerateReqInput, request)."""

_UNUSABLE = {
    "multimodal": "a prompt with images, audio or video cannot hold named segments",
    "template": "this model's chat template cannot be followed, so there is no place for named segments",
}
# Encoders that hand text to ``tokenizer.encode``; None is the chat template. Others make ids in their own way.
_TEXT_ENCODINGS = (None, "dsv32", "dsv4")


class Chat(NamedTuple):
    """A converted chat request.

    Attributes:
        adapted: SGLang's GenerateReqInput.
        processed: the request as SGLang's handler goes on with it.
        tokens: the prompt, which ``adapted`` then carries; None where SGLang tokenised it in its own way.
        declined: marks that will be plain.
    """

    adapted: Any
    processed: Any
    tokens: Tokens | None
    declined: tuple[Declined, ...]


class _Encoded(NamedTuple):
    text: str
    kwargs: dict[str, Any]


class _Decoded(str):
    """What the recording tokenizer decodes to: the ids it was given."""

    ids: list[int]


class _Unseen(Exception):
    """The prompt did not pass through the recording tokenizer as expected."""


def convert(
    original: Convert,
    handler: Any,
    request: Any,
    raw_request: Any,
    marks: Marks,
    words: Mapping[str, Sequence[int]],
    tokenizer: SegmentTokenizer,
) -> Chat:
    """Convert a request with marks. Errors are those of SGLang's own conversion.

    Args:
        words: tokens of the words in it that stand for named segments (:func:`hypic.engine.http.insert.stand_ins`).

    Raises:
        BadRequest: named segments in a prompt that cannot be cut.
    """
    request = marks.without_separators(request)
    if reason := _not_renderable(handler, request):
        if words:
            raise BadRequest(f"segment parts: {_UNUSABLE[reason]}; send texts instead")
        return _native(original, handler, request, raw_request, marks, reason)
    pristine = request.model_copy(deep=True)  # SGLang changes requests while it converts them
    try:
        adapted, processed, plain = _render(original, handler, request, raw_request)
        texts = [e.text for e in plain]
        found = _find(original, handler, pristine, raw_request, marks, texts)
        cut = cut_at(_cut(texts, found), words)
        tokens = tokenizer.tokenize(cut, plain[0].kwargs) if found or words else None
    except Exception as e:  # templates and tokenizers may raise anything; SGLang's own path then raises it, or serves
        logger.debug("hypic: chat template could not be followed: %r", e)
        if words:
            raise BadRequest(f"segment parts: {_UNUSABLE['template']}; send texts instead") from e
        return _native(original, handler, pristine, raw_request, marks, "template")
    if tokens is None:
        return _native(original, handler, pristine, raw_request, marks, "template")
    adapted.text, adapted.input_ids = None, tokens.ids
    missing = marks.count - len(found)
    return Chat(adapted, processed, tokens, _declined([*marks.declined, *["template"] * missing]))


def _native(original: Convert, handler: Any, request: Any, raw_request: Any, marks: Marks, reason: str) -> Chat:
    """SGLang's own conversion, every mark declined."""
    adapted, processed = original(handler, request, raw_request)
    return Chat(adapted, processed, None, _declined([*marks.declined, *[reason] * marks.count]))


def _declined(reasons: Sequence[str]) -> tuple[Declined, ...]:
    return tuple(Declined(-1, -1, reason) for reason in reasons)


def _not_renderable(handler: Any, request: Any) -> str | None:
    media = ("image_url", "video_url", "audio_url")
    if any(p.type in media for m in request.messages if isinstance(m.content, list) for p in m.content):
        return "multimodal"
    if handler.chat_encoding_spec not in _TEXT_ENCODINGS:
        return "template"
    return None


def _find(
    original: Convert, handler: Any, request: Any, raw_request: Any, marks: Marks, plain: Sequence[str]
) -> list[Found]:
    """The marks that can be found. Sentinels at the edges of the text are tried first, then inside its white space."""
    sentinels = Sentinels()
    for inner in (False, True):
        with_sentinels = marks.with_sentinels(request, sentinels, inner)
        *_, rendered = _render(original, handler, with_sentinels, raw_request)
        found = sentinels.locate([e.text for e in rendered], plain, marks.count)
        if found is not None:
            return found
    return []


def _render(original: Convert, handler: Any, request: Any, raw_request: Any) -> tuple[Any, Any, list[_Encoded]]:
    """Convert on a stand-in of the handler: the results, and the texts that make up the prompt in order."""
    encoded: list[_Encoded] = []
    stand_in = copy.copy(handler)
    stand_in.tokenizer_manager = copy.copy(handler.tokenizer_manager)
    stand_in.tokenizer_manager.tokenizer = _recording(handler.tokenizer_manager.tokenizer, encoded)
    adapted, processed = original(stand_in, request, raw_request)
    if adapted.input_ids is not None:
        ids = adapted.input_ids
    elif isinstance(adapted.text, _Decoded):
        ids = adapted.text.ids
    elif isinstance(adapted.text, str):  # tokenised later, by generate_request
        return adapted, processed, [_Encoded(adapted.text, {})]
    else:
        raise _Unseen
    if not ids or not all(type(i) is int and 0 <= -1 - i < len(encoded) for i in ids):
        raise _Unseen
    return adapted, processed, [encoded[-1 - i] for i in ids]


def _recording(tokenizer: Any, encoded: list[_Encoded]) -> Any:
    """A copy of ``tokenizer`` that encodes its n-th text to the single id ``-n`` and notes the text."""
    twin = object.__new__(type(tokenizer))
    twin.__dict__.update(tokenizer.__dict__)

    def encode(text: str, **kwargs: Any) -> list[int]:
        encoded.append(_Encoded(text, kwargs))
        return [-len(encoded)]

    def decode(ids: Sequence[int], **_: Any) -> _Decoded:
        out = _Decoded()
        out.ids = list(ids)
        return out

    object.__setattr__(twin, "encode", encode)
    object.__setattr__(twin, "decode", decode)
    return twin


def _cut(texts: Sequence[str], found: Sequence[Found]) -> list[Piece]:
    """The texts as pieces in order, the found marks as segments. No piece spans two texts."""
    pieces = []
    for i, text in enumerate(texts):
        at = 0
        for f in (f for f in found if f.text == i):
            pieces += [Piece(text[at : f.start], False), Piece(text[f.start : f.end], True)]
            at = f.end
        pieces.append(Piece(text[at:], False))
    return [p for p in pieces if p.text]
