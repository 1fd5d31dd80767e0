"""All checks of docs/SEMANTICS.md on one model: which engines they need, in what order, and what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hypic.check.checks import P2_LONGEST, check_p1, check_p2, check_p3, check_p4
from hypic.check.judge import Judge
from hypic.check.result import CHECKS, CheckResult, Tally, failed, skipped
from hypic.check.session import Answer, Prompt, Session, SessionError
from hypic.check.soak import ENVIRONMENT, FLAGS, Progress, check_p5, quiet_answers, small_arena, soak_prompts
from hypic.check.turns import check_p6, other_strategy
from hypic.config import HypicConfig

DEFAULT_MODELS = ("qwen3next", "qwen35", "llama")
"""Tiny models of `hypic.check.tiny_models`: gated delta networks, Qwen3.5 with mrope, attention only."""
DEFAULT_SOAK = 40

Found = Tally | CheckResult


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to check.

    Attributes:
        checks: names out of CHECKS.
        seed: of all prompts.
        soak: requests of P5.
        config: hypic's settings; some checks change a few of them.
        flags: fields of SGLang's ServerArgs for every engine; some checks change a few of them.
    """

    checks: tuple[str, ...] = CHECKS
    seed: int = 0
    soak: int = DEFAULT_SOAK
    config: HypicConfig = HypicConfig()
    flags: dict[str, Any] = {}


def check_model(name: str, model: str | Path, plan: Plan, progress: Progress) -> Iterator[CheckResult]:
    """Run the plan on one model; yields each result as it is there, one for each check of the plan.

    Args:
        name: how results call the model.
        model: its path or name.
        plan: what to check.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    run = _Run(name, str(model), plan, progress)
    for stage in (run.main, run.other_strategy, run.wide_seams, run.soak):
        yield from stage()
    yield from run.unfinished()


def default_models(names: Sequence[str] = DEFAULT_MODELS) -> list[tuple[str, Path]]:
    """The tiny models, built on first use."""
    from hypic.check.tiny_models import build

    return [(name, build(name)) for name in names]


class _Run:
    """The checks of one model, in stages of one engine each.

    A check is reported once. One that its engine did not live to see stays in `_left`, and is a failed check in the end.
    """

    def __init__(self, name: str, model: str, plan: Plan, progress: Progress) -> None:
        self._name, self._model, self._plan, self._progress = name, model, plan, progress
        self._judge = Judge(name, model, plan.seed)
        self._config = msgspec.structs.replace(plan.config, min_segment=0)
        self._left = [c for c in CHECKS if c in plan.checks]
        self._why: dict[str, str] = {}
        """What kept a check from its result."""
        self._turns: tuple[Tally, dict[str, Any]] | None = None
        """P6 so far, and the flags that it is still to be run with."""
        self._soaking: tuple[list[Prompt], list[Answer], int] | None = None
        """Prompts of the soak, their answers on a quiet engine, and the size of the soak's arena."""

    # ------------------------------------------------------------------ stages

    def main(self) -> Iterator[CheckResult]:
        """The engine as the user has it: P1, P3, P4, P6, and what P5 must be equal to."""

        def run(session: Session) -> Iterator[CheckResult]:
            for check, function in {"P1": check_p1, "P3": check_p3, "P4": check_p4}.items():
                if check in self._left:
                    yield self._done(self._run(check, function, session))
            if "P6" in self._left and session.settings["disable_radix_cache"]:
                yield self._done(skipped("P6", self._name, self._plan.seed, "the radix cache is switched off"))
            elif "P6" in self._left:
                found = self._run("P6", check_p6, session)
                again = other_strategy(session.settings, self._plan.flags)
                if again and isinstance(found, Tally):
                    self._turns = found, again
                else:
                    yield self._done(found)
            if "P5" in self._left:
                prompts = soak_prompts(session, self._plan.seed, self._plan.soak)
                arena = small_arena(session)
                self._soaking = prompts, quiet_answers(session, prompts, self._progress), arena

        if checks := [c for c in self._left if c != "P2"]:
            yield from self._engine(checks, self._config, run)

    def other_strategy(self) -> Iterator[CheckResult]:
        """P6 again, where SGLang keeps the states of a hybrid in another way."""
        if self._turns is None:
            return
        before, flags = self._turns

        def run(session: Session) -> Iterator[CheckResult]:
            found = self._run("P6", check_p6, session)
            if isinstance(found, Tally):
                found.absorb(before)
            yield self._done(found)

        yield from self._engine(["P6"], self._config, run, flags=flags)

    def wide_seams(self) -> Iterator[CheckResult]:
        """P2: links are forced, and seams cover every segment."""
        config = msgspec.structs.replace(self._plan.config, force_link=True, seam_window=P2_LONGEST)
        if "P2" in self._left:
            yield from self._engine(["P2"], config, lambda s: iter([self._done(self._run("P2", check_p2, s))]))

    def soak(self) -> Iterator[CheckResult]:
        """P5: an engine that has little of everything."""
        if self._soaking is None:
            return
        prompts, quiet, arena = self._soaking

        def check(session: Session, judge: Judge, seed: int) -> Tally:
            return check_p5(session, judge, seed, prompts, quiet, self._progress)

        def run(session: Session) -> Iterator[CheckResult]:
            yield self._done(self._run("P5", check, session))

        config = msgspec.structs.replace(self._config, memory=arena)
        yield from self._engine(["P5"], config, run, env=ENVIRONMENT, flags=FLAGS)

    def unfinished(self) -> Iterator[CheckResult]:
        """Checks that came to no result."""
        for check in self._left:
            yield failed(check, self._name, self._plan.seed, self._why.get(check, "not reached"))

    # ------------------------------------------------------------------ parts

    def _engine(
        self,
        checks: Sequence[str],
        config: HypicConfig,
        run: Callable[[Session], Iterator[CheckResult]],
        *,
        env: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> Iterator[CheckResult]:
        """Results of `run` on a new engine; `flags` win over the user's. If it fails, that is why `checks` have no result."""
        self._progress(f"starting an engine for {', '.join(checks)}", 0, 1)
        try:
            with Session(self._model, config, env=env, **(self._plan.flags | dict(flags or {}))) as session:
                yield from run(session)
        except Exception as e:
            why = str(e) if isinstance(e, SessionError) else f"{type(e).__name__}: {e}"
            self._why |= dict.fromkeys(checks, why)

    def _run(self, check: str, run: Callable[[Session, Judge, int], Found], session: Session) -> Found:
        """What a check finds; whatever goes wrong short of the engine itself is a failure of that check."""
        self._progress(check, 0, 1)
        began = time.perf_counter()
        try:
            found = run(session, self._judge, self._plan.seed)
        except SessionError:
            raise
        except Exception as e:
            found = failed(check, self._name, self._plan.seed, f"{type(e).__name__}: {e}")
        seconds = time.perf_counter() - began
        if isinstance(found, CheckResult):
            return msgspec.structs.replace(found, seconds=seconds)
        found.seconds += seconds
        return found

    def _done(self, found: Found) -> CheckResult:
        result = found.result() if isinstance(found, Tally) else found
        self._left.remove(result.name)
        return result
