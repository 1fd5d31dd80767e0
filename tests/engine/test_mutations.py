"""The checks can fail: each fault that is put into the engine turns one of them red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypic.check.checks import check_p1, check_p4
from hypic.check.judge import Judge
from hypic.check.result import CheckResult
from hypic.check.session import Session, SessionError
from hypic.check.turns import check_p6
from hypic.config import HypicConfig

MUTATIONS = Path(__file__).parent / "mutations"
Check = Callable[[Session, Judge], CheckResult]


def p1(session: Session, judge: Judge) -> CheckResult:
    return check_p1(session, judge, seed=1)


def p4(session: Session, judge: Judge) -> CheckResult:
    return check_p4(session, judge, seed=1, n=4)


def p5(session: Session, judge: Judge) -> CheckResult:
    """The exact accounting of P5, after a few linked requests."""
    tally = judge.tally("P5", session)
    try:
        p1(session, judge)
        session.audit()
    except (AssertionError, SessionError) as e:
        tally.require(False, str(e))
    tally.error(0.0, "accounting")
    return tally.result()


def p6(session: Session, judge: Judge) -> CheckResult:
    return check_p6(session, judge, seed=1).result()


def run(model: Path, fault: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> CheckResult:
    monkeypatch.syspath_prepend(str(MUTATIONS))
    env: dict[str, Any] = {"HYPIC_TESTS_FAULT": fault}
    with Session(model, HypicConfig(min_segment=0, start_check=False), env=env) as session:
        return check(session, Judge(model.name, str(model), seed=1))


CASES = [
    ("transition_is_identity", "qwen35", p4),
    ("conv_window_stays", "qwen35", p1),
    ("keys_stay_at_local_positions", "llama", p4),
    ("seams_hold_other_tokens", "qwen35", p1),
    ("slots_are_freed_twice", "llama", p5),
    ("radix_keys_are_unmarked", "llama", p6),
]


@pytest.mark.parametrize(("fault", "model", "check"), CASES, ids=[c[0] for c in CASES])
def test_a_fault_turns_its_check_red(
    fault: str, model: str, check: Check, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tiny_model(model), fault, check, monkeypatch)
    assert result.status == "failed", result.detail


@pytest.mark.parametrize("check", [p1, p4, p5, p6])
def test_without_a_fault_it_is_green(
    check: Check, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(tiny_model("llama"), "", check, monkeypatch)
    assert result.status == "passed", result.detail
