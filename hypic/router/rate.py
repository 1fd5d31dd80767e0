"""How fast something is, from reports of how long each part took, where parts may have been done at the same time."""

from __future__ import annotations

import msgspec

EWMA = 0.25
"""Weight of the newest sample."""
_LEAST_SECONDS = 50e-6


class Window(msgspec.Struct):
    """Parts of work that overlap: only their sum is a sample. Worker and pipe are one, however much is in them.

    Attributes:
        begin, until: from the first part's begin to the last one's end.
        amount: in all parts.
        before: the rate before this window; 0 if it was unknown.
    """

    begin: float
    until: float
    amount: float
    before: float

    @property
    def rate(self) -> float:
        """The moving average with this window as its newest sample."""
        sample = self.amount / (self.until - self.begin)
        return self.before + EWMA * (sample - self.before) if self.before else sample


def extended(window: Window | None, amount: float, seconds: float, now: float, known: float) -> Window:
    """The window with another part, which took `seconds` up to `now`; a new one if it begins after all others had ended.

    Args:
        known: the rate as known so far, 0 if it is not.
    """
    begin = now - max(seconds, _LEAST_SECONDS)
    if window is None or begin > window.until:
        return Window(begin, now, amount, known)
    return Window(min(window.begin, begin), max(window.until, now), window.amount + amount, window.before)
