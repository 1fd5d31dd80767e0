"""Token ids for the requests of a trace."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from hypic.bench.workload import FIRST_TOKEN
from hypic.traces.format import Span, TraceRequest

if TYPE_CHECKING:
    import numpy as np

CACHED_TOKENS = 1 << 25


class Prompt(NamedTuple):
    """Token ids, [start, end) of each segment, and the tenant."""

    ids: list[int]
    bounds: list[list[int]]
    tenant: str | None


class PromptMaker:
    """Makes prompts; the same seed gives the same prompts on every engine.

    Args:
        vocab: drawn ids are below it.
        seed: of the drawn ids.
        tokenizer: for spans with text; without one they are an error.
    """

    def __init__(self, vocab: int, seed: int = 0, tokenizer: Any = None) -> None:
        self._first, self._vocab, self._seed, self._tokenizer = min(FIRST_TOKEN, vocab // 2), vocab, seed, tokenizer
        self._known: OrderedDict[tuple[str | int, int], np.ndarray] = OrderedDict()
        self._held = 0

    def make(self, request: TraceRequest, number: int) -> Prompt:
        """The prompt of `request`, which is the `number`-th of its trace.

        Raises:
            ValueError: a span has text, and there is no tokenizer.
        """
        import numpy as np  # late: `hypic --help` need not wait for it

        pieces, bounds, at = [], [], 0
        for span in request.segments:
            ids = self._span(span)
            if not span.plain:
                bounds.append([at, at + len(ids)])
            pieces.append(ids)
            at += len(ids)
        rest = request.input_length - sum(s.len for s in request.segments)
        if rest or not pieces:
            pieces.append(self._draw(f"rest {number}", max(rest, 1)))
        return Prompt(np.concatenate(pieces).tolist(), bounds, request.tenant)

    def _span(self, span: Span) -> np.ndarray:
        import numpy as np

        known = self._known.get(key := (span.id, span.len))
        if known is not None:
            self._known.move_to_end(key)
            return known
        if span.token_ids is not None:
            ids = np.array(span.token_ids)
        elif span.text is not None:
            if self._tokenizer is None:
                raise ValueError(f"segment {span.id!r} has text, and there is no tokenizer here: give token_ids")
            ids = np.array(self._tokenizer.encode(span.text, add_special_tokens=False))
        else:
            ids = self._draw(f"span {span.id!r}", span.len)
        self._known[key] = ids
        self._held += len(ids)
        while self._held > CACHED_TOKENS:
            self._held -= len(self._known.popitem(last=False)[1])
        return ids

    def _draw(self, name: str, n: int) -> np.ndarray:
        import numpy as np

        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
        return np.random.default_rng(int.from_bytes(digest, "little")).integers(self._first, self._vocab, n)
