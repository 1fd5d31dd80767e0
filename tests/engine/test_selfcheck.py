"""`hypic selfcheck` on the tiny models, and what its command line does with bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypic.check.selfcheck import CHECKS, DEFAULT_MODELS, Plan, check_model
from hypic.cli import app


@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_all_checks_pass(name: str, tiny_model: Callable[[str], Path]) -> None:
    results = list(check_model(name, tiny_model(name), Plan(seed=7), lambda *_: None))
    assert sorted(r.name for r in results) == list(CHECKS)
    for r in results:
        assert r.status == "passed", f"{r.name}: {r.detail}"
        assert r.worst_error is not None and r.tolerance is not None
        assert r.worst_error <= r.tolerance == 1e-4 and r.n > 0


def test_the_seam_kernel_serves_too(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`--hypic-attention seam` is the way of a GPU; here through its torch reference."""
    monkeypatch.setenv("HYPIC_ATTENTION", "seam")
    from hypic.config import from_env

    plan = Plan(checks=("P1", "P4"), config=from_env())
    results = list(check_model("qwen35", tiny_model("qwen35"), plan, lambda *_: None))
    assert [r.status for r in results] == ["passed", "passed"], [r.detail for r in results]


def test_json_has_one_entry_per_check(tiny_model: Callable[[str], Path]) -> None:
    done = CliRunner().invoke(app, ["selfcheck", str(tiny_model("llama")), "--checks", "p1,P3", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["passed"] is True
    assert {e["name"] for e in found["checks"].values()} == {"P1", "P3"}
    for entry in found["checks"].values():
        assert {"name", "passed", "worst_error", "tolerance", "n"} <= entry.keys()


@pytest.mark.parametrize(("flags", "says"), [(["--checks", "P9"], "P9"), (["--soak", "0"], "--soak 0")])
def test_bad_flags_name_the_flag(flags: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["selfcheck", *flags])
    assert done.exit_code == 2
    assert says in done.output


def test_a_model_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["selfcheck", str(tmp_path / "nothing"), "--checks", "P1", "--json"])
    assert done.exit_code == 1
