"""What data sets give, what methods return, and what metrics read."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Piece(NamedTuple):
    """A stretch of a prompt: text or token ids. ``segment`` pieces may be reused, the others are plain."""

    content: str | tuple[int, ...]
    segment: bool = False


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A question about documents.

    Attributes:
        id: unique within the data set.
        dataset, kind: what tables group by; ``kind`` is for example "upd", or "" if there is but one.
        pieces: the whole prompt in order, as the model reads it: its chat template is already applied. Each piece is
            tokenised by itself.
        closed_book: the same question without any document.
        answers: accepted answers, the best counts.
        metric: the official metric of the data set, a name in ``hypic.eval.metrics.METRICS``.
        max_new_tokens: greedy answers end there, or at an end-of-sequence token, or at one of ``stop``.
        first_line: only the first line of an answer is judged (LongBench's rule for TriviaQA).
    """

    id: str
    dataset: str
    pieces: tuple[Piece, ...]
    closed_book: tuple[Piece, ...]
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    kind: str = ""
    stop: tuple[str, ...] = ()
    first_line: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one method made of one item.

    Attributes:
        item, method: ids; ``closed_book`` is a method of its own, as is ``full``.
        text: the greedy answer.
        ids: its tokens.
        kl, agrees: per token of the *full-recompute* answer, forced on this method: KL divergence from full recompute's
            distribution to this method's in nats, and whether both have the same most likely token. Empty for "full"
            and "closed_book".
        tokens: of the prompt; ``reused`` of them were not computed for this answer.
        seconds: to the answer, for information: never a benchmark.
    """

    item: str
    method: str
    text: str
    ids: tuple[int, ...]
    tokens: int
    reused: int
    kl: tuple[float, ...] = ()
    agrees: tuple[bool, ...] = ()
    seconds: float = 0.0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How far one method is from full recompute inside the model, on one item. All are relative errors (L2 norms).

    Attributes:
        item, method: ids.
        layers: what each layer mixes with, "linear" or "attention".
        hidden: per layer, of its output at the tokens behind the last document.
        kept: per layer, of what it holds after the last document: K (rotated) and V of documents, or a linear layer's state.
        distance: of V (attention) or written values (linear) of the documents' tokens, by their place in their document:
            0, 1, 2, ...; the mean over layers and documents.
    """

    item: str
    method: str
    layers: tuple[str, ...]
    hidden: tuple[float, ...]
    kept: tuple[float, ...]
    distance: tuple[float, ...]
