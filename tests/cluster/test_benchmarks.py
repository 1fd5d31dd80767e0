"""Benchmarks of a cluster, for real: the scatter suite, and a trace replayed on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from hypic.bench.agreement import compare
from hypic.bench.scatter import Bench, time_all
from hypic.bench.scatter_result import Scatter
from hypic.bench.workload import Workload
from hypic.config import HypicConfig
from hypic.traces.engines import Engine, cluster_target, settings
from hypic.traces.format import Span, TraceRequest
from hypic.traces.prompts import PromptMaker
from hypic.traces.result import EngineReplay, Plan
from hypic.traces.session import Session
from tests.cluster.launched import Cluster


def test_the_scatter_suite_on_it(
    cluster: Cluster, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hypic bench --suites scatter`: one worker and three of the same cluster, and that both answer alike; then the same
    cluster as the target of `hypic replay --engines cluster:3`."""
    monkeypatch.setattr("hypic.bench.scatter._WARM_UP", (0, 0))
    monkeypatch.setattr("hypic.bench.scatter.POLICIES", ("lpt",))
    work, plan = Workload(system=5, segments=6, segment_tokens=300, query=9, reps=1), Scatter(workers=(1, 3))
    bench = Bench(work, plan, 1536)
    model = tiny_model("qwen35")
    time_all(bench, cluster.url, float("inf"), lambda url: compare(url, work, plan, model, HypicConfig()))
    result = bench.result
    timed = [("equal", 1), ("equal", 3), ("short", 1), ("uneven", 1), ("uneven", 3)]
    assert [(r.workload, r.workers) for r in result.runs] == timed
    assert not result.left_out and sorted(cluster.alive()) == ["w0", "w1", "w2"]
    assert [r.samples[0].workers for r in result.runs if r.workers == 1] == [1, 1, 1]
    short = result.runs[2].samples[0]
    assert short.compile > 0 and short.link > 0, "what a pass and a link take at least"
    several = [r for r in result.runs if r.workers == 3]
    assert all(r.samples[0].workers > 1 and r.gb_per_s for r in several)
    found = result.agreement
    assert found is not None and found.passed, found
    assert (found.prompts, found.split, found.noise) == (2, 2, None) and found.signal > 1e-2
    bench.cluster(cluster.url, deadline=0.0)
    assert len(bench.result.left_out) == 5, "no time, and said so"

    trace = [TraceRequest(0.0, 700, 3, segments=[Span("a", 300), Span("b", 300)], tenant="t") for _ in range(3)]
    replayed, told = (
        EngineReplay(name="cluster:3", flags=[], settings={}),
        settings(cluster.url, Engine("cluster", 3, "lpt")),
    )
    assert told["servers"] == 3 and told["dtype"] == "float32" and told["cache_tokens"] > 1000

    async def replay() -> None:
        async with cluster_target(cluster.url) as target:
            await Session(target, PromptMaker(1536), trace, Plan(warmup=1, max_lag=30), replayed).run()

    asyncio.run(replay())
    (run,) = replayed.runs
    assert (run.figures.ok, run.figures.output_tokens) == (2, 6)
    assert run.figures.cached >= 2 * 292 / 700, "segments are in the cluster from the warm-up on"
