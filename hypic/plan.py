"""Run plans: which tokens of a linked prompt are computed, in what order, and which artifact joins after which run.

Pure Python; no device, no SGLang. Positions are natural positions in the prompt. SGLang wants an extend batch as
"cached prefix, then new tokens", so a linked prompt is *presented* to it in another order::

    natural     [ radix hit | plain seam | interior | seam | interior | query ]
    presented   [ radix hit | interior | interior | plain seam | seam | query ]
                  '------- cached prefix -------'   '----- computed -----'

From the end of the last interior on, the two orders agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NO_ARTIFACT = -1


class Interior(NamedTuple):
    """Tokens [lo, hi) of the prompt that an artifact covers (maybe none); `segment` indexes the request's segments."""

    lo: int
    hi: int
    segment: int


class Run(NamedTuple):
    """Tokens of one forward pass that are contiguous in the prompt (run, see docs/SEMANTICS.md).

    Attributes:
        offset: first token of the run within the chunk's computed tokens.
        length: tokens; 0 for a run that only joins an artifact.
        start: natural position of the first token.
        segment: the segment whose artifact joins after this run, or NO_ARTIFACT.
    """

    offset: int
    length: int
    start: int
    segment: int


class LinkLayout:
    """The presented order of one linked prompt and its runs.

    Args:
        total: tokens of the prompt (after a retraction: with the tokens generated so far).
        hit: tokens the radix tree already holds; never strictly inside an interior.
        interiors: in natural order, disjoint, those that end at or before `hit` left out.

    Raises:
        ValueError: interiors out of order, overlapping, cut by `hit`, or reaching the end (a token must be computed
            for logits).
    """

    def __init__(self, total: int, hit: int, interiors: Sequence[Interior]):
        self.total, self.hit, self.interiors = total, hit, tuple(interiors)
        end = hit
        for lo, hi, segment in self.interiors:
            if not end <= lo <= hi:
                raise ValueError(f"interior [{lo}, {hi}) of segment {segment} does not follow position {end}")
            end = hi
        if end >= total:
            raise ValueError(f"the last interior ends at {end} of {total} tokens: none is left to compute")
        self.reserve_end = end
        """Natural positions [hit, reserve_end) get their KV slots in one reservation, in natural order."""
        self.interior_tokens = sum(i.hi - i.lo for i in self.interiors)
        self.prefix_len = hit + self.interior_tokens
        """Presented prefix: radix hit plus interiors."""

        gaps, pieces, at = [], [], hit
        for lo, hi, segment in self.interiors:
            gaps.append((at, lo, segment))
            pieces.append(np.arange(lo, hi))
            at = hi
        gaps.append((at, total, NO_ARTIFACT))
        self._gaps = gaps
        self._order = np.concatenate(pieces + [np.arange(lo, hi) for lo, hi, _ in gaps])

    def order(self, begin: int, end: int) -> np.ndarray:
        """Natural positions (int64) of the presented range [begin, end)."""
        head = np.arange(begin, min(end, self.hit))
        return np.concatenate([head, self._order[max(begin - self.hit, 0) : max(end - self.hit, 0)]])

    def runs(self, begin: int, end: int) -> list[Run]:
        """Runs of the chunk [begin, end) in presented positions, begin >= prefix_len.

        An artifact belongs to the chunk that computes the last token before it; artifacts in front of the first
        computed token belong to the first chunk.
        """
        if not self.prefix_len <= begin <= end <= self.total:
            raise ValueError(f"chunk [{begin}, {end}) is not within [{self.prefix_len}, {self.total})")
        first, last = begin - self.prefix_len, end - self.prefix_len
        runs, done = [], 0
        for lo, hi, segment in self._gaps:
            stop = done + hi - lo
            a, b = max(first, done), min(last, stop)
            joins = segment if (first < stop <= last or (stop == 0 and first == 0)) else NO_ARTIFACT
            if a < b:
                runs.append(Run(a - first, b - a, lo + a - done, joins))
            elif joins != NO_ARTIFACT:
                runs.append(Run(stop - first, 0, hi, joins))
            done = stop
        return runs

    def computed_below(self, begin: int, end: int, position: int) -> int:
        """How many tokens of the presented chunk [begin, end) lie before natural `position`."""
        return int(np.count_nonzero(self.order(begin, end) < position))


MARK = 1 << 40
"""Added to the ids of interior tokens in radix keys; twice at the first one, so that a boundary is visible at any w."""

NO_MATCH = -1
"""An id that no token has: ends a radix match."""


def mark_interiors(ids: Sequence[int], interiors: Sequence[Interior]) -> np.ndarray:
    """Token ids (int64) as they enter the radix key of a linked request (docs/SEMANTICS.md, keys).

    KV of an interior token depends on its segment's boundaries, so the boundaries up to each position are part of the
    key: equal keys up to a position mean equal tokens *and* equal spans up to it.
    """
    key = np.array(ids, dtype=np.int64)
    for lo, hi, _ in interiors:
        key[lo:hi] += MARK
        key[lo : min(lo + 1, hi)] += MARK
    return key
