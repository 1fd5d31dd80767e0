"""Prompts as spans: cutting, tokenising without drift, what travels to the scheduler, and the name of a span.

A prompt is a list of spans in natural order. Only the spans that are *not* plain are written down: those that may be
cached, and those that were asked for but declined. Everything between them is plain.

Text is cut *before* it is tokenised and every piece is tokenised by itself, so no merge crosses a cut and a segment has
the same ids in every prompt.

The wire is ``sampling_params.custom_params``, the one client-visible dictionary that SGLang carries unchanged to the
scheduler. Its values must be flat (SGLang's msgpack IPC rejects nested lists), hence the ``[start, end, start, ...]``
lists. The keys are reserved: what a client sends under them is rejected (:func:`reserved_keys`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:  # the command line's help loads this module, and numpy takes it a tenth of a second
    import numpy as np

RESERVED_PREFIX = "hypic_"
"""Keys of ``custom_params`` that only the plugin may write."""
INTERNAL_RID_PREFIX = "hypic-internal-"
"""Request ids that only the plugin may use (compile requests)."""
SEGMENT_ID_PREFIX = "seg_"

DECLINE_REASONS: Mapping[str, str] = {
    "template": "the chat template drops, repeats or changes what was marked, so it cannot be found in the prompt",
    "empty": "there is no text in what was marked",
    "nested": "a marked message holds marked parts; only the parts count",
    "not_text": "what was marked is not text",
    "token_ids": "the prompt came as token ids beside the messages, which are then not rendered",
    "multimodal": "the prompt holds images, audio or video",
    "input_embeds": "the prompt came as embeddings",
    "session": "the prompt continues a session, whose earlier tokens are not known here",
    "input_logprobs": "logprobs of prompt tokens inside or before a segment were asked for, which must be computed",
    "hidden_states": "hidden states of prompt tokens were asked for",
    "routed_experts": "routed experts or index choices of prompt tokens were asked for",
    "disaggregation": "prefill and decode run on different servers",
    "truncated": "the prompt is longer than the context and will be truncated",
}
"""Why the HTTP process declines a segment (the scheduler has reasons of its own)."""

_CACHED = "hypic_cached"
_DECLINED = "hypic_declined"
_REASONS = "hypic_reasons"
_SALT = "hypic_salt"
_REPORT = "hypic_report"
_REQUEST = "hypic_request"
_NAME = "hypic_name"
_METHOD = "hypic_method"
_KEYS = frozenset({_CACHED, _DECLINED, _REASONS, _SALT, _REPORT, _REQUEST, _NAME, _METHOD})


class MalformedSpans(ValueError):
    """The reserved keys of ``custom_params`` do not describe spans: a bug of the plugin or a forged request."""


class Bounds(NamedTuple):
    """Tokens ``[start, end)`` of the prompt."""

    start: int
    end: int


class Declined(NamedTuple):
    """A segment that was asked for and will be plain. Bounds are (-1, -1) where the place in the prompt is unknown."""

    start: int
    end: int
    reason: str


class RequestSpans(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one request as the HTTP process made it.

    Attributes:
        cached: segments, in natural order, each non-empty, none overlapping.
        declined: segments that will be plain, each with the reason.
        salt: the request's ``cache_salt`` alone, before SGLang joins it with ``extra_key`` and the adapter; "" if none.
        report: the client asked for the report.
        request: the router's name of the request; "" if it came straight from a client.
        name: the prompt is one segment that the client named (:func:`segment_id`): compile it, and answer nothing. "" for
            every other request.
        method: name of the caching method (:mod:`hypic.method`); "" for the server's default.
    """

    cached: tuple[Bounds, ...] = ()
    declined: tuple[Declined, ...] = ()
    salt: str = ""
    report: bool = False
    request: str = ""
    name: str = ""
    method: str = ""

    def to_params(self) -> dict[str, Any]:
        """The reserved ``custom_params`` entries, all flat, that :meth:`from_params` reads back."""
        return {
            _CACHED: [n for b in self.cached for n in b],
            _DECLINED: [n for d in self.declined for n in (d.start, d.end)],
            _REASONS: [d.reason for d in self.declined],
            _SALT: self.salt,
            _REPORT: self.report,
            _REQUEST: self.request,
            _NAME: self.name,
            _METHOD: self.method,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any] | None, prompt_tokens: int | None = None) -> RequestSpans | None:
        """Read a plan back from ``custom_params``.

        Args:
            params: ``sampling_params.custom_params``; entries of other owners are left alone.
            prompt_tokens: length of the prompt, to check the bounds against; None skips that check.

        Returns:
            None where the request carries no plan.

        Raises:
            MalformedSpans: a key is missing or unknown, a type is wrong, or the cached bounds are not ordered,
                non-empty, disjoint and within the prompt.
        """
        found = reserved_keys(params)
        if not params or not found:
            return None
        if found != _KEYS:
            odd = sorted(found ^ _KEYS)
            raise MalformedSpans(f"custom_params: keys {odd} missing or unknown, expected exactly {sorted(_KEYS)}")
        salt, report, reasons, request = params[_SALT], params[_REPORT], params[_REASONS], params[_REQUEST]
        name, method = params[_NAME], params[_METHOD]
        if not all(isinstance(text, str) for text in (salt, request, name, method)) or not isinstance(report, bool):
            texts = ", ".join((_SALT, _REQUEST, _NAME, _METHOD))
            raise MalformedSpans(f"custom_params: {texts} must be strings and {_REPORT} a boolean")
        if not isinstance(reasons, (list, tuple)) or not all(isinstance(r, str) for r in reasons):
            raise MalformedSpans(f"custom_params: {_REASONS} must be a list of strings")
        cached = _pairs(_CACHED, params[_CACHED])
        declined = _pairs(_DECLINED, params[_DECLINED])
        if len(declined) != len(reasons):
            raise MalformedSpans(f"custom_params: {len(declined)} spans in {_DECLINED}, {len(reasons)} in {_REASONS}")
        last = 0
        for start, end in cached:
            if start < last or end <= start or (prompt_tokens is not None and end > prompt_tokens):
                raise MalformedSpans(
                    f"custom_params: {_CACHED} entry [{start}, {end}) overlaps the one before it, is empty, or leaves "
                    f"the prompt of {prompt_tokens} tokens"
                )
            last = end
        return cls(
            cached=tuple(cached),
            declined=tuple(Declined(*b, reason) for b, reason in zip(declined, reasons, strict=True)),
            salt=salt,
            report=report,
            request=request,
            name=name,
            method=method,
        )

    def declining_all(self, reason: str) -> RequestSpans:
        """The same plan with every cached span declined for ``reason`` (the request is then served natively)."""
        declined = [*self.declined, *(Declined(*b, reason) for b in self.cached)]
        declined.sort(key=lambda d: d.start)
        return msgspec.structs.replace(self, cached=(), declined=tuple(declined))


def reserved_keys(params: Mapping[str, Any] | None) -> set[str]:
    """The keys of ``params`` that only the plugin may write."""
    return {k for k in params or () if isinstance(k, str) and k.startswith(RESERVED_PREFIX)}


def _bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    import numpy as np

    return np.asarray(tokens, dtype="<i8").tobytes()


def span_id(tokens: Sequence[int] | np.ndarray) -> str:
    """Public name of a segment: 16 hex digits of a digest of its token ids, the same for every request and worker.

    It names content for people and metrics. It is not a key: keys also hold tenant, model, dtype and more.
    """
    return hashlib.blake2b(_bytes(tokens), digest_size=8).hexdigest()


def segment_id(tenant: str, adapter: str, method: str, tokens: Sequence[int] | np.ndarray) -> str:
    """The id under which a tenant may use a segment instead of its text: the same for the same content, anywhere.

    Args:
        tenant: the cache salt.
        adapter, method: what it was registered for; "" for the base model and the server's default.
        tokens: its ids.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (tenant.encode(), adapter.encode(), method.encode(), _bytes(tokens)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return SEGMENT_ID_PREFIX + digest.hexdigest()


def _pairs(key: str, flat: Any) -> list[Bounds]:
    """``[s0, e0, s1, e1, ...]`` -> bounds. Raises MalformedSpans."""
    if not isinstance(flat, (list, tuple)) or len(flat) % 2 or not _all_int(flat):
        raise MalformedSpans(f"custom_params: {key} must be a flat list of integers, two for each span")
    return [Bounds(s, e) for s, e in zip(flat[::2], flat[1::2], strict=True)]


def _all_int(values: Iterable[Any]) -> bool:
    return all(type(v) is int for v in values)


class Piece(NamedTuple):
    """A stretch of prompt text that is tokenised by itself; with ``ids``, these instead of its text."""

    text: str
    segment: bool
    ids: Sequence[int] | None = None


def split_at(text: str, separator: str, *, last_is_segment: bool = False) -> list[Piece]:
    """Cut ``text`` at every ``separator``, which belongs to no piece.

    ``A|B|Q`` is the segments A and B and the plain text Q. Empty pieces vanish, pieces of white space are plain.

    Args:
        text: what to cut.
        separator: not empty.
        last_is_segment: what follows the last separator is a segment too.
    """
    texts = text.split(separator)
    last = len(texts) if last_is_segment else len(texts) - 1
    return [Piece(t, i < last and bool(t.strip())) for i, t in enumerate(texts) if t]


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...


class Tokens(NamedTuple):
    """A tokenised prompt: its ids and the bounds of its segments, in natural order."""

    ids: list[int]
    cached: tuple[Bounds, ...]


class SegmentTokenizer:
    """Tokenises prompts piece by piece, and remembers the ids of segments.

    Special tokens that the tokenizer adds by itself (BOS) are added once, around the whole prompt. Strings in the text
    that spell a special token become that token, as SGLang has it.

    The memory is an LRU by text, bounded in bytes. Not thread-safe: it lives in the HTTP process's event loop.
    """

    _ENTRY_OVERHEAD = 160

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int = 64 << 20) -> None:
        self._tokenizer = tokenizer
        self._budget = cache_bytes
        self._used = 0
        self._ids: OrderedDict[bytes, array[int]] = OrderedDict()
        self._specials: dict[frozenset[tuple[str, Any]], tuple[list[int], list[int]]] = {}
        # As SGLang does: only pass the argument where it matters, it is slow or unknown to some tokenizers.
        try:
            adds = len(tokenizer.encode("")) > 0
        except Exception:  # some tokenizers refuse the empty text
            adds = True
        self._bare: dict[str, Any] = {"add_special_tokens": False} if adds else {}

    def tokenize(self, pieces: Sequence[Piece], encode_kwargs: Mapping[str, Any] | None = None) -> Tokens:
        """Ids of the concatenated pieces, each tokenised by itself.

        Args:
            pieces: the prompt in natural order.
            encode_kwargs: what SGLang would pass to ``encode`` for the whole prompt; decides on BOS and EOS.
        """
        prefix, suffix = self.specials(encode_kwargs or {})
        ids, cached = list(prefix), []
        for text, segment, known in pieces:
            start = len(ids)
            if known is not None:
                ids += known
            else:
                ids += self.segment_ids(text) if segment else self.plain_ids(text)
            if segment and len(ids) > start:
                cached.append(Bounds(start, len(ids)))
        return Tokens(ids + suffix, tuple(cached))

    def plain_ids(self, text: str) -> list[int]:
        """Ids of ``text`` alone, without BOS or EOS."""
        return list(self._tokenizer.encode(text, **self._bare)) if text else []

    def segment_ids(self, text: str) -> array[int]:
        """As :meth:`plain_ids`, remembered."""
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        found = self._ids.get(key)
        if found is not None:
            self._ids.move_to_end(key)
            return found
        ids = array("i", self.plain_ids(text))
        self._ids[key] = ids
        self._used += self._cost(ids)
        while self._used > self._budget:
            self._used -= self._cost(self._ids.popitem(last=False)[1])
        return ids

    def specials(self, encode_kwargs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Tokens that ``encode(text, **encode_kwargs)`` puts before and after those of the text itself."""
        key = frozenset(encode_kwargs.items())
        if key not in self._specials:
            bare, whole = self.plain_ids("a"), list(self._tokenizer.encode("a", **encode_kwargs))
            at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
            self._specials[key] = ([], []) if at is None else (whole[:at], whole[at + len(bare) :])
        return self._specials[key]

    def _cost(self, ids: array[int]) -> int:
        return ids.itemsize * len(ids) + self._ENTRY_OVERHEAD
