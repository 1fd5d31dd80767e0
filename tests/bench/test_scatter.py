"""`hypic bench --suites scatter`: what it makes of timelines. A real one is taken in tests/cluster."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from rich.console import Console

from hypic.bench.scatter import Bench, Case, _sample, cases, drain, lengths, time_all
from hypic.bench.scatter_report import measured_costs, plot, reckon, table, verdicts
from hypic.bench.scatter_result import Agreement, Sample, Scatter, ScatterResult, ScatterRun, StockRun
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


def test_a_prompt_whose_compile_was_not_told_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([0.0, 0.0, 7.0, 9.0])

    def ask(*_: Any) -> Sample:
        return Sample(ttft=9, forwarded=1, compile=next(told), exposed=0, link=1, workers=1, timeline={})

    monkeypatch.setattr("hypic.bench.scatter.ask", ask)
    bench = Bench(Workload(segments=2, segment_tokens=64), Scatter(), 100)
    assert [bench._sample("", [64]).compile for _ in range(2)] == [7.0, 9.0]


def test_workloads() -> None:
    assert lengths(WORK, "equal") == [1000] * 4
    assert lengths(WORK, "uneven") == [4000, 250, 500, 750]


def test_the_most_important_cases_come_first_and_one_worker_has_one_policy() -> None:
    found = list(cases(WORK, Scatter(workers=(4, 1), counts=(16, 50))))
    assert found[:5] == [
        Case(16, "equal", "lpt", 1),
        Case(16, "equal", "lpt", 4),
        Case(1, "short", "lpt", 1),
        Case(50, "equal", "lpt", 1),
        Case(50, "equal", "lpt", 4),
    ]
    assert found[9:] == [Case(n, name, "round_robin", 4) for name in ("equal", "uneven") for n in (16, 50)]


class Away(http.server.BaseHTTPRequestHandler):
    """A cluster whose worker is away when it is asked for the first time, and that answers no prompt."""

    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body))
        self.send_response(400 if len(self.asked) == 1 or self.path == "/generate" else 200)
        self.end_headers()
        self.wfile.write(b"no worker w1 is alive" if len(self.asked) == 1 else b"{}")

    def log_message(self, *_: object) -> None:
        return


def test_a_worker_that_is_away_is_waited_for_and_a_cluster_that_fails_is_named() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Away)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, plan = f"http://127.0.0.1:{server.server_port}", Scatter(workers=(1, 2))
    try:
        drain(url, plan, 1, "lpt")
        told = {"resume": ["w0"], "drain": ["w1"], "policy": "lpt"}
        assert Away.asked == [("/workers", told)] * 2
        Away.asked.clear()
        with pytest.raises(RuntimeError, match="no worker w1 is alive"):
            drain(url, plan, 2, "lpt", patience=0.0)

        def compare(_: str) -> Agreement:
            raise ValueError("no answer")

        bench = Bench(WORK, plan, 1000, say=lambda _: None)
        time_all(bench, url, float("inf"), compare)
        assert bench.result.costs is None and not bench.result.runs
        why = f"{url} answered b'{{}}'"
        one, two = (f"4 equal, lpt, {n} workers: {why}" for n in (1, 2))
        assert bench.result.left_out == [one, two, f"cluster: {why}", "agreement: no answer"], (
            "one case may fail, three may not"
        )
    finally:
        server.shutdown()


def run(
    workers: int, policy: str, ttft: float, compile_ms: float, link: float, sizes: tuple[int, ...] = (1000,) * 4
) -> ScatterRun:
    moved = {"nbytes": 3_000_000, "sent": 10.0, "arrived": 12.0}
    timeline = {"segments": [moved, {"nbytes": 1, "sent": None, "arrived": None}]}
    sample = Sample(
        ttft=ttft, forwarded=1, compile=compile_ms, exposed=0, link=link, workers=workers, timeline=timeline
    )
    workload = "equal" if len(set(sizes)) == 1 else "uneven"
    return ScatterRun(workers=workers, policy=policy, workload=workload, segments=list(sizes), samples=[sample])


def test_what_is_said_of_it(tmp_path: Path) -> None:
    """Costs are those of one worker; the ideal, the bound and the prediction follow from them."""
    result = ScatterResult(
        runs=[run(1, "lpt", 1010, 800, 200), run(2, "lpt", 640, 420, 205), run(2, "round_robin", 700, 500, 200)]
    )
    result.costs = COSTS
    reckon(result, WORK)
    assert (result.costs.tokens_per_s, result.costs.link_s) == (5000.0, 0.2)
    one, two, _ = result.runs
    assert (one.ideal, two.ideal) == (1000.0, 600.0)
    assert one.predicted == pytest.approx(1000, rel=0.01) and two.predicted == pytest.approx(600, rel=0.01)
    assert two.makespan_bound == 1e3 * lower_bound([1000] * 4, 2) / 5000
    assert two.gb_per_s == 1.5
    result.stock = [
        StockRun(gpus=1, workload="equal", segments=[1000] * 4, values=[2000.0]),
        StockRun(gpus=8, workload="equal", segments=[1000] * 4, values=[320.0]),
    ]
    console = Console(width=180, record=True)
    console.print(table(result, WORK))
    text = console.export_text()
    assert "1.58" in text and "94%" in text and "105%" in text, "speed-up, share of the ideal, of the bound"
    assert "stock, TP 8" in text and "320.0" in text
    plot(result, tmp_path / "scatter.png")
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")
    longer = run(1, "lpt", 2010, 1600, 216, (1000,) * 8)
    short = msgspec.structs.replace(run(1, "lpt", 250, 50, 188, (64,)), workload="short")
    costs = measured_costs(msgspec.structs.replace(result, runs=[*result.runs, longer, short]), COSTS)
    assert (costs.forward_s, costs.tokens_per_s) == (0.05, 5000.0), "a short pass takes longer than its tokens"
    assert (costs.link_s, costs.link_segment_s) == (pytest.approx(0.184), pytest.approx(0.004)), "188, 200, 216 ms"
    del result.runs[0]
    assert measured_costs(result, COSTS) == COSTS, "without one worker nothing is known of its speed"


def test_targets_are_met_or_not() -> None:
    """Each target has a result that misses it, and one that meets it."""
    good = [run(1, "lpt", 1010, 800, 200), run(2, "lpt", 640, 420, 205), run(2, "round_robin", 700, 500, 200)]
    uneven = (4000, 250, 500, 750)
    bad = [run(1, "lpt", 1300, 1100, 200, uneven), run(2, "lpt", 2000, 1250, 205, uneven)]
    bad += [run(2, "round_robin", 1500, 1250, 200, uneven), run(4, "lpt", 500, 200, 205)]
    for runs, met in ((good, [True] * 3 + [None, True]), (good + bad, [False] * 3 + [None, False])):
        result = ScatterResult(runs=runs, costs=COSTS)
        reckon(result, WORK)
        *found, agreement = verdicts(result, WORK)
        assert [v.met for v in found] == met and agreement.met is None
    assert "80% at worst: 4 equal, 4,000 tokens, lpt, 4 workers" in found[0].found
    assert "4 uneven, 5,500 tokens, lpt, 2 workers" in found[1].found
    assert "speed was different" not in found[3].found
    faster = ScatterResult(runs=[*good[:2], run(2, "round_robin", 600, 400, 150)], costs=COSTS)
    assert "137% at worst" in (said := list(verdicts(faster, WORK))[3].found) and "speed was different" in said
    result.stock = [StockRun(gpus=1, workload="equal", segments=[1000] * 4, values=[1280.0])]
    assert "1280 ms; hypic on 4 workers 500 ms: 2.56x" in list(verdicts(result, WORK))[-1].found


@pytest.mark.parametrize(
    ("same", "worst", "noise", "signal", "passed"),
    [
        (3, 1e-5, None, 1.0, True),
        (2, 1e-5, None, 1.0, False),
        (3, 1e-3, None, 1.0, False),
        (2, 9e-5, 1e-3, 1.0, True),
        (3, 1.0, 1e-3, 2.0, False),
        (3, 1e-5, None, 2e-4, None),
    ],
)
def test_answers_agree_within_what_one_worker_differs_from_itself(
    same: int, worst: float, noise: float | None, signal: float, passed: bool | None
) -> None:
    found = Agreement(prompts=3, split=3, same_tokens=same, worst=worst, tolerance=1e-4, signal=signal, noise=noise)
    assert found.passed is passed
    (said,) = [v for v in verdicts(ScatterResult(agreement=found), WORK) if v.target.startswith("several")]
    assert said.met is passed
