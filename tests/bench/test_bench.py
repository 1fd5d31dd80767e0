"""``hypic bench``: what it draws, counts, fits and refuses, and once for real on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hypic.artifact.layout import ArtifactLayout, FullShape, LinearShape
from hypic.bench.artifact_cost import arithmetic, artifact_cost
from hypic.bench.gdn_kernels import gdn_compile_cases
from hypic.bench.kernels import Bench
from hypic.bench.report import FIT_TERMS, fit, plot, tables
from hypic.bench.result import BenchResult, EngineRun, Timing
from hypic.bench.runner import kept_flags, tiny_kind
from hypic.bench.suites import NotWarm, Plan, attended_pairs, fitted, require_warm
from hypic.bench.workload import Prompts, Workload
from hypic.cli import app

SHAPES = Path(__file__).parents[2] / "models" / "shapes"
SMALL = Workload(system=5, segments=3, segment_tokens=70, query=4, reps=1, seed=3)


def test_a_seed_is_a_prompt() -> None:
    a, b = Prompts(SMALL, 5000), Prompts(SMALL, 5000)
    ids, bounds = a.prompt(documents := a.documents())
    assert (ids, bounds) == b.prompt(b.documents())
    assert len(ids) == SMALL.tokens and [ids[s:e] for s, e in bounds] == documents
    assert a.prompt(documents)[0][-4:] != ids[-4:], "the query is new"
    assert sorted(a.shuffled(documents)) == sorted(documents)


@given(st.integers(0, 5), st.integers(0, 4), st.integers(1, 9), st.integers(1, 6), st.integers(1, 12))
def test_computed_tokens_and_pairs_are_those_of_a_warm_link(
    system: int, segments: int, length: int, query: int, w: int
) -> None:
    work = Workload(system, segments, length, query)
    seams = {system + i * length + j for i in range(segments) for j in range(min(w, length))}
    computed = {*range(system), *seams, *range(work.tokens - query, work.tokens)}
    assert work.seams(w) == len(computed)
    assert attended_pairs(work, w) == sum(t + 1 for t in computed)


def point(n: int, length: int, ms: float) -> Timing:
    work = Workload(segments=n, segment_tokens=length)
    shape = {"segments": n, "segment_tokens": length, "tokens": work.tokens, "computed": work.seams(8)}
    return Timing(
        suite="scale", case=f"warm, {n} x {length}", values=[ms], shape=shape | {"pairs": attended_pairs(work, 8)}
    )


def test_the_fit_finds_what_the_times_were_made_of() -> None:
    """Segments and computed tokens go together when each segment has w of them, so their sum is what can be found."""
    grid = [(n, m) for n in (4, 16, 64, 128) for m in (512, 2048, 8192)]
    shapes = [point(n, m, 1.0).shape for n, m in grid]
    times = [30 + 0.2 * s["segments"] + 1e-4 * (s["tokens"] - s["computed"]) + 2e-9 * s["pairs"] for s in shapes]
    found = fit([point(n, m, t) for (n, m), t in zip(grid, times, strict=True)])
    assert found is not None and found["worst"] < 1e-6
    assert found["fixed"] + 96 * found["per computed token"] == pytest.approx(30, rel=1e-3)
    assert found["per segment"] + 8 * found["per computed token"] == pytest.approx(0.2, rel=1e-3)
    assert found["per cached token"] == pytest.approx(1e-4, rel=1e-3)
    assert found["per attended pair"] == pytest.approx(2e-9, rel=1e-2)


def test_no_coefficient_of_a_fit_is_below_zero() -> None:
    rng = np.random.default_rng(0)
    found = fit([point(n, m, float(50 - n / 8 + rng.normal())) for n in (4, 16, 64, 128) for m in (512, 2048)])
    assert found is not None and all(found[k] >= 0 for k in FIT_TERMS)
    assert fit([point(4, 512, 1.0)]) is None


@pytest.mark.parametrize(
    ("segments", "tokens", "longest", "found"),
    [
        (16, 16384, 262138, 16377),  # as long as a context of 262,144 holds
        (128, 2048, 262138, 2047),
        (64, 512, 262138, 512),
        (64, 2048, 65530, None),
        (10, 100, 97 + 900, 90),
        (10, 100, 95 + 900, None),
    ],
)
def test_points_that_are_longer_than_the_context_are_cut_or_left_out(
    segments: int, tokens: int, longest: int, found: int | None
) -> None:
    point = fitted(Workload(), segments, tokens, longest)
    assert (point and point.segment_tokens) == found
    assert point is None or (point.tokens <= longest and point.segments == segments)


def test_a_time_that_is_not_warm_is_no_figure() -> None:
    plan = Plan(("ttft",), SMALL, seam_window=8)
    good = Timing(suite="ttft", case="warm", values=[1.0, 1.0], cached=[3 * 62, 3 * 62])
    require_warm(good, plan)
    require_warm(Timing(suite="ttft", case="cold", values=[1.0], cached=[0]), plan)
    with pytest.raises(NotWarm, match="--hypic-memory"):
        require_warm(Timing(suite="ttft", case="warm", values=[1.0, 1.0], cached=[3 * 62, 2 * 62]), plan)
    with pytest.raises(NotWarm):
        require_warm(
            Timing(suite="concurrency", case="warm, 2 at once", values=[1.0], cached=[186], shape={"together": 2}), plan
        )


def test_the_self_check_gets_the_flags_that_decide_how_a_link_is_computed(tmp_path: Path) -> None:
    argv = "--model-path m --load-format dummy --dtype=bfloat16 --attention-backend triton --mem-fraction-static 0.8"
    assert kept_flags(argv.split()) == ["--dtype=bfloat16", "--attention-backend", "triton"]
    for model_type, kind in {
        "qwen3_5_moe": "qwen35moe", "qwen3_5": "qwen35", "qwen3_next": "qwen3next", "llama": "llama", "mamba": "qwen35",
    }.items():  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert tiny_kind(tmp_path) == kind


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("qwen3.5-35b-a3b", "qwen35moe"),
        ("kimi-linear-48b-a3b", "kimi"),
        ("nemotron-3-nano-30b-a3b", "nemotronh"),
        ("ring-mini-linear-2.0", "ringlinear"),
        ("ring-2.5-1t", "ring25"),
        ("granite-4.0-h-small", "granite4h"),
    ],
)
def test_what_is_checked_first_is_of_the_family_that_is_timed(shape: str, kind: str) -> None:
    assert tiny_kind(SHAPES / shape) == kind


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--suites", "ttft,speed", "speed"),
        ("--engines", "vllm", "vllm"),
        ("--counts", "4,x", "whole numbers"),
        ("--together", "0", "whole numbers"),
    ],
)
def test_bad_options_are_named(flag: str, value: str, said: str) -> None:
    done = CliRunner().invoke(app, ["bench", "nowhere", flag, value])
    assert done.exit_code == 2 and said in done.output


def test_a_model_that_is_not_there_and_an_unknown_flag_end_at_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", str(tmp_path)])
    assert done.exit_code == 2 and "config.json" in done.output
    for flags, says in (
        (["--hypic-bogus", "3"], "--hypic-seam-window"),
        (["--nosuchflag"], "--nosuchflag: neither hypic nor SGLang has it"),
        (["--page-size", "x"], "--page-size: invalid int value: 'x'"),
        (["--baseline", "--nosuchflag 3"], "--nosuchflag: neither"),
    ):
        done = CliRunner().invoke(app, ["bench", "nowhere", *flags])
        assert done.exit_code == 2 and says in " ".join(done.output.replace("│", " ").split())


def test_for_real(tiny_model: Any, tmp_path: Path) -> None:
    """On a hybrid with dummy weights, which remember on both engines, and are served from artifacts."""
    options = (
        "--suites kernels,ttft,concurrency,scale --segments 2 --segment-tokens 80 --system 3 --query 5 --reps 1 --together 2 "
        "--counts 4,8 --lengths 128 --context-length 512"
    )
    command = ["bench", str(tiny_model("qwen35")), *options.split(), "--no-selfcheck", "--load-format", "dummy"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["dummy_horizon"] == 16384
    stock, engine, kernels = result["engines"]
    for run in (stock, engine):
        found = run["settings"]["dummy_decays"]
        assert found["horizon"] == 16384 and found["layers"] == 3
        assert found["least"] == pytest.approx(-0.01, rel=0.01) and found["most"] == pytest.approx(-10, rel=0.01)
    assert "the heads of 3 linear layers remember" in " ".join(done.output.split())
    cases = {t["case"]: t for t in engine["timings"]}
    parts = {t["case"]: t["values"][0] for t in kernels["timings"]}
    cost = result["artifact_cost"]
    assert (cost["passes"], cost["layers"]) == (1, 3) and len(cost["per_layer"]) == 3 and len(cost["once"]) == 1
    assert kernels["settings"]["T"] == "out of SGLang's pass"
    assert cost["per_layer"]["T out of SGLang's pass"] == parts["compile: T out of SGLang's pass, one layer"]
    assert (cost["cold"], cost["warm"]) == (cases["cold"]["values"][0], cases["warm"]["values"][0])
    said = (tmp_path / "bench.md").read_text()
    assert "* building artifacts, in ms: 1 forward pass x 3 layers x (" in said and "| hypic | cold |" in said
    assert "the heads of 3 linear layers remember" in said and "| joined: T and S in float32 |" in said
    assert list(cases) == [
        "cold",
        "warm",
        "turn",
        "ordinary",
        "decode",
        "throughput",
        "warm, 2 at once",
        "warm, 4 x 124",
    ]
    assert cases["warm, 4 x 124"]["shape"]["tokens"] == 504, "as much as a context of 512 tokens takes"
    assert "scale: 8 x 128 left out: the engine takes 505 tokens" in " ".join(done.output.split())
    assert all(len(t["values"]) == 1 and t["values"][0] > 0 for t in cases.values())
    assert cases["cold"]["cached"][0] <= 3, "the system prompt at most, from the radix tree"
    assert 2 * 72 <= cases["warm"]["cached"][0] <= 2 * 72 + 3
    assert result["selfcheck"] == {} and "the self-check was not run" in " ".join(done.output.split())
    assert result["versions"]["sglang"] and engine["settings"]["dtype"]


def test_what_was_timed_before_an_engine_fails_is_kept(tiny_model: Any, tmp_path: Path) -> None:
    """An arena without room: the cold case is timed, then the warm one is not warm."""
    options = "--engines hypic --segments 2 --segment-tokens 80 --system 3 --query 5 --reps 1 --hypic-memory 16KiB"
    command = ["bench", str(tiny_model("llama")), *options.split(), "--no-selfcheck", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "exit code 1" in done.output
    (engine,) = json.loads((tmp_path / "bench.json").read_text())["engines"]
    assert [t["case"] for t in engine["timings"]] == ["cold"]


def test_kernels_of_a_linear_layer_are_timed_and_add_up() -> None:
    from sglang.srt.plugins import load_plugins

    linear = LinearShape((0, 1, 2), heads=4, d_k=16, d_v=24, conv_channels=160, conv_width=3, conv_dtype="float32")
    full = FullShape((3,), heads=1, d_k=32, d_v=32, dtype="float32")
    work = Workload(system=3, segments=3, segment_tokens=70, query=4, reps=2)
    plan = Plan(("kernels",), work, 8)
    load_plugins()  # the error of joining needs the CPU's stand-ins for SGLang's kernels
    timings = list(Bench(ArtifactLayout(linear, full), 2, torch.float32, plan, "cpu").cases())
    assert [t.case.partition(":")[0] for t in timings if t.suite == "composition"] == ["stock"] + ["joined"] * 3
    by_case = {t.case: t for t in timings if t.suite == "kernels"}
    assert len(by_case) == 9 and all(len(t.values) == 2 and min(t.values) > 0 for t in by_case.values())
    chain = by_case["link: chain, one layer"]
    assert chain.shape["tokens"] == work.seams(8)
    assert chain.shape["bytes"] == 3 * 4 * (16 * 16 + 16 * 24) * 4, "T and S of three segments"
    parts = "keys and gates", "T", "states after the seams", "S"
    layered = [by_case[f"compile: {part}, one layer"] for part in parts]
    assert all(
        t.shape | {"bytes": 0} == {"segments": 3, "segment_tokens": 70, "layers": 3, "passes": 1, "bytes": 0}
        for t in layered
    )
    captured = by_case["compile: capture interiors, all layers"].median
    cost = artifact_cost(timings, [])
    assert cost is not None and cost.share is None
    assert cost.total == pytest.approx(3 * sum(t.median for t in layered) + captured)
    solved = list(
        gdn_compile_cases(Bench(ArtifactLayout(linear, full), 2, torch.float32, plan, "cpu", solved=True), linear)
    )
    cost = artifact_cost(solved, [])
    assert cost is not None, "where SGLang's pass leaves T's systems solved, ours are no part of a compile"
    assert list(cost.per_layer) == ["T out of SGLang's pass", "states after the seams", "S"]


OTHERS = {
    "mamba2": dict(d_v=24, conv_channels=160, conv_width=3, operator="log_decay"),
    "lightning": dict(d_v=16, conv_channels=0, conv_width=0, operator="log_decay"),
    "kda": dict(d_v=16, conv_channels=192, conv_width=3, columns_first=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_another_family_are_timed_and_add_up(name: str) -> None:
    """Beside a layer of latent attention, which has no V and is not for hypic's kernel."""
    linear = LinearShape((0, 1, 2), heads=4, d_k=16, conv_dtype="float32", family=name, **OTHERS[name])
    latent = FullShape((3,), heads=1, d_k=32, d_v=0, dtype="float32")
    work = Workload(system=3, segments=3, segment_tokens=70, query=4, reps=2)
    timings = list(Bench(ArtifactLayout(linear, latent), 2, torch.float32, Plan(("kernels",), work, 8), "cpu").cases())
    by_case = {t.case: t for t in timings}
    parts = [f"compile: {part}, one layer" for part in ("T", "states after the seams", "S")]
    moved = ["link: relocate interiors, all layers", "compile: capture interiors, all layers"]
    assert list(by_case)[1:] == [*parts, "link: chain, one layer", *moved]
    assert all(len(t.values) == 2 and min(t.values) > 0 for t in timings)
    assert by_case["link: chain, one layer"].shape["tokens"] == work.seams(8)
    transition = 1 if linear.operator == "log_decay" else 16 * 16
    assert by_case["link: chain, one layer"].shape["bytes"] == 3 * 4 * (transition + 16 * linear.d_v) * 4
    cost, captured = artifact_cost(timings, []), by_case[moved[1]].median
    assert cost is not None and cost.total == pytest.approx(3 * sum(by_case[part].median for part in parts) + captured)


@pytest.mark.parametrize(
    ("segments", "tokens", "at_once", "passes"), [(16, 2048, 4, 4), (50, 2048, 4, 13), (3, 512, 3, 1), (2, 20000, 1, 6)]
)
def test_forward_passes_of_a_cold_prompt(segments: int, tokens: int, at_once: int, passes: int) -> None:
    linear = LinearShape((0, 1), heads=1, d_k=16, d_v=16, conv_channels=48, conv_width=3, conv_dtype="float32")
    plan = Plan(("kernels",), Workload(segments=segments, segment_tokens=tokens), 8)
    n, length, shape = Bench(ArtifactLayout(linear, None), 1, torch.float32, plan, "cpu", 8192).compiled(linear)
    assert (n, length) == (at_once, min(tokens, 8192)) and shape["passes"] == passes and shape["layers"] == 2


def timed(suite: str, case: str, ms: float, **shape: int) -> Timing:
    return Timing(suite=suite, case=case, values=[ms], shape=shape)


def ran(name: str, *timings: Timing) -> EngineRun:
    return EngineRun(name=name, flags=[], settings={}, start_seconds=1.0, timings=list(timings))


def test_what_artifacts_cost_is_held_against_what_cold_takes_longer_than_warm() -> None:
    layer = {"segments": 4, "passes": 4, "layers": 30}
    kernels = [
        timed("kernels", "copy, for the bandwidth", 9.0),
        timed("kernels", "compile: T, one layer", 0.1, **layer),
        timed("kernels", "compile: S, one layer", 0.05, **layer),
        timed("kernels", "compile: capture interiors, all layers", 2.0, layers=10),
        timed("kernels", "link: chain, one layer", 9.0, layers=30),
    ]
    cold, warm = timed("ttft", "cold", 900.0), timed("ttft", "warm", 100.0)
    cost = artifact_cost(kernels, [ran("stock", timed("ttft", "cold", 1.0)), ran("hypic", cold, warm)])
    assert cost is not None and cost.total == pytest.approx(4 * 30 * 0.15 + 2) and cost.share == pytest.approx(20 / 800)
    assert arithmetic(cost) == (
        "building artifacts, in ms: 4 forward passes x 30 layers x (0.100 T + 0.050 S) + 2.00 capture interiors = 20.00; "
        "cold 900.0 - warm 100.0 = 800.0; 20.00 / 800.0 = 2.5%"
    )
    alone = artifact_cost(kernels, [])
    assert alone is not None and alone.share is None and "the suite ttft on hypic says" in arithmetic(alone)
    slow = artifact_cost(kernels, [ran("hypic", warm, timed("ttft", "cold", 90.0))])
    assert slow is not None and slow.share is None and "no share of that" in arithmetic(slow)
    assert artifact_cost(kernels[:1], []) is None


def test_what_came_back_is_shown(tmp_path: Path) -> None:
    def engine(name: str, cold: float) -> EngineRun:
        timings = [Timing(suite="ttft", case="cold", values=[cold, cold], cached=[0, 0])]
        return EngineRun(name=name, flags=[], settings={}, start_seconds=1.0, timings=timings)

    runs = [engine("stock", 100.0), engine("stock --attention-backend x", 80.0), engine("hypic", 40.0)]
    work = {"system": 1, "segments": 1, "segment_tokens": 1, "query": 1, "reps": 2, "seed": 0}
    result = BenchResult(command=[], versions={}, machine={}, workload=work, seam_window=8, selfcheck={}, engines=runs)
    (table,) = tables(result)
    ratios = list(table.columns[-1].cells)
    assert ratios == ["0.80x", "1.00x", "2.00x"], "held against the fastest stock engine"
    pytest.importorskip("matplotlib")
    assert plot(result, tmp_path / "x.png") and (tmp_path / "x.png").stat().st_size > 1000
