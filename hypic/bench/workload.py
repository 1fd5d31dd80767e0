"""Prompts to time: their shape, and token ids drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

FIRST_TOKEN = 1000
"""Ids below are left out: they may be special tokens."""

Prompt = tuple[list[int], list[list[int]]]
"""Token ids, and [start, end) of each segment."""


class Workload(msgspec.Struct, frozen=True):
    """One shape of prompt, and how often each case is timed.

    Attributes:
        system, query: plain tokens before and behind the segments.
        segments, segment_tokens: how many segments, of how many tokens each.
        reps: repetitions that count; one more goes before them.
        seed: of all token ids.
    """

    system: int = 32
    segments: int = 16
    segment_tokens: int = 2048
    query: int = 64
    reps: int = 5
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.system + self.segments * self.segment_tokens + self.query

    def seams(self, w: int) -> int:
        """Tokens that a warm link computes: plain text, and `w` at the head of each segment."""
        return self.system + self.segments * min(w, self.segment_tokens) + self.query


class Prompts:
    """Prompts of one workload. Two engines that draw in the same order draw the same ids."""

    def __init__(self, workload: Workload, vocab: int):
        self.workload = workload
        self._ids = range(min(FIRST_TOKEN, vocab // 2), vocab)
        self._rng = random.Random(workload.seed)
        self._system = self.tokens(workload.system)

    def tokens(self, n: int) -> list[int]:
        return self._rng.choices(self._ids, k=n)

    def documents(self) -> list[list[int]]:
        return [self.tokens(self.workload.segment_tokens) for _ in range(self.workload.segments)]

    def shuffled(self, documents: list[list[int]]) -> list[list[int]]:
        return self._rng.sample(documents, len(documents))

    def prompt(self, documents: Sequence[list[int]], query: int | None = None) -> Prompt:
        """System tokens, `documents`, and a new query of `query` tokens (default: the workload's)."""
        ids, bounds = list(self._system), []
        for document in documents:
            bounds.append([len(ids), len(ids) + len(document)])
            ids += document
        return ids + self.tokens(self.workload.query if query is None else query), bounds
