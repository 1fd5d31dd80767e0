"""``hypic replay``: what it refuses, what it makes and sums up, and once for real on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from hypic.cli import app
from hypic.traces.figures import Slo
from hypic.traces.format import read_native
from hypic.traces.generate import generate
from hypic.traces.report import plot, shown, tables
from hypic.traces.result import EngineReplay, Plan, ReplayResult
from hypic.traces.runner import ReplayError, new_result
from hypic.traces.spec import read_spec
from hypic.traces.summary import summarise
from tests.traces.helpers import Timed
from tests.traces.test_generate import TINY, TRACES
from tests.traces.test_session import session

SPEC = str(TRACES / "tiny.toml")
SAMPLE = TRACES / "sample.jsonl"


def replay(*args: str) -> Any:
    return CliRunner().invoke(app, ["replay", *args])


def test_a_trace_is_made_and_summed_up(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    made = replay("--generate", SPEC, "--out", str(file), "--json")
    assert made.exit_code == 0, made.output
    assert list(read_native(file)) == list(generate(TINY))
    assert json.loads(made.stdout) == msgspec.to_builtins(summarise(generate(TINY)))
    bytes_of = ("--capacity", "10KiB", "--segment-bytes", "1KiB", "--token-bytes", "2")
    summed = replay("--trace", str(file), "--warmup", "10", *bytes_of, "--json")
    found = json.loads(summed.stdout)
    assert found["capacity"] == {"total": 10240, "per_segment": 1024, "per_token": 2} and found["requests"] == 50
    assert 0 < found["pic_capacity"] < found["pic"]
    assert "50 in" in replay("--trace", str(file), "--warmup", "10").output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "give --trace FILE or --generate SPEC"),
        (("--trace", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
        (("--trace", "x", "--format", "csv"), "known are auto, hypic"),
        (("--trace", str(SAMPLE)), "20 requests, and the warm-up alone takes 100 (--warmup)"),
        (("--generate", "nowhere.toml"), "nowhere.toml: No such file"),
        (("--generate", SPEC, "--capacity", "much"), "--capacity"),
        (("--generate", SPEC, "--warmup", "0", "nowhere", "--engines", "vllm"), "known are hypic, prefix, none"),
        (("--generate", SPEC, "nowhere", "--find-qps"), "needs --slo-ttft"),
        (("--generate", SPEC, "nowhere", "--sweep-cached", "0,120"), "percentages"),
        (("--generate", SPEC, "nowhere", "--url", "http://x"), "not both"),
        (("--generate", SPEC, "./nowhere"), "config.json"),
        (("--generate", SPEC, "nowhere", "--hypic-bogus", "1"), "--hypic-seam-window"),
        (("--generate", SPEC, "nowhere", "--nosuchflag"), "--nosuchflag: neither hypic nor SGLang has it"),
    ],
)
def test_what_cannot_be_done_is_said(args: tuple[str, ...], said: str) -> None:
    done = replay(*args)
    assert done.exit_code == 2 and said in " ".join(done.output.replace("│", " ").split())


def test_a_bad_line_is_named_once(tmp_path: Path) -> None:
    """With a model and without."""
    file = tmp_path / "t.jsonl"
    file.write_text(SAMPLE.read_text().splitlines()[0] + "\n{}\n")
    for model in ((), ("--url", "http://x")):
        done = replay("--trace", str(file), *model)
        said = "".join(done.output.replace("│", " ").split())
        assert done.exit_code == 2 and said.count("t.jsonl") == 1 and "t.jsonl:2:" in said, done.output


def test_a_warm_up_longer_than_the_trace() -> None:
    with pytest.raises(ReplayError, match="60 requests, and the warm-up alone takes 60"):
        new_result(list(generate(TINY)), Plan(warmup=60), "t", None, 64)


def test_only_results_of_the_same_trace_and_plan_go_together(tmp_path: Path) -> None:
    used = list(generate(TINY))
    first = new_result(used, Plan(), "t", None, 64)
    assert new_result(used, Plan(), "t", None, 64).digest == first.digest
    assert new_result(used[:-1], Plan(), "t", None, 64).digest != first.digest
    (tmp_path / "replay.json").write_bytes(msgspec.json.encode(first))
    done = replay("models", "--generate", SPEC, "--warmup", "5", "--requests", "9", "--resume", "--out", str(tmp_path))
    assert done.exit_code == 1 and "another trace or other options" in done.output


def test_for_real(tiny_model: Any, tmp_path: Path) -> None:
    """One engine: a search of two rates and one point of the sweep. Interiors of all known segments come from the cache."""
    options = (
        "--engines hypic --no-selfcheck --warmup 8 --requests 10 --find-qps --slo-ttft 20 --slo-share 0.9 --max-lag 20"
    )
    search = "--start-qps 10 --probes 2 --sweep-cached 100 --sweep-requests 2 --budget 200"
    done = replay(
        str(tiny_model("llama")), "--generate", SPEC, *options.split(), *search.split(), "--out", str(tmp_path)
    )
    assert done.exit_code == 0, done.output
    found = msgspec.json.decode((tmp_path / "replay.json").read_bytes(), type=ReplayResult)
    (engine,) = found.engines
    assert [(r.kind, r.qps) for r in engine.runs] == [("probe", 10.0), ("probe", 20.0), ("sweep", None)]
    assert (engine.highest, engine.failed, engine.search_end, engine.cut_short) == (20.0, None, "after 2 probes", False)
    used = list(read_spec_requests())[:18]
    for run in engine.runs[:2]:
        assert run.figures.ok == run.figures.requests == 10
        # what could be saved, less the 8 tokens of each segment's seam, and what was still being compiled
        ideal = found.summary.pic - 8 * found.summary.segments.mean / found.summary.input.mean
        assert ideal - 0.1 < run.figures.cached <= found.summary.pic
    assert found.summary == summarise(used, warmup=8)
    assert engine.runs[2].figures.cached > 0.8
    outcomes = [json.loads(line) for line in (tmp_path / "hypic-0.jsonl").read_text().splitlines()]
    assert [o["number"] for o in outcomes] == list(range(8, 18)) and all(o["tokens"] == o["wanted"] for o in outcomes)
    assert engine.settings["dtype"] and found.versions["sglang"] and found.selfcheck == {}
    assert "Highest rate" in done.output


def read_spec_requests() -> Any:
    return generate(read_spec(Path(SPEC)))


def test_what_came_back_is_shown(tmp_path: Path) -> None:
    used = list(generate(TINY))
    search: dict[str, Any] = {"find": True, "start_qps": 100, "probes": 3, "slo": Slo(ttft=0.3), "max_lag": 5}
    plan = Plan(warmup=1, requests=12, sweep=(0.5,), sweep_requests=1, **search)
    result = new_result(used, plan, "t", None, 64)
    slow, fast = session(Timed(0.03, at_once=1), used, plan), session(Timed(0.001), used, plan)
    result.engines = [msgspec.structs.replace(fast, name="hypic"), msgspec.structs.replace(slow, name="prefix")]
    result.engines.append(EngineReplay(name="none", flags=[], settings={}, cut_short=True))
    assert [e.search_end for e in result.engines] == ["after 3 probes", "after 3 probes", None]
    *_, rates = tables(result)
    cells = [list(c.cells) for c in rates.columns]
    assert cells[0] == ["hypic", "prefix", "none"] and cells[1][2] == "-"
    assert cells[3] == ["", "", ""]
    ours = result.engines[0].highest
    ended = [
        msgspec.structs.replace(e, highest=q, search_end="found")
        for e, q in zip(result.engines, (6.0, 2.0, 1.5), strict=True)
    ]
    *_, rates = tables(msgspec.structs.replace(result, engines=ended))
    assert [list(c.cells) for c in rates.columns][3:5] == [["3.00x", "1.00x", "0.75x"], ["4.00x", "1.33x", "1.00x"]]
    ended[1].search_end = "out of time"
    *_, rates = tables(msgspec.structs.replace(result, engines=ended))
    ratios = [list(c.cells) for c in rates.columns][3:5]
    assert ratios == [["", "", ""], ["4.00x", "", "1.00x"]], "an unfinished search has no ratio"
    best = shown(result.engines[0])
    assert best is not None and best.qps == ours
    pytest.importorskip("matplotlib")
    assert plot(result, tmp_path / "x.png") and (tmp_path / "x.png").stat().st_size > 5000


def test_a_run_that_the_client_spoilt_is_marked_and_ends_in_an_error() -> None:
    used = list(generate(TINY))
    result = new_result(used, plan := Plan(warmup=0, requests=5, speedup=100, max_lag=1e-9), "t", None, 64)
    result.engines = [session(Timed(0.001), used, plan)]
    remarks = list(list(tables(result))[1].columns[-1].cells)
    assert "INVALID" in str(remarks[0])
    assert shown(result.engines[0]) is None
