"""The checks can fail: each fault that is put into the engine turns the check red that is there for it, for that reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hypic.check.checks import check_p1, check_p4
from hypic.check.judge import Judge
from hypic.check.result import CheckResult
from hypic.check.session import Session, SessionError
from hypic.check.turns import check_p6
from hypic.config import HypicConfig

MUTATIONS = Path(__file__).parent / "mutations"
SEED = 1
CLEAR = 1e-2
"""A fault in the arithmetic is this far off at least, a hundred times the tolerance."""

Check = Callable[[Session, Judge], CheckResult]


def p1(session: Session, judge: Judge) -> CheckResult:
    return check_p1(session, judge, SEED)


def p4(session: Session, judge: Judge) -> CheckResult:
    return check_p4(session, judge, SEED, n=6)


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
    return check_p6(session, judge, SEED).result()


CASES = [
    ("transition_is_identity", "qwen35", p4, None),
    ("end_state_keeps_the_seam", "qwen35", p1, None),
    ("conv_window_stays", "qwen35", p4, None),
    ("keys_stay_at_local_positions", "llama", p4, None),
    ("seams_hold_other_tokens", "qwen35", p4, None),
    ("seams_come_from_artifacts", "qwen35", p4, None),
    ("slots_are_freed_twice", "llama", p5, "owned twice"),
    ("radix_keys_are_unmarked", "llama", p6, "tokens from the radix tree"),
    ("radix_keys_are_unmarked", "qwen35", p6, "tokens from the radix tree"),
]


@pytest.mark.parametrize(("fault", "model", "check", "reason"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_fault_turns_its_check_red(
    fault: str,
    model: str,
    check: Check,
    reason: str | None,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(MUTATIONS))
    path = tiny_model(model)
    config = HypicConfig(min_segment=0, start_check=False)
    with Session(path, config, env={"HYPIC_TESTS_FAULT": fault}) as session:
        result = check(session, Judge(model, str(path), SEED))
    assert result.status == "failed", result.detail
    if reason is None:
        assert result.worst_error is not None and result.worst_error > CLEAR, result.detail
    else:
        assert reason in result.detail


@pytest.fixture(scope="module")
def sound(tiny_model: Callable[[str], Path]) -> Iterator[Callable[[str], tuple[Session, Judge]]]:
    """A model without a fault; one engine at a time."""
    running: dict[str, tuple[Session, Judge]] = {}

    def start(model: str) -> tuple[Session, Judge]:
        if model not in running:
            for session, _ in running.values():
                session.close()
            running.clear()
            path = tiny_model(model)
            running[model] = Session(path, HypicConfig(min_segment=0)), Judge(model, str(path), SEED)
        return running[model]

    yield start
    for session, _ in running.values():
        session.close()


@pytest.mark.parametrize(("model", "check"), sorted({c[1:3] for c in CASES}, key=lambda c: (c[0], c[1].__name__)))
def test_without_a_fault_it_is_green(model: str, check: Check, sound: Callable[[str], tuple[Session, Judge]]) -> None:
    result = check(*sound(model))
    assert result.status == "passed", result.detail
