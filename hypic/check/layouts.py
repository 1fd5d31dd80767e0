"""Random prompts for stress tests: segments from a pool of documents, plain gaps between them, in awkward layouts.

Everything is drawn from the ``random.Random`` that is passed in, so a seed names a layout, and hypothesis can hand in
its own generator and shrink what it drew.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

LENGTHS = (1, 3, 7, 8, 9, 63, 64, 65, 100, 200)
"""Document lengths around the conv kernel (4), the default seam window (8) and the gated-delta-net chunk (64)."""

FIRST_TOKEN = 3
"""Ids below it are left out: small vocabularies keep their special tokens there."""

_MAX_GAP = 40
_SHORT_GAPS = (0, 1, 2, 3)  # adjacent, or shorter than the conv kernel


class Layout(NamedTuple):
    """A prompt and its segments.

    Attributes:
        ids: the tokens, at least one.
        cached: [start, end) of each segment, in natural order; it may be too short to be cached, or end the prompt.
    """

    ids: list[int]
    cached: list[tuple[int, int]]


def document_pool(
    rng: random.Random, vocab: int, *, lengths: Sequence[int] = LENGTHS, copies: int = 2
) -> tuple[tuple[int, ...], ...]:
    """``copies`` different documents of each length, tokens in [FIRST_TOKEN, vocab). One pool serves many layouts."""
    return tuple(_tokens(rng, vocab, n) for n in lengths for _ in range(copies))


def random_layout(
    rng: random.Random, vocab: int, *, max_tokens: int, pool: Sequence[tuple[int, ...]], max_segments: int = 8
) -> Layout:
    """A prompt of 1..max_tokens tokens: gaps, segments of ``pool``, and a query, any of which may be missing.

    One layout in eight each is only a query, only segments, or ends in a segment. In the others, gaps are as often
    short or absent as not, and a segment often repeats one that the prompt already has.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: a prompt has at least one token")
    shape = rng.choice(("query", "segments", "ends in segment", "mixed", "mixed", "mixed", "mixed", "mixed"))
    gaps = shape != "segments"
    query = rng.randint(1, min(_MAX_GAP, max_tokens)) if shape in ("query", "mixed") else 0
    ids: list[int] = []
    cached: list[tuple[int, int]] = []
    used: list[tuple[int, ...]] = []
    for _ in range(0 if shape == "query" else rng.randint(1, max_segments)):
        gap = _gap(rng) if gaps else 0
        fitting = [doc for doc in pool if len(ids) + gap + len(doc) + query <= max_tokens]
        if not fitting:
            break
        again = [doc for doc in used if doc in fitting]
        doc = rng.choice(again if again and rng.random() < 0.3 else fitting)
        ids += _tokens(rng, vocab, gap)
        cached.append((len(ids), len(ids) + len(doc)))
        ids += doc
        used.append(doc)
    ids += _tokens(rng, vocab, query or (0 if ids else 1))
    return Layout(ids, cached)


def _gap(rng: random.Random) -> int:
    return rng.choice(_SHORT_GAPS) if rng.random() < 0.5 else rng.randint(0, _MAX_GAP)


def _tokens(rng: random.Random, vocab: int, n: int) -> tuple[int, ...]:
    """``n`` tokens from a single draw, so that hypothesis does not shrink them one by one."""
    if not n:
        return ()
    own = random.Random(rng.getrandbits(32))
    return tuple(own.randrange(FIRST_TOKEN, vocab) for _ in range(n))
