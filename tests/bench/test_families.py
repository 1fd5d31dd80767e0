"""The families' table of docs/BENCHMARKS.md: from what `hypic bench` leaves behind, and into the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hypic.bench import families
from hypic.bench.result import BenchResult, EngineRun, Timing
from hypic.doctor.findings import LayerFamily, ModelFinding, SegmentSize

BENCHMARKS = families.ROOT / "docs" / "BENCHMARKS.md"


def engine(name: str, **cases: float) -> EngineRun:
    timings = [Timing(suite="ttft", case=case.replace("_", " "), values=[ms, ms, 9e9]) for case, ms in cases.items()]
    flags = ["--model-path", "models/shapes/ring", "--dtype", "bfloat16"]
    return EngineRun(name=name, flags=flags, settings={}, start_seconds=1.0, timings=timings)


def bench(*engines: EngineRun, share: float | None = None) -> BenchResult:
    facts: dict[str, Any] = {"command": [], "versions": {}, "machine": {}, "workload": {}, "selfcheck": {}}
    return BenchResult(**facts, seam_window=8, engines=list(engines), artifact_share=share)


def finding(path: str, transition: int) -> ModelFinding:
    return ModelFinding(
        path=path,
        families=[LayerFamily(family="Lightning", layers=16, shape="")],
        transition_bytes=transition,
        state_bytes=8 << 20,
        segments=[SegmentSize(tokens=n, bytes=n << 13, fit=1) for n in (512, 2048)],
    )


def test_a_row_is_sizes_and_what_was_timed(tmp_path: Path) -> None:
    stock, ours = engine("stock", cold=400, prefix_hit=40), engine("hypic", cold=420, warm=32, turn=39)
    file = tmp_path / "bench.json"
    file.write_bytes(msgspec.json.encode(bench(stock, ours, share=0.042)))
    head, line, row, other = families.table(
        [finding("a/ring", 1024), finding("a/other", 8 << 20)], families.read([file])
    ).splitlines()
    assert row == "| ring | 16 of Lightning | 0.000977 | 8 | 1.0 | 16 | 400 | 40 | 420 | 32 | 39 | 12.5 | 4.2% |"
    assert other == "| other | 16 of Lightning | 8 | 8 | 2.0 | 16 |" + "  |" * 7
    assert head.count("|") == line.count("|") == row.count("|") == other.count("|")


def test_a_run_that_broke_off_shows_what_it_has() -> None:
    assert families.time_cells(bench(engine("stock", cold=400))) == ["400", "", "", "", "", "", ""]


def test_figures_of_the_page_are_those_of_the_results_that_are_kept() -> None:
    """Sizes are held against the layouts by tests/commands/test_doctor.py."""
    _, _, page = BENCHMARKS.read_text().partition(families.BEGIN)
    page, _, _ = page.partition(families.END)
    results = families.read(sorted(families.RESULTS.glob("*.json")))
    for shape in families.SHAPES:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {shape} |"))
        assert [c.strip() for c in row.split("|")[7:-1]] == families.time_cells(results.get(shape))


def test_it_is_written_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "examined", lambda: [finding("a/ring", 1024)])
    page = tmp_path / "page.md"
    page.write_text(f"before\n{families.BEGIN} -->\nyesterday\n{families.END}\nafter\n")
    for _ in range(2):
        families.main([], page)
    written = page.read_text()
    assert written.startswith(f"before\n{families.BEGIN} -->\n\n| shape |") and written.endswith(
        f"|\n\n{families.END}\nafter\n"
    )
    assert "yesterday" not in written and written.count("| ring |") == 1
    page.write_text("no marks")
    with pytest.raises(SystemExit):
        families.main([], page)
