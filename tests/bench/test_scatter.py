"""`hypic bench --suites scatter`: what it makes of timelines. A real one is taken in tests/cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hypic.bench.scatter import Sample, ScatterResult, ScatterRun, _measured, _reckon, _sample, lengths, plot, table
from hypic.bench.workload import Workload
from hypic.router.costs import Costs
from hypic.router.schedule import lower_bound

WORK = Workload(system=32, segments=4, segment_tokens=1000, query=68, reps=1)
COSTS = Costs(tokens_per_s=1.0, link_s=9.0, transfer_gb_s=100.0, message_s=0.0)


def line(worker: str, begun: float, done: float, arrived: float | None = None) -> dict[str, Any]:
    return {"worker": worker, "begun": begun, "done": done, "arrived": arrived}


def test_what_a_ttft_is_made_of() -> None:
    lines = [line("w0", 5, 100), line("w1", 8, 110, 130), line("w1", 8, 90, 95)]
    s = _sample(205.0, {"forwarded": 4.0, "first_token": 200.0, "segments": lines})
    assert (s.forwarded, s.compile, s.exposed, s.link, s.workers) == (4.0, 105.0, 20.0, 70.0, 2)
    alone = _sample(205.0, {"forwarded": 1.0, "first_token": 200.0, "segments": [line("w0", 5, 100)]})
    assert (alone.compile, alone.exposed, alone.link, alone.workers) == (95.0, 0.0, 100.0, 1)


def test_workloads() -> None:
    assert lengths(WORK, "equal") == [1000] * 4
    assert lengths(WORK, "uneven") == [4000, 250, 500, 750]


def run(workers: int, policy: str, ttft: float, compile_ms: float, link: float) -> ScatterRun:
    sample = Sample(ttft=ttft, forwarded=1, compile=compile_ms, exposed=0, link=link, workers=workers, timeline={})
    return ScatterRun(workers=workers, policy=policy, workload="equal", segments=[1000] * 4, samples=[sample])


def test_what_is_said_of_it(tmp_path: Path) -> None:
    """Costs are those of one worker; the ideal and the prediction follow from them."""
    result = ScatterResult(
        runs=[run(1, "lpt", 1010, 800, 200), run(2, "lpt", 640, 420, 205), run(2, "round_robin", 700, 500, 200)]
    )
    result.costs = _measured(result, COSTS)
    assert (result.costs.tokens_per_s, result.costs.link_s) == (5000.0, 0.2)
    _reckon(result, WORK)
    one, two, _ = result.runs
    assert (one.ideal, two.ideal) == (1000.0, 600.0)
    assert one.predicted == pytest.approx(1000, rel=0.01) and two.predicted == pytest.approx(600, rel=0.01)
    assert two.makespan_bound == 1e3 * lower_bound([1000] * 4, 2) / 5000
    console = Console(width=140, record=True)
    console.print(table(result, WORK))
    text = console.export_text()
    assert "1.58" in text and "94%" in text, "speed-up and share of the ideal"
    plot(result, tmp_path / "scatter.png")
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")
    del result.runs[0]
    assert _measured(result, COSTS) == COSTS, "without one worker nothing is known of its speed"
