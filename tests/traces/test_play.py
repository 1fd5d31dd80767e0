"""The open loop: requests go out when they are due, latencies count from then, and nothing is lost on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hypic.traces.figures import Slo, figures, quantile
from hypic.traces.format import Span
from hypic.traces.play import Limits, Outcome, Played, Seen, _lost, fill, play, scaled
from hypic.traces.prompts import Prompt, PromptMaker
from tests.traces.helpers import Timed, due, request

MAKER = PromptMaker(5000)
PATIENT = Limits(timeout=30)
SLACK = 0.15
"""Seconds by which a busy machine may be late."""


def run(requests: list, target: object, limits: Limits = PATIENT) -> Played:
    return asyncio.run(play(requests, target, MAKER, limits))  # type: ignore[arg-type]


def test_arrivals_do_not_wait_for_answers_and_queueing_counts() -> None:
    """One server that takes 50 ms, a request every 10 ms: the n-th waits for n - 1 others, and all of that is in its TTFT."""
    played = run(due([0.01 * i for i in range(12)]), Timed(0.05, at_once=1))
    assert played.end == "complete"
    for n, o in enumerate(played.outcomes):
        assert o.sent is not None and -0.01 < o.sent - o.due < SLACK
        assert 0.05 + 0.04 * n - 0.02 < o.ttft < 0.05 + 0.04 * n + SLACK + 0.01 * n
    assert played.outcomes[-1].ttft > 0.4


def test_a_target_that_holds_up_the_client_is_seen_in_lag_and_latency() -> None:
    class Blocking(Timed):
        async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncIterator[Seen]:
            time.sleep(0.06)
            yield Seen(1, 0)

    played = run(due([0.01 * i for i in range(10)]), Blocking(0))
    found = figures(played, Slo(), max_lag=0.05)
    assert not found.kept_up and (found.lag["max"] or 0) > 0.3
    assert (found.ttft["max"] or 0) > 0.5, "from when it was due, not from when it was sent"
    assert figures(run(due([0.0, 0.01]), Timed(0.001)), Slo(), max_lag=5.0).kept_up


def test_errors_and_timeouts_stay_in_the_percentiles() -> None:
    target = Timed(0.01, broken=[3], stuck=[5, 6])
    played = run(due([0.02 * i for i in range(20)], output=2), target, Limits(timeout=0.5))
    found = figures(played, Slo(ttft=0.4), 1.0)
    assert (found.requests, found.ok, found.errors, found.timeouts, found.cut) == (20, 17, 1, 2, 0)
    assert found.ttft["p50"] is not None and found.ttft["p90"] is None and found.e2e["p95"] is None
    assert found.tpot["p99"] is None and found.met == 17 / 20
    assert found.ttft_cdf[85] is not None and found.ttft_cdf[86] is None
    assert found.first_errors == ["ValueError: broken"]
    assert target.aborted == 3, "what is given up is aborted"
    timeouts = [o for o in played.outcomes if o.status == "timeout"]
    assert len(timeouts) == 2 and all(o.ttft == float("inf") for o in timeouts)


def test_a_lost_slo_ends_the_run_early() -> None:
    began = time.perf_counter()
    played = run(due([0.01 * i for i in range(400)]), Timed(0.3), Limits(30, ttft=0.1, lost=20))
    assert played.end == "slo" and time.perf_counter() - began < 2
    assert sum(o.status == "cut" for o in played.outcomes) > 300, "those never sent are there, too"
    assert figures(played, Slo(0.1), 1.0).cut + figures(played, Slo(0.1), 1.0).ok == 400
    kept = run(due([0.01 * i for i in range(40)]), Timed(0.001), Limits(30, ttft=0.1 + SLACK, lost=2))
    assert kept.end == "complete" and all(o.status == "ok" for o in kept.outcomes)


def test_what_is_lost() -> None:
    def outcome(at: float, first: float | None, status: Any = "ok") -> Outcome:
        return Outcome(number=0, due=at, prompt_tokens=1, wanted=1, first=first, last=first, tokens=1, status=status)

    late, good, failed = outcome(0, 0.6), outcome(0.1, 0.3), outcome(0.2, 0.3, "error")
    waiting, young = outcome(0.3, None, "cut"), outcome(0.9, None, "cut")
    assert [_lost([o], 1.0, 0.5) for o in (late, good, failed, waiting, young)] == [1, 0, 1, 1, 0]
    assert _lost([late, good, failed, waiting, young], 1.0, 0.5) == 3


def test_the_deadline_ends_the_run() -> None:
    target = Timed(0.005, stuck=[0])
    played = run(due([0.0, 0.1, 60.0]), target, Limits(30, deadline=time.perf_counter() + 0.4))
    assert played.end == "budget" and [o.status for o in played.outcomes] == ["cut", "ok", "cut"]
    assert target.aborted == 1 and played.outcomes[2].sent is None


def test_warming_up_keeps_some_at_a_time_and_ends_at_a_failure() -> None:
    most = 0

    class Counting(Timed):
        now = 0

        async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncIterator[Seen]:
            nonlocal most
            self.now += 1
            most = max(most, self.now)
            async for seen in super().ask(prompt, new_tokens):
                yield seen
            self.now -= 1

    target = Counting(0.005)
    assert asyncio.run(fill(due([9.0] * 12), target, MAKER, at_once=3)) and (most, target.asked) == (3, 12)
    with pytest.raises(RuntimeError, match="request 2 of the warm-up failed: broken"):
        asyncio.run(fill(due([0.0] * 5), Timed(0.001, broken=[2]), MAKER, at_once=2))
    assert not asyncio.run(fill(due([0.0] * 5), Timed(0.01), MAKER, at_once=1, deadline=time.perf_counter() + 0.02))


def test_times_are_scaled() -> None:
    requests = [request(at=t) for t in (1000, 1500, 3000)]
    assert [d.at for d in scaled(requests, 7)] == [0, 0.5, 2.0]
    assert [d.at for d in scaled(requests, 7, speedup=4)] == [0, 0.125, 0.5]
    assert [d.at for d in scaled(requests, 7, qps=4)] == pytest.approx([0, 0.125, 0.5])
    assert [d.number for d in scaled(requests, 7)] == [7, 8, 9]
    assert [d.at for d in scaled([request(at=5)] * 2, 0, qps=2)] == [0, 0]


def test_prompts() -> None:
    spans = [Span("a", 3), Span("p", 2, plain=True), Span("ids", 2, token_ids=[1, 2]), Span("a", 3)]
    ids, bounds, tenant = MAKER.make(request(*spans, rest=4, tenant="t"), 0)
    assert (len(ids), bounds, tenant) == (14, [[0, 3], [5, 7], [7, 10]], "t")
    assert ids[:3] == ids[7:10] and ids[5:7] == [1, 2]
    other = PromptMaker(5000).make(request(*spans, rest=4), 1).ids
    assert other[:10] == ids[:10] and other[10:] != ids[10:], "what has no name is new"
    assert PromptMaker(5000, seed=1).make(request(*spans), 0).ids[:3] != ids[:3]
    assert all(1000 <= t < 5000 for i, t in enumerate(ids) if i not in (5, 6))


def test_text_needs_a_tokenizer() -> None:
    class Letters:
        def encode(self, text: str, **_: object) -> list[int]:
            return [ord(c) for c in text]

    text = request(Span("a", 2, text="xyz"), rest=1)
    assert PromptMaker(5000, tokenizer=Letters()).make(text, 0).bounds == [[0, 3]]
    played = asyncio.run(play(scaled([text], 0), Timed(0.0), PromptMaker(5000), PATIENT))
    assert played.outcomes[0].status == "error" and "tokenizer" in (played.outcomes[0].error or "")


def test_figures_by_hand() -> None:
    def outcome(n: int, ttft: float, tokens: int = 3, status: str = "ok") -> Outcome:
        at = float(n)
        return Outcome(
            number=n, due=at, sent=at + 0.001 * n, first=at + ttft, last=at + ttft + 0.2, tokens=tokens, wanted=tokens,
            prompt_tokens=100, cached=40, status=status,  # type: ignore[arg-type]
        )  # fmt: skip

    outcomes = [outcome(n, 0.1 * (n + 1)) for n in range(10)]
    found = figures(Played(outcomes, "complete"), Slo(ttft=0.85, tpot=0.15), max_lag=0.01)
    assert found.ttft == pytest.approx({"p50": 0.5, "p90": 0.9, "p95": 1.0, "p99": 1.0, "max": 1.0})
    assert found.tpot["p50"] == pytest.approx(0.1) and found.e2e["max"] == pytest.approx(1.2)
    assert found.met == 0.8 and found.seconds == pytest.approx(10.2) and found.goodput == pytest.approx(8 / 10.2)
    assert (found.offered, found.cached, found.prompt_tokens, found.output_tokens) == (1.0, 0.4, 1000, 30)
    assert figures(Played(outcomes, "complete"), Slo(tpot=0.05), 0.01).met == 0
    assert not figures(Played(outcomes, "complete"), Slo(), max_lag=0.008).kept_up
    single = figures(Played([outcome(0, 0.1, tokens=1)], "complete"), Slo(tpot=0.01), 1.0)
    assert single.tpot["p50"] is None and single.met == 1.0, "an answer of one token has no TPOT"


def test_quantiles_are_values_that_occurred() -> None:
    inf = float("inf")
    assert quantile([3.0, 1.0, 2.0], 50) == 2.0 and quantile([1.0] * 19 + [inf], 95) == 1.0
    assert quantile([1.0] * 18 + [inf] * 2, 95) is None and quantile([], 50) is None
    assert Slo(share=0.95).may_lose(100) == 5 and Slo(share=0.95).may_lose(19) == 0
