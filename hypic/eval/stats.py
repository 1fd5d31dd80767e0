"""Means with bootstrap intervals over groups of questions that share their documents."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

DRAWS = 2000


class Estimate(msgspec.Struct, frozen=True):
    """A mean and its 95% interval; ``low`` and ``high`` are None where one group alone was seen.

    Questions about the same documents are right and wrong together, so groups are drawn, not questions. Where every
    group has the same mean the interval has no width, which says that the sample is small, not that the mean is certain:
    with n independent questions all right, up to 3/n may be wrong.
    """

    value: float
    low: float | None = None
    high: float | None = None


def mean(values: Sequence[float], groups: Sequence[Hashable], weights: Sequence[float] | None = None) -> Estimate:
    """Weighted mean of ``values`` with a percentile bootstrap over ``groups``; the same input gives the same interval.

    Args:
        values: one per question. groups: what each belongs to.
        weights: for example the tokens that a value is the mean of; all equal if None.
    Raises:
        ValueError: there is no value, or no weight.
    """
    import numpy as np  # `hypic --help` comes by here

    if not len(values) or len(values) != len(groups):
        raise ValueError(f"{len(values)} values in {len(groups)} groups")
    w = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    index = {g: i for i, g in enumerate(dict.fromkeys(groups))}
    where = np.array([index[g] for g in groups])
    sums = np.bincount(where, w * np.asarray(values, float))
    sizes = np.bincount(where, w)
    if sizes.sum() <= 0:
        raise ValueError("weights add up to nothing")
    value = float(sums.sum() / sizes.sum())
    if len(index) < 2:
        return Estimate(value)
    rng = np.random.default_rng(len(index))  # the same draws for every method: differences between intervals are theirs
    drawn = rng.multinomial(len(index), np.full(len(index), 1 / len(index)), size=DRAWS)
    total = drawn @ sizes
    means = (drawn @ sums)[total > 0] / total[total > 0]
    low, high = np.quantile(means, (0.025, 0.975))
    # Rounding must not put the mean outside of an interval without width.
    return Estimate(value, min(float(low), value), max(float(high), value))
