"""The highest rate that passes, by doubling or halving and then bisection."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

FOUND = "found"
LOWEST, HIGHEST = 1 / 64, 1024
"""How far below and above its start a search goes."""


class Found(NamedTuple):
    """The highest rate that passed and the lowest that failed, where there were such, and why the search ended."""

    passed: float | None
    failed: float | None
    end: str


async def highest(
    probe: Callable[[float], Awaitable[bool | None]],
    start: float,
    *,
    tolerance: float,
    probes: int,
    passed: float | None = None,
    failed: float | None = None,
) -> Found:
    """Search from `start`, or between `passed` and `failed` where an earlier search ended.

    Args:
        probe: whether a rate passes; None if it could not be tried, which ends the search.
        tolerance: end when the two bounds are no further apart than by this share.
        probes: how many rates are tried at most.
    """
    for tried in range(probes + 1):
        if passed is not None and failed is not None and failed / passed <= 1 + tolerance:
            return Found(passed, failed, FOUND)
        rate = _between(passed, failed, start)
        if not start * LOWEST <= rate <= start * HIGHEST:
            return Found(passed, failed, "no bound in reach of the first rate")
        if tried == probes:
            break
        verdict = await probe(rate)
        if verdict is None:
            return Found(passed, failed, "out of time, or the client could not keep up")
        if verdict:
            passed = rate
        else:
            failed = rate
    return Found(passed, failed, f"after {probes} probes")


def _between(passed: float | None, failed: float | None, start: float) -> float:
    if passed is None:
        return start if failed is None else failed / 2
    return passed * 2 if failed is None else math.sqrt(passed * failed)
