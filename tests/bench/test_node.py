"""`python -m hypic.bench.node`: the time of its stages, and what it writes. All of it runs by hand (docs/BENCHMARKS.md)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hypic.bench import node as module
from hypic.bench.node import STAGES, Node, read_arguments
from hypic.bench.node_report import NodeResult
from hypic.bench.result import BenchResult
from hypic.bench.scatter_result import StockRun
from hypic.router.costs import Costs
from tests.bench.test_scatter import run
from tests.traces.test_generate import TRACES


@pytest.fixture
def node(tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    """A run that is not begun yet; the environment that it sets up is undone."""
    with contextlib.suppress(ImportError):
        import matplotlib.pyplot  # noqa: F401 (seconds on a busy machine, and no stage's)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    common = ["--spec", str(TRACES / "tiny.toml"), "--warmup", "8", "--requests", "10", "--segments", "4", "--out"]

    def make(*args: str) -> Node:
        return Node(*read_arguments([str(tiny_model("llama")), *common, str(tmp_path), "--device", "cpu", *args]))

    return make


def test_a_stage_that_fails_or_hangs_leaves_the_others_their_time(
    node: Callable[..., Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.2)
    made = node("--budget", "8", "--workers", "3", "--load-format", "dummy")
    assert made.scatter.plan.workers == (1, 2, 3) and "--load-format" in made._argv and "--budget" not in made._argv
    had: dict[str, float] = {}

    def broken(deadline: float) -> None:
        had["transfers"] = deadline - time.monotonic()
        raise ValueError("a word\nand more\nat the end")

    def hangs(deadline: float) -> None:
        now = time.monotonic()
        had["cluster"], had["left"] = deadline - now, began + 8 - now
        time.sleep(60)

    def works(deadline: float) -> None:
        made.scatter.result.runs = [run(1, "lpt", 1010, 800, 200), run(2, "lpt", 640, 420, 205)]
        made.scatter.result.costs = Costs(tokens_per_s=1.0, transfer_gb_s=1.0)
        stock = StockRun(gpus=1, workload="equal", segments=[1000] * 4, values=[2000.0])
        made.scatter.result.stock.append(stock)

    def late(deadline: float) -> None:
        had["answers"] = deadline - time.monotonic()

    stages: dict[str, Any] = {"transfers": broken, "cluster": hangs, "stock": works, "tp": works, "answers": late}
    made.stages, began = stages, time.monotonic()
    made.run()
    total = sum(STAGES.values())
    assert had["transfers"] == pytest.approx(8 * STAGES["transfers"] / total, abs=0.1)
    behind = total - STAGES["transfers"]
    assert had["cluster"] == pytest.approx(had["left"] * STAGES["cluster"] / behind, abs=0.1), (
        "what was left over is shared"
    )
    assert had["answers"] > 0, "and the last one has all that is left"
    found = msgspec.json.decode((tmp_path / "node.json").read_bytes(), type=NodeResult)
    assert found.failed["transfers"] == "ValueError: a word\nand more\nat the end"
    assert set(found.failed) == {"transfers", "cluster"} and "Overtime" in found.failed["cluster"]
    assert found.seconds["cluster"] == pytest.approx(had["cluster"] + 0.2, abs=0.3)
    assert list(found.simulated) == ["4 segments, 4000 tokens"]
    summary = (tmp_path / "summary.md").read_text()
    assert "dummy weights; the linear layers of all servers remember over 16,384 tokens" in summary
    assert os.environ["HYPIC_DUMMY_HORIZON"] == "16384", "which the servers that it starts inherit"
    assert "**transfers failed**: ValueError: a word ... at the end" in summary
    assert "| 4 equal | stock |" in summary and "94% at worst: 4 equal, 4,000 tokens, lpt, 2 workers | yes |" in summary
    bench = msgspec.json.decode((tmp_path / "bench.json").read_bytes(), type=BenchResult)
    assert bench.dummy_horizon == 16384
    assert bench.scatter is not None and [r.ideal for r in bench.scatter.runs] == [1000.0, 600.0]
    assert msgspec.json.decode((tmp_path / "costs.json").read_bytes(), type=Costs).tokens_per_s == 5000.0
    assert (tmp_path / "replay.json").exists() and (tmp_path / "scatter.png").exists()


def test_a_start_that_takes_most_of_a_stage_is_borne_by_all(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.0)
    made, left = node("--budget", "10", "--stages", "cluster,stock"), {}

    def cluster(deadline: float) -> None:
        began = time.monotonic()
        assert made._started("cluster", began, deadline) == deadline, "a start that is quick changes nothing"
        monkeypatch.setattr(time, "monotonic", lambda: began + 6)  # of 6.25
        left["cluster"] = made._started("cluster", began, deadline) - began - 6
        left["alarm"] = signal.getitimer(signal.ITIMER_REAL)[0]

    made.stages = {"cluster": cluster, "stock": lambda deadline: left.update(stock=deadline)}
    made.run()
    assert left["cluster"] == pytest.approx((10 - 6) * 10 / 16, abs=0.1) == left["alarm"]


def test_an_unknown_stage_is_named(node: Callable[..., Node], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        node("--stages", "cluster,speed")
    assert "--stages speed: known are transfers, cluster, stock, tp, answers" in capsys.readouterr().err
