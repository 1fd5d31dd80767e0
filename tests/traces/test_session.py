"""What a plan does on a target: every run begins alike, the search brackets the truth, the sweep caches what it says."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic.traces.figures import Slo
from hypic.traces.play import Outcome, Seen
from hypic.traces.prompts import Prompt, PromptMaker
from hypic.traces.result import EngineReplay, Plan
from hypic.traces.search import highest
from hypic.traces.session import Session, holding, share_cached
from tests.traces.helpers import Timed, request

MAKER = PromptMaker(5000)


def session(target: Any, requests: list[Any], plan: Plan, **more: Any) -> EngineReplay:
    result = EngineReplay(name="x", flags=[], settings={})
    asyncio.run(Session(target, MAKER, requests, plan, result, **more).run())
    return result


def trace(n: int, seconds: float = 1.0) -> list[Any]:
    return [request((f"d{i % 5}", 100), ("e", 70), at=1e3 * seconds * i) for i in range(n)]


@given(st.floats(0.05, 500), st.floats(0.1, 10), st.floats(0.02, 0.5))
def test_the_search_brackets_the_truth(truth: float, start: float, tolerance: float) -> None:
    tried: list[float] = []

    async def probe(rate: float) -> bool:
        tried.append(rate)
        return rate <= truth

    found = asyncio.run(highest(probe, start, tolerance=tolerance, probes=60))
    if found.end == "found":
        assert found.passed is not None and found.failed is not None
        assert found.passed <= truth < found.failed <= found.passed * (1 + tolerance)
    else:
        assert truth < start / 64 or truth > start * 512
    assert len(set(tried)) == len(tried)


def test_the_search_ends_when_it_cannot_go_on() -> None:
    async def probe(rate: float) -> bool | None:
        return True if rate < 4 else None

    assert asyncio.run(highest(probe, 1.0, tolerance=0.1, probes=9))[:2] == (2.0, None)

    async def passes(rate: float) -> bool:
        return True

    assert asyncio.run(highest(passes, 1.0, tolerance=0.1, probes=3)) == (4.0, None, "after 3 probes")


def test_the_highest_rate_of_a_server_that_is_known() -> None:
    """One request at a time, 20 ms each: at q per second the last of 40 waits 40 (20 ms - 1/q), 0.23 s at q = 70.

    A busy machine serves fewer; a client that waited for answers would find no bound at all.
    """
    plan = Plan(warmup=2, requests=40, find=True, start_qps=40, tolerance=0.25, slo=Slo(ttft=0.25), max_lag=5)
    target = Timed(0.02, at_once=1)
    found = session(target, trace(42), plan)
    assert found.search_end == "found" and found.highest is not None and found.failed is not None
    assert 5 < found.highest < 80 and found.failed <= 1.25 * found.highest
    assert target.flushed == len(found.runs)
    assert [r.passed for r in found.runs if r.qps == found.highest] == [True]
    lost = [r for r in found.runs if r.passed is False]
    assert lost and all(r.end == "slo" or r.figures.met < 0.95 for r in lost)


def test_every_run_begins_with_flushed_caches_and_the_same_warm_up() -> None:
    order: list[Any] = []

    class Noting(Timed):
        async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncIterator[Seen]:
            order.append((tuple(prompt.ids), new_tokens))
            async for seen in super().ask(prompt, new_tokens):
                yield seen

        async def flush(self) -> None:
            order.append("flush")

    plan = Plan(warmup=3, warmup_at_once=1, requests=4, find=True, start_qps=50, probes=2, slo=Slo(ttft=5.0), max_lag=5)
    session(Noting(0.001), trace(9), plan)
    runs = [list(group) for group in _split(order)]
    assert len(runs) == 2 and runs[0] == runs[1] and len(runs[0]) == 7
    assert [n for _, n in runs[0]] == [1, 1, 1, 2, 2, 2, 2], "the warm-up asks for one token"
    order.clear()
    session(Noting(0.001), trace(9), plan, keeps=False)
    assert [len(g) for g in _split(order)] == [1 + 4, 1 + 4], "without caches one request warms the engine itself"


def _split(order: list[Any]) -> list[list[Any]]:
    runs: list[list[Any]] = []
    for item in order:
        if item == "flush":
            runs.append([])
        else:
            runs[-1].append(item)
    return runs


def test_a_plain_replay_writes_its_outcomes_and_keeps_to_its_seconds(tmp_path: Path) -> None:
    plan = Plan(warmup=1, requests=100, seconds=0.2, speedup=20)
    found = session(Timed(0.001), trace(50), plan, out=tmp_path)
    (run,) = found.runs
    assert run.kind == "replay" and run.figures.requests == 5 == run.figures.ok, "0, 50, ... 200 ms"
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in (tmp_path / "x-0.jsonl").read_bytes().splitlines()]
    assert [o.number for o in outcomes] == [1, 2, 3, 4, 5]


def test_a_budget_ends_a_search_with_what_it_has() -> None:
    plan = Plan(warmup=0, requests=20, find=True, start_qps=100, slo=Slo(ttft=9.0), max_lag=5)
    kept: list[int] = []
    found = session(
        Timed(0.001), trace(30), plan, deadline=time.perf_counter() + 0.5, keep=lambda r: kept.append(len(r.runs))
    )
    assert found.cut_short and found.highest is not None and "time" in (found.search_end or "")
    assert kept == sorted(kept) and kept[-1] == len(found.runs)


def test_a_search_that_was_cut_short_goes_on() -> None:
    plan = Plan(warmup=0, requests=5, find=True, start_qps=1000, probes=2, slo=Slo(ttft=9.0), max_lag=5)
    result = session(Timed(0.001), trace(5), plan)
    assert [r.qps for r in result.runs] == [1000, 2000]
    asyncio.run(Session(Timed(0.001), MAKER, trace(5), plan, result).run())
    assert [r.qps for r in result.runs] == [1000, 2000, 4000, 8000] and result.highest == 8000
    result.failed = 8100
    asyncio.run(Session(Timed(0.001), MAKER, trace(5), plan, result).run())
    assert len(result.runs) == 4 and result.search_end == "found"


def test_a_late_client_gives_no_verdict() -> None:
    class Blocking(Timed):
        async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncIterator[Seen]:
            time.sleep(0.03)
            yield Seen(1, 0)

    plan = Plan(warmup=0, requests=20, find=True, start_qps=100, slo=Slo(ttft=9.0), max_lag=0.05)
    found = session(Blocking(0), trace(20), plan)
    assert found.runs[0].passed is None and found.highest is None and len(found.runs) == 1


def test_the_sweep_caches_the_share_it_says() -> None:
    requests = [
        request(*((f"d{i}.{j}", 60 + 10 * j) for j in range(8)), rest=4, turn=0, conversation=i) for i in range(3)
    ]
    later = request(("other", 500), turn=1, conversation=9)

    class Cache(Timed):
        """Remembers segments, and says how many tokens of a prompt it had."""

        known: set[tuple[int, ...]]

        async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncIterator[Seen]:
            pieces = [tuple(prompt.ids[s:e]) for s, e in prompt.bounds]
            had = sum(len(p) for p in pieces if p in self.known)
            self.known.update(pieces)
            yield Seen(1, had)

        async def flush(self) -> None:
            self.known = set()

    plan = Plan(requests=9, sweep=(0.0, 0.25, 0.5, 1.0), sweep_requests=3, max_lag=5)
    found = session(Cache(0), [later, *requests], plan)
    assert [r.share for r in found.runs] == [0.0, 0.25, 0.5, 1.0]
    for run in found.runs:
        segments = 3 * sum(60 + 10 * j for j in range(8))
        assert run.figures.cached * (segments + 12) == pytest.approx((run.share or 0) * segments, abs=3 * 70)
    assert found.runs[0].figures.cached == 0 and found.runs[3].figures.prompt_tokens == segments + 12


def test_a_sweep_stands_alone_or_beside_a_rate() -> None:
    requests = [request((f"d{i}", 100), at=10.0 * i) for i in range(3)]
    kinds = {
        qps: [r.kind for r in session(Timed(0.001), requests, Plan(qps=qps, sweep=(1.0,), max_lag=5)).runs]
        for qps in (None, 50.0)
    }
    assert kinds == {None: ["sweep"], 50.0: ["replay", "sweep"]}


def test_a_larger_share_caches_the_same_and_more() -> None:
    one = request(*((f"d{j}", 50) for j in range(10)), ("(q)", 9))
    kept = [share_cached(one, s, random.Random(1), "n")[1] for s in (0.2, 0.5, 1.0)]
    assert kept[0] < kept[1] < kept[2] and [len(k) for k in kept] == [2, 5, 10]
    mixed, _ = share_cached(one, 0.5, random.Random(1), "n")
    assert [s.len for s in mixed.segments] == [s.len for s in one.segments] and mixed.segments[-1].id == "q"
    (warm,) = holding([mixed], [kept[1]], random.Random(0))
    assert {s.id for s in warm.request.segments} == kept[1] and warm.request.input_length == 251
