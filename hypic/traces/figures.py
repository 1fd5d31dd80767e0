"""Percentiles, goodput and the client's own lag of a run. A request that failed has an infinite latency and stays in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from hypic.traces.play import Outcome, Played

QUANTILES = (50, 90, 95, 99)
CDF_POINTS = 101


class Slo(msgspec.Struct, frozen=True):
    """What a request has to keep, in seconds; `share` of the requests must."""

    ttft: float | None = None
    tpot: float | None = None
    share: float = 0.95

    def met(self, o: Outcome) -> bool:
        tpot = o.tpot
        return (
            o.status == "ok"
            and (self.ttft is None or o.ttft <= self.ttft)
            and (self.tpot is None or tpot is None or tpot <= self.tpot)
        )

    def may_lose(self, requests: int) -> int:
        """How many of `requests` may miss it."""
        return math.floor(requests * (1 - self.share) + 1e-9)


Quantiles = dict[str, float | None]
"""p50, p90, p95, p99 and max in seconds; None where that request was not answered."""


class Figures(msgspec.Struct, kw_only=True):
    """One run. Times in seconds, from when a request was due.

    Attributes:
        offered: requests per second that were due. seconds: from the first one due to the last token.
        ok, errors, timeouts, cut: add up to `requests`; cut are those the run did not wait for, or never sent.
        ttft, tpot, e2e: over all requests. tpot: over those of at least two tokens.
        lag: of the client, from due to sent. kept_up: its p99 is within the bound.
        met: share that kept the SLO. goodput: how many of those per second.
        prompt_tokens, output_tokens: of the answered requests. cached: share of their prompt tokens that was not computed.
        first_errors: texts of some errors. ttft_cdf: TTFT at 0%, 1%, ... 100% of the requests.
    """

    requests: int
    ok: int
    errors: int
    timeouts: int
    cut: int
    offered: float
    seconds: float
    ttft: Quantiles
    tpot: Quantiles
    e2e: Quantiles
    lag: Quantiles
    kept_up: bool
    met: float
    goodput: float
    prompt_tokens: int
    output_tokens: int
    cached: float
    first_errors: list[str]
    ttft_cdf: list[float | None]


def figures(played: Played, slo: Slo, max_lag: float) -> Figures:
    """`max_lag`: seconds that the client's p99 may be behind. There must be at least one request."""
    outcomes = played.outcomes
    ok = [o for o in outcomes if o.status == "ok"]
    sent = [o.sent - o.due for o in outcomes if o.sent is not None]
    ends = [o.last for o in ok if o.last is not None]
    seconds = max([*ends, outcomes[-1].due]) - outcomes[0].due
    due = outcomes[-1].due - outcomes[0].due
    met = sum(map(slo.met, outcomes))
    prompt = sum(o.prompt_tokens for o in ok)
    lag = _quantiles(sent)
    return Figures(
        requests=len(outcomes),
        ok=len(ok),
        errors=sum(o.status == "error" for o in outcomes),
        timeouts=sum(o.status == "timeout" for o in outcomes),
        cut=sum(o.status == "cut" for o in outcomes),
        offered=(len(outcomes) - 1) / due if due else 0.0,
        seconds=seconds,
        ttft=_quantiles([o.ttft for o in outcomes]),
        tpot=_quantiles([t for o in outcomes if (t := o.tpot) is not None]),
        e2e=_quantiles([o.e2e for o in outcomes]),
        lag=lag,
        kept_up=bool(sent) and (lag["p99"] or 0.0) <= max_lag,
        met=met / len(outcomes),
        goodput=met / seconds if seconds > 0 else 0.0,
        prompt_tokens=prompt,
        output_tokens=sum(o.tokens for o in ok),
        cached=sum(o.cached for o in ok) / prompt if prompt else 0.0,
        first_errors=list(dict.fromkeys(o.error for o in outcomes if o.error))[:3],
        ttft_cdf=[
            quantile([o.ttft for o in outcomes], q) for q in (100 * i / (CDF_POINTS - 1) for i in range(CDF_POINTS))
        ],
    )


def quantile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` of `values` do not exceed; None if that is infinite or there are none."""
    if not len(values):
        return None
    found = sorted(values)[max(0, math.ceil(len(values) * percent / 100 - 1e-9) - 1)]
    return found if math.isfinite(found) else None


def _quantiles(values: Sequence[float]) -> Quantiles:
    named: dict[str, Any] = {f"p{q}": quantile(values, q) for q in QUANTILES}
    return named | {"max": quantile(values, 100)}
