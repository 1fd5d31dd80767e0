"""The contract of a transition, and the three shapes of T."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Transition(ABC):
    """What a stretch of tokens does to the state of a head: ``h <- h T + S``.

    Attributes:
        T: the transition operator; its shape, after any leading dimensions (time, heads), is the family's.
        S: [..., V, K] the zero-start end-state, same leading dimensions.
    """

    T: Tensor
    S: Tensor

    @abstractmethod
    def act(self, rows: Tensor) -> Tensor:
        """rows [..., R, K] -> rows T."""

    @abstractmethod
    def after(self, operator: Tensor) -> Tensor:
        """The operator of an earlier stretch, then this one: ``operator`` T."""

    @staticmethod
    @abstractmethod
    def identity_operator(s: Tensor) -> Tensor:
        """The operator that changes nothing, for a zero-start end-state like ``s``."""

    @classmethod
    def identity(cls, s: Tensor) -> Self:
        """The neutral element, in the shape, type and device of ``s`` [..., V, K]."""
        return cls(cls.identity_operator(s), torch.zeros_like(s))

    def apply(self, h: Tensor) -> Tensor:
        """The state [..., V, K] after the stretch."""
        return self.act(h) + self.S

    def then(self, later: Self) -> Self:
        """This stretch followed by ``later``. Raises TypeError if they are of different families."""
        if type(self) is not type(later):
            raise TypeError(f"cannot compose {type(self).__name__} with {type(later).__name__}")
        return type(self)(later.after(self.T), later.act(self.S) + later.S)

    def __getitem__(self, index: int | slice) -> Self:
        """Select along the first (leading) dimension."""
        return type(self)(self.T[index], self.S[index])

    def __len__(self) -> int:
        return len(self.S)


class ScalarTransition(Transition):
    """T [...]: one factor per head (RetNet, Lightning attention, Mamba-2)."""

    def act(self, rows: Tensor) -> Tensor:
        return rows * self.T[..., None, None]

    def after(self, operator: Tensor) -> Tensor:
        return operator * self.T

    @staticmethod
    def identity_operator(s: Tensor) -> Tensor:
        return s.new_ones(s.shape[:-2])


class DiagonalTransition(Transition):
    """T [..., K]: one factor per key channel (GLA)."""

    def act(self, rows: Tensor) -> Tensor:
        return rows * self.T[..., None, :]

    def after(self, operator: Tensor) -> Tensor:
        return operator * self.T

    @staticmethod
    def identity_operator(s: Tensor) -> Tensor:
        return s.new_ones((*s.shape[:-2], s.shape[-1]))


class DenseTransition(Transition):
    """T [..., K, K]: a full matrix (DeltaNet, Gated DeltaNet, KDA, RWKV-7)."""

    def act(self, rows: Tensor) -> Tensor:
        return rows @ self.T

    def after(self, operator: Tensor) -> Tensor:
        return operator @ self.T

    @staticmethod
    def identity_operator(s: Tensor) -> Tensor:
        dk = s.shape[-1]
        return torch.eye(dk, dtype=s.dtype, device=s.device).expand(*s.shape[:-2], dk, dk)


F = TypeVar("F", bound=Transition)


def compose(first: F, *later: F) -> F:
    """One transition for all stretches, in natural order."""
    for step in later:
        first = first.then(step)
    return first


def fold(steps: F) -> F:
    """Compose along the first dimension by halving: log2(n) batched compositions, as a parallel scan would.

    Raises: ValueError on no steps (the family's ``identity`` is the answer, but its shape is unknown here).
    """
    if len(steps) == 0:
        raise ValueError("fold of no steps: use identity()")
    while len(steps) > 1:
        even = len(steps) // 2 * 2
        pairs = steps[:even:2].then(steps[1:even:2])
        last = steps[even:]
        steps = type(steps)(torch.cat([pairs.T, last.T]), torch.cat([pairs.S, last.S]))
    return steps[0]
