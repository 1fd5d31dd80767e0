"""The highest rate that passes, by doubling or halving and then bisection."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

LOWEST, HIGHEST = 1 / 64, 1024
"""How far below and above its start a search goes."""


class Found(NamedTuple):
    """The highest rate that passed and the lowest that failed, where there were such, and why the search ended."""

    passed: float | None
    failed: float | None
    end: str


async def highest(
    probe: Callable[[float], Awaitable[bool | None]], start: float, *, tolerance: float, probes: int
) -> Found:
    """Search from `start`.

    Args:
        probe: whether a rate passes; None if it could not be tried, which ends the search.
        tolerance: end when the two bounds are no further apart than by this share.
        probes: how many rates are tried at most.
    """
    passed: float | None = None
    failed: float | None = None
    rate = start
    for _ in range(probes):
        verdict = await probe(rate)
        if verdict is None:
            return Found(passed, failed, "out of time, or the client could not keep up")
        if verdict:
            passed = rate
        else:
            failed = rate
        if passed is None:
            rate /= 2
        elif failed is None:
            rate *= 2
        elif failed / passed <= 1 + tolerance:
            return Found(passed, failed, "found")
        else:
            rate = math.sqrt(passed * failed)
        if not start * LOWEST <= rate <= start * HIGHEST:
            return Found(passed, failed, "no bound in reach of the first rate")
    return Found(passed, failed, f"after {probes} probes")
