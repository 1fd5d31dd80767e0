"""`hypic selfcheck` on the tiny models, and what its command line does with bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hypic.check import selfcheck
from hypic.check.coverage import COVERAGE, Covered
from hypic.check.result import CheckResult
from hypic.check.selfcheck import CHECKS, Plan, check_model
from hypic.check.session import Session, SessionError
from hypic.check.tiny_models import IN_16_BITS
from hypic.cli import app
from hypic.commands.selfcheck import last_lines
from hypic.config import HypicConfig

FLAGS: dict[str, dict[str, Any]] = {
    "qwen3next": {},  # P6 under both of SGLang's strategies for states
    "qwen35": {"mamba_radix_cache_strategy": "extra_buffer"},
    "llama": {},
}


@pytest.mark.parametrize("name", [c.model for c in COVERAGE if c.checks == CHECKS])
def test_all_checks_pass(name: str, tiny_model: Callable[[str], Path]) -> None:
    plan = Plan(seed=7, soak=20, flags=FLAGS[name])
    results = list(check_model(name, tiny_model(name), plan, lambda *_: None))
    assert sorted(r.name for r in results) == list(CHECKS)
    for r in results:
        assert r.status == "passed", f"{r.name}: {r.detail}"
        assert r.worst_error is not None and r.tolerance is not None
        assert r.worst_error <= r.tolerance == 1e-4 and r.n > 0


@pytest.mark.parametrize(
    "covered", [c for c in COVERAGE if c.checks and c.checks != CHECKS], ids=lambda c: f"{c.model}-{'-'.join(c.checks)}"
)
def test_other_families_on_one_engine(covered: Covered, tiny_model: Callable[[str], Path]) -> None:
    name, checks = covered.model, covered.checks
    flags = {"mamba_radix_cache_strategy": "extra_buffer"} if covered.linear else {}
    results = list(check_model(name, tiny_model(name), Plan(checks=checks, seed=7, flags=flags), lambda *_: None))
    assert [(r.name, r.status) for r in results] == [(c, "passed") for c in checks], [r.detail for r in results]


def test_the_seam_kernel_serves_too(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--hypic-attention seam` is the way of a GPU; here through its torch reference."""
    monkeypatch.setenv("HYPIC_ATTENTION", "seam")
    from hypic.config import from_env

    plan = Plan(checks=("P1", "P4"), config=from_env())
    results = list(check_model("qwen35", tiny_model("qwen35"), plan, lambda *_: None))
    assert [r.status for r in results] == ["passed", "passed"], [r.detail for r in results]


def test_a_16_bit_engine_is_judged_by_stocks_own_error(tiny_model: Callable[[str], Path]) -> None:
    """Model, conv windows, T and S in bfloat16: what serves on a GPU."""
    plan = Plan(checks=("P1", "P3", "P4"), config=HypicConfig(), flags={"dtype": "bfloat16"})
    results = list(check_model("qwen35", tiny_model("qwen35"), plan, lambda *_: None))
    assert [r.status for r in results] == ["passed"] * 3, [r.detail for r in results]
    p1, _, p4 = (r.worst_error for r in results)
    assert p1 and p4 and min(p1, p4) > 1e-3, "rounding is there, so the bound was put to use"


def test_T_in_int8_is_judged_by_stocks_own_error(tiny_model: Callable[[str], Path]) -> None:
    plan = Plan(checks=("P1", "P4"), config=HypicConfig(state_dtype="int8"), flags={"dtype": "bfloat16"})
    results = list(check_model("qwen35", tiny_model("qwen35"), plan, lambda *_: None))
    assert [r.status for r in results] == ["passed"] * 2, [r.detail for r in results]


def test_kimi_linear_in_16_bits_is_judged_by_stocks_own_error(tiny_model: Callable[[str], Path]) -> None:
    """Whatever type its config names, or none, and T in int8. Without experts: where a router flips, stock is off by ten."""
    plan = Plan(checks=("P1", "P4"), config=HypicConfig(state_dtype="int8"), flags={"dtype": "bfloat16"})
    results = list(check_model("kimi", tiny_model(IN_16_BITS["kimi"]), plan, lambda *_: None))
    assert [r.status for r in results] == ["passed"] * 2, [r.detail for r in results]
    for r in results:
        assert r.worst_error and r.tolerance and 1e-3 < r.worst_error <= r.tolerance < 1, "the bound was put to use"


def test_json_is_all_that_is_printed(tiny_model: Callable[[str], Path]) -> None:
    """In a process of its own: SGLang's children write to the same standard output."""
    command = [sys.executable, "-m", "hypic", "selfcheck", str(tiny_model("llama")), "--checks", "p1,P4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"] is True
    assert [e["name"] for e in found["checks"].values()] == ["P1", "P4"]
    for entry in found["checks"].values():
        assert {"name", "passed", "worst_error", "tolerance", "n", "seed", "detail"} <= entry.keys()


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--checks", "P9"], "P9"), (["--soak", "0"], "--soak 0"), (["--nosuchflag"], "--nosuchflag: neither hypic")],
)
def test_bad_flags_name_the_flag(flags: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["selfcheck", *flags])
    assert done.exit_code == 2
    assert says in done.output


def test_a_model_that_is_not_there_fails_every_check(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["selfcheck", str(tmp_path / "nothing"), "--checks", "P1,P2,P5", "--json"])
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert [e["name"] for e in found["checks"].values()] == ["P1", "P2", "P5"]
    for entry in found["checks"].values():
        assert entry["passed"] is False and "did not start" in entry["detail"]


def test_why_an_engine_died_at_its_start_is_told(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Its scheduler knows, and says so in a log that nobody may come to see."""
    for file in tiny_model("llama").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    command = [sys.executable, "-m", "hypic", "selfcheck", str(tmp_path), "--checks", "P1,P4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "did not start" in json.loads(done.stdout)["checks"][f"{tmp_path}:P1"]["detail"]
    assert done.stderr.count(f"Cannot find any model weights with `{tmp_path}`") == 1, "once for all its checks"


def test_last_lines_are_those_with_text_and_a_progress_bars_last_state(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one\n\n0%\r50%\r100%\n  \ntwo\n")
    assert last_lines(tmp_path / "log", 2) == ["100%", "two"]


def test_what_an_engine_did_not_live_to_show_fails_and_p4_without_an_oracle_is_skipped_not_passed(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(session: Session, *_: Any) -> CheckResult:
        raise SessionError("it died")

    monkeypatch.setattr(selfcheck, "check_p6", dies)
    monkeypatch.setattr("hypic.check.judge._load_oracle", lambda model: (None, "too large"))
    plan = Plan(checks=("P1", "P4", "P5", "P6"), soak=4)
    results = {r.name: r for r in check_model("llama", tiny_model("llama"), plan, lambda *_: None)}
    assert {name: r.status for name, r in results.items()} == {
        "P1": "passed", "P4": "skipped", "P5": "failed", "P6": "failed",
    }  # fmt: skip
    assert "it died" in results["P5"].detail and "it died" in results["P6"].detail
    p4 = results["P4"]
    assert (p4.passed, p4.worst_error) == (None, None) and "too large" in p4.detail
