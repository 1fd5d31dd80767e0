"""How fast something is, from reports of how long each part took."""

from __future__ import annotations

import math

import msgspec

MEMORY = 2.0
"""Seconds of work after which a measurement counts for 1/e: a rate is an average over the last seconds of work, so that a
short part that was lucky counts for little."""
_LEAST_SECONDS = 50e-6


class Rate(msgspec.Struct):
    """Parts that each took time of their own.

    Attributes:
        rate: 0 if unknown.
        seconds: of work that it stands for.
    """

    rate: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        kept = self.seconds * math.exp(-seconds / MEMORY) if self.rate else 0.0
        self.seconds = kept + seconds
        self.rate = (self.rate * kept + amount) / self.seconds


class Window(msgspec.Struct):
    """Parts that overlap, such as transfers: only their sum is a measurement. The pipe is one, however much is in it.

    Attributes:
        begin, until: from the first part's begin to the last one's end.
        amount: in all parts.
        before: the rate before this window.
        weight: seconds of work that `before` stands for.
    """

    begin: float
    until: float
    amount: float
    before: float
    weight: float

    @property
    def seconds(self) -> float:
        """Seconds of work that `rate` stands for."""
        return self._kept + self.until - self.begin

    @property
    def rate(self) -> float:
        """The average with this window."""
        return (self.before * self._kept + self.amount) / self.seconds

    @property
    def _kept(self) -> float:
        return self.weight * math.exp((self.begin - self.until) / MEMORY)


def extended(window: Window | None, amount: float, seconds: float, now: float) -> Window:
    """The window with another part, which took `seconds` up to `now`; a new one if it begins after all others had ended."""
    begin = now - max(seconds, _LEAST_SECONDS)
    if window is None:
        return Window(begin, now, amount, 0.0, 0.0)
    if begin > window.until:
        return Window(begin, now, amount, window.rate, window.seconds)
    return Window(
        min(window.begin, begin), max(window.until, now), window.amount + amount, window.before, window.weight
    )
