"""``hypic replay --url`` against the server: segments are marked, caches flushed, tenants kept apart, errors counted."""

from __future__ import annotations

from pathlib import Path

import msgspec
from typer.testing import CliRunner

from hypic.cli import app
from hypic.traces.format import Span, TraceRequest, write
from hypic.traces.result import ReplayResult, Run
from tests.server.serving import Server

VOCAB = 500


def played(server: Server, folder: Path, requests: list[TraceRequest], *options: str) -> Run:
    write(requests, folder / "trace.jsonl")
    command = ["replay", "--url", server.url, "--trace", str(folder / "trace.jsonl"), "--vocab", str(VOCAB)]
    done = CliRunner().invoke(app, [*command, "--max-lag", "30", "--out", str(folder), "--warmup", "1", *options])
    assert done.exit_code == 0, done.output
    (engine,) = msgspec.json.decode((folder / "replay.json").read_bytes(), type=ReplayResult).engines
    return engine.runs[-1]


def request(*ids: str, tenant: str | None = None, tokens: int = 80, at: float = 0.0) -> TraceRequest:
    spans = [Span(i, tokens) for i in ids]
    return TraceRequest(at, tokens * len(ids) + 6, 3, segments=spans, tenant=tenant)


def test_marked_segments_hit_and_unmarked_ones_do_not(server: Server, tmp_path: Path) -> None:
    trace = [request("replay-a", "replay-b"), request("replay-b", "replay-a", at=10.0)]
    marked = played(server, tmp_path, trace).figures
    assert (marked.ok, marked.output_tokens) == (1, 3)
    assert marked.cached == 2 * 72 / 166
    assert 0 < (marked.ttft["p50"] or 0) < (marked.e2e["p50"] or 0)
    assert played(server, tmp_path, trace, "--no-marks").figures.cached == 0


def test_runs_begin_with_empty_caches(server: Server, tmp_path: Path) -> None:
    trace = [request("replay-c"), request("replay-d", at=10.0)]
    assert played(server, tmp_path, trace).figures.cached == 0
    assert played(server, tmp_path, trace).figures.cached == 0, "flushed before"
    assert played(server, tmp_path, trace, "--no-flush").figures.cached > 0.8


def test_tenants_share_nothing(server: Server, tmp_path: Path) -> None:
    trace = [
        request("replay-e", tenant="x"),
        request("replay-e", tenant="y", at=5.0),
        request("replay-e", tenant="x", at=9.0),
    ]
    played(server, tmp_path, trace)
    outcomes = [msgspec.json.decode(line) for line in (tmp_path / "url-0.jsonl").read_bytes().splitlines()]
    assert [bool(o["cached"]) for o in outcomes] == [False, True]


def test_a_prompt_that_the_server_refuses_is_an_error(server: Server, tmp_path: Path) -> None:
    figures = played(server, tmp_path, [request("replay-f"), request("replay-g", tokens=40_000, at=5.0)]).figures
    assert (figures.ok, figures.errors) == (0, 1) and figures.ttft["p50"] is None
    assert "40006" in figures.first_errors[0].replace(",", "")
