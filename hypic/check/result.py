"""What a check found: the entry of ``hypic selfcheck --json``, and the tally that leads to it."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

CHECKS = ("P1", "P2", "P3", "P4", "P5", "P6")
Status = Literal["passed", "failed", "skipped"]

_SHOWN = 4
"""Broken facts that are spelled out; the others are counted."""


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check on one model.

    Attributes:
        name: P1 to P6 (docs/SEMANTICS.md).
        model: what was checked.
        status: a skipped check is neither passed nor failed; ``detail`` says why it was skipped.
        passed: the same as a truth value; null where skipped.
        worst_error: largest error measured, on logprobs unless the check says otherwise; null if nothing was compared.
        tolerance: bound on it; null if nothing was compared.
        n: comparisons made.
        seed: what the check drew its prompts from.
        detail: what was covered; for a failure, what was wrong.
        seconds: time it took.
    """

    name: str
    model: str
    status: Status
    passed: bool | None
    worst_error: float | None
    tolerance: float | None
    n: int
    seed: int
    detail: str
    seconds: float = 0.0


class Tally:
    """Errors and facts of one check as they come in.

    Args:
        tolerance: bound on every error. None: ``factor`` times the largest error that stock SGLang makes itself, which
            the check hands in through :meth:`baseline`.
    """

    def __init__(self, name: str, model: str, seed: int, tolerance: float | None, factor: float = 2.0):
        self.name, self.model, self.seed = name, model, seed
        self._tolerance, self._factor = tolerance, factor
        self._baseline = 0.0
        self._worst, self._where = 0.0, ""
        self._n = 0
        self._broken: list[str] = []
        self._noted: list[str] = []
        self.seconds = 0.0

    @property
    def tolerance(self) -> float:
        return self._factor * self._baseline if self._tolerance is None else self._tolerance

    def error(self, value: float, what: str) -> None:
        """An error was measured; ``what`` names the prompt. Not a number counts as infinite."""
        self._n += 1
        value = math.inf if math.isnan(value) else value
        if value > self._worst:
            self._worst, self._where = value, what

    def baseline(self, value: float) -> None:
        """What stock SGLang is off by where hypic is measured."""
        self._baseline = max(self._baseline, value)

    def require(self, holds: bool, what: str) -> None:
        """A fact that must hold exactly; ``what`` says what was found if it does not."""
        if not holds:
            self._broken.append(what)

    def note(self, text: str) -> None:
        """Say in the result what was covered."""
        self._noted.append(text)

    def absorb(self, other: Tally) -> None:
        """Take over what another part of the same check found."""
        self._n += other._n
        self._baseline = max(self._baseline, other._baseline)
        if other._worst > self._worst:
            self._worst, self._where = other._worst, other._where
        self._broken += other._broken
        self._noted += other._noted
        self.seconds += other.seconds

    def result(self) -> CheckResult:
        """A check that compared nothing has not passed."""
        self.require(self._n > 0, "nothing was compared")
        problems = list(self._broken)
        if self._worst > self.tolerance:
            problems.insert(0, f"off by {self._worst:.1e} at {self._where}")
        passed = not problems
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        return CheckResult(
            name=self.name,
            model=self.model,
            status="passed" if passed else "failed",
            passed=passed,
            worst_error=self._worst if self._n else None,
            tolerance=self.tolerance if self._n else None,
            n=self._n,
            seed=self.seed,
            detail="; ".join([*problems[:_SHOWN], *more] if problems else self._noted),
            seconds=self.seconds,
        )


def skipped(name: str, model: str, seed: int, why: str) -> CheckResult:
    """A check that could not be made."""
    return _without_figures(name, model, seed, "skipped", why)


def failed(name: str, model: str, seed: int, why: str) -> CheckResult:
    """A check that broke off: the engine did not start, died, or does not answer."""
    return _without_figures(name, model, seed, "failed", why)


def _without_figures(name: str, model: str, seed: int, status: Status, why: str) -> CheckResult:
    return CheckResult(
        name=name,
        model=model,
        status=status,
        passed=None if status == "skipped" else False,
        worst_error=None,
        tolerance=None,
        n=0,
        seed=seed,
        detail=why,
    )
