"""Which tokens of a prompt are computed, which come from records, and who sees whom."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypic.eval.methods import Method


class Document(NamedTuple):
    """Tokens [start, end) of the prompt; [first, end), the interior, come from its record."""

    start: int
    first: int
    end: int


class Layout:
    """The first ``n`` tokens of a prompt under a method.

    Attributes:
        documents: those with an interior.
        computed: positions that are computed, ascending.
        idle: there are none such: modules get the first token, since they take no empty input, and nobody sees its outputs.
        places: position that each token's K is rotated to.
        mask: [computed, n], True = seen; None for plain causality among computed tokens alone.
    """

    def __init__(self, n: int, segments: Sequence[tuple[int, int]], method: Method, device: Any) -> None:
        self.n, self.method, self._device = n, method, device
        self._segments = list(segments)
        windows = [(a, a + method.window(b - a), b) for a, b in segments] if method.link else []
        self.documents = [Document(*w) for w in windows if w[1] < w[2]]
        interior = torch.zeros(n, dtype=torch.bool, device=device)
        self.places = torch.arange(n, device=device)
        for start, first, end in self.documents:
            interior[first:end] = True
            if not method.relocate:
                self.places[first:end] -= start
        self.interior = interior
        everything = torch.arange(n, device=device)
        self.computed = everything if method.blend else everything[~interior]
        self.idle = not len(self.computed)
        if self.idle:
            self.computed = everything[:1]

    def narrowed(self, keep: Tensor) -> Layout:
        """The same with only those of the computed tokens whose place in ``computed`` is in ``keep``."""
        other = object.__new__(Layout)
        other.__dict__.update({k: v for k, v in self.__dict__.items() if k != "mask"})
        other.computed = self.computed[keep]
        return other

    @functools.cached_property
    def mask(self) -> Tensor | None:
        if len(self.computed) == self.n and self.method.kv:
            return None
        seen = self.computed[:, None] >= torch.arange(self.n, device=self._device)
        if not self.method.kv:
            owner = self.owners
            seen &= (owner == 0) | (owner == owner[self.computed][:, None])
        return seen

    @functools.cached_property
    def owners(self) -> Tensor:
        """[n]: 0 for a token outside all segments, else the number of its segment from 1."""
        owner = torch.zeros(self.n, dtype=torch.long, device=self._device)
        for i, (start, end) in enumerate(self._segments):
            owner[start:end] = i + 1
        return owner

    def fill(self, own: Tensor, records: Sequence[Tensor]) -> Tensor:
        """One row for each of the ``n`` tokens: of the computed ones from ``own``, the others from their document's record
        (``records``: a tensor for each of ``documents``, a row for each of its tokens)."""
        if len(self.computed) == self.n:
            return own
        rows = own.new_empty(self.n, *own.shape[1:])
        for (start, first, end), record in zip(self.documents, records, strict=True):
            rows[first:end] = record[first - start :]
        if not self.idle:
            rows[self.computed] = own
        return rows
