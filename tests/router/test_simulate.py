"""The simulation, against cases worked out by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hypic.cli import app
from hypic.router.costs import Costs, CostsError, read_costs
from hypic.router.simulate import Outcome, Request, read_segments, simulate

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "benchmarks" / "costs" / "h200-qwen3.5-35b-a3b.toml"
COSTS = Costs(
    tokens_per_s=1000, forward_tokens=1000, message_s=0.01, transfer_gb_s=1, artifact_bytes=100_000_000, link_s=0.5
)


def terms(o: Outcome) -> float:
    return o.messages + o.waiting + o.compile + o.transfer + o.link


def test_one_worker_compiles_then_links() -> None:
    (o,) = simulate(COSTS, 1, [Request((1000,) * 4)])
    # 0.01 there, 4 passes of 1 s, link 0.5, 0.01 back
    assert o.ttft == pytest.approx(4.52)
    assert (o.compile, o.transfer, o.link, o.bound) == (pytest.approx(4.0), 0.0, 0.5, "compute")
    assert not o.placement.scattered


def test_two_workers_worked_out_by_hand() -> None:
    (o,) = simulate(COSTS, 2, [Request((1000,) * 4)])
    # Both compile 0.01..1.01 and 1.01..2.01. w1's artifacts leave 0.01 later and take 0.1: 1.02..1.12, 2.02..2.12.
    # Link 2.12..2.62 on w0, first token back at 2.63.
    assert o.ttft == pytest.approx(2.63)
    assert (o.compile, o.transfer, o.messages) == (pytest.approx(2.0), pytest.approx(0.11), pytest.approx(0.02))
    sent = [(b.worker, b.start, b.end) for b in o.bars if b.kind == "transfer"]
    assert sent == [("w0", pytest.approx(1.02), pytest.approx(1.12)), ("w0", pytest.approx(2.02), pytest.approx(2.12))]
    assert o.bound == "compute"
    assert o.ideal == pytest.approx(2.5)


def test_the_incoming_pipe_is_one() -> None:
    costs = msgspec.structs.replace(COSTS, transfer_gb_s=0.25)  # 0.4 s each
    (o,) = simulate(costs, 4, [Request((1000,) * 4)], "round_robin")
    # One segment each, all done at 1.01; three artifacts one behind the other: 1.02 + 3 * 0.4
    assert o.ttft == pytest.approx(1.02 + 1.2 + 0.5 + 0.01)
    assert o.transfer == pytest.approx(1.21) and o.bound == "transfer"
    (o,) = simulate(costs, 4, [Request((1000,) * 4)])
    # Placement sees the pipe: w0 takes two, whose second is done at 2.01, when the others' two are there since 1.82
    assert o.ttft == pytest.approx(2.01 + 0.5 + 0.01)


def test_a_long_segment_is_split_over_passes_and_bounds_the_rest() -> None:
    (o,) = simulate(COSTS, 4, [Request((3000, 500, 500, 500))])
    assert o.compile == pytest.approx(3.0) and o.bound == "longest segment"
    assert o.ttft == pytest.approx(0.01 + 3.0 + o.transfer + 0.5 + 0.01)


def test_passes_that_are_too_small_are_named() -> None:
    costs = msgspec.structs.replace(COSTS, forward_s=1.0, forward_tokens=300)
    (o,) = simulate(costs, 2, [Request((300,) * 4)])
    assert o.compile == pytest.approx(2.0) and o.bound == "forward floor"
    (o,) = simulate(costs, 2, [Request((100,) * 3)])
    assert not o.placement.scattered and o.compile == pytest.approx(1.0), "one pass takes them all"


def test_link_bounds_what_is_else_fast() -> None:
    (o,) = simulate(msgspec.structs.replace(COSTS, link_s=9.0), 4, [Request((1000,) * 4)])
    assert o.bound == "link"


def test_requests_wait_for_each_other() -> None:
    a, b = simulate(COSTS, 1, [Request((1000,)), Request((1000,), arrival=0.5)])
    # a: 0.01..1.01, link ..1.51. b's compile is queued at 0.51 and runs behind a's link, which goes first: 1.51..2.51, ..3.01
    assert a.ttft == pytest.approx(1.52)
    assert b.ttft == pytest.approx(3.02 - 0.5) and b.waiting == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 4000), max_size=8).map(tuple), st.floats(0, 3)), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(["lpt", "round_robin"]),
)
@settings(max_examples=80, deadline=None)
def test_terms_add_up_and_no_worker_does_two_things_at_once(prompts, workers, policy) -> None:  # type: ignore[no-untyped-def]
    prompts.sort(key=lambda p: p[1])
    outcomes = simulate(COSTS, workers, [Request(s, arrival=t) for s, t in prompts], policy)
    for o, (tokens, _) in zip(outcomes, prompts, strict=True):
        assert terms(o) == pytest.approx(o.ttft)
        assert min(o.waiting, o.compile, o.transfer, o.link) >= -1e-9
        assert o.link == pytest.approx(COSTS.link_seconds(len(tokens), 96))
        assert sorted(b.segment for b in o.bars if b.kind == "compile") == list(range(len(tokens)))
        assert [b.kind for b in o.bars][-1] == "link"
    work = sum(sum(tokens) for tokens, _ in prompts) / COSTS.tokens_per_s
    end = max(b.end for o in outcomes for b in o.bars)
    assert end >= work / workers
    for name in {b.worker for o in outcomes for b in o.bars}:
        pipe = sorted((b.start, b.end) for o in outcomes for b in o.bars if b.kind == "transfer" and b.worker == name)
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(pipe))


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=12), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_what_placement_reckons_is_close_to_what_happens(tokens: list[int], workers: int) -> None:
    (o,) = simulate(COSTS, workers, [Request(tuple(tokens))])
    happened = o.compile + o.transfer
    one_pass = COSTS.forward_seconds(COSTS.forward_tokens)
    assert abs(o.placement.seconds - happened) <= one_pass + len(tokens) * 0.11


def test_the_measured_costs_predict_and_agree_with_the_measured_cold_time() -> None:
    costs = read_costs(H200)
    prompt = Request((2048,) * 16)
    alone = simulate(costs, 1, [prompt])[0].ttft
    assert alone == pytest.approx(0.936, rel=0.01), "docs/BENCHMARKS.md: cold, one worker"
    slow = [simulate(costs, n, [prompt])[0] for n in (2, 8, 64)]
    assert all(o.ttft < alone for o in slow), "placement never makes it worse, however slow the pipe"
    fast = msgspec.structs.replace(costs, transfer_gb_s=300.0)
    times = [simulate(fast, n, [prompt])[0] for n in (1, 2, 4, 8, 16, 64)]
    assert all(a.ttft >= b.ttft for a, b in itertools.pairwise(times))
    assert times[1].ideal / times[1].ttft > 0.9
    uneven = Request((8192, 512, 1024, 2048, 512, 768, 1024, 512, 2048, 640))
    for n in (2, 4, 8):
        lpt, rr = (simulate(fast, n, [uneven], p)[0].ttft for p in ("lpt", "round_robin"))  # type: ignore[arg-type]
        assert lpt <= rr
    # What is compiled in a worker's last pass is sent after it: 13 workers with 4 segments each are later than 16 with 3 or 4.
    fair, long = msgspec.structs.replace(costs, transfer_gb_s=50.0), Request((2048,) * 50)
    for n in (8, 16, 64):
        lpt, rr = (simulate(fair, n, [long], p)[0].ttft for p in ("lpt", "round_robin"))  # type: ignore[arg-type]
        assert lpt <= rr


@pytest.mark.parametrize(("text", "tokens"), [("16x2048", (2048,) * 16), ("8192, 2x512", (8192, 512, 512))])
def test_segments_as_text(text: str, tokens: tuple[int, ...]) -> None:
    assert read_segments(text) == tokens


@pytest.mark.parametrize("text", ["", "x", "0", "0x5", "5x", "1,,2", "-3"])
def test_segments_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError):
        read_segments(text)


def test_costs_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(msgspec.json.encode(COSTS))
    assert read_costs(tmp_path / "a.json") == COSTS
    for name, text in (
        ("b.toml", "tokens_per_s = 0\ntransfer_gb_s = 1"),
        ("c.toml", "tokens_per_s = 1"),
        ("d.toml", "="),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(CostsError, match=name):
            read_costs(tmp_path / name)
    with pytest.raises(CostsError):
        read_costs(tmp_path / "nowhere.toml")


def test_the_command() -> None:
    run = CliRunner().invoke
    result = run(app, ["simulate", str(H200), "--workers", "1,2", "--transfer-gb-s", "50", "--json"])
    assert result.exit_code == 0, result.output
    rows = msgspec.json.decode(result.stdout)["rows"]
    assert [(r["workers"], r["policy"]) for r in rows] == [
        (1, "lpt"),
        (2, "lpt"),
        (1, "round_robin"),
        (2, "round_robin"),
    ]
    assert rows[1]["speed_up"] > 1.8
    assert "bound by" in run(app, ["simulate", str(H200)], env={"COLUMNS": "120"}).stdout
    for wrong in (["--segments", "x"], ["--workers", "0"], ["--policies", "best"], ["--transfer-gb-s", "-1"]):
        assert run(app, ["simulate", str(H200), *wrong]).exit_code == 2
