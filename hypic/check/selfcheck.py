"""All checks of docs/SEMANTICS.md on one model: which engines they need, in what order, and what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hypic.check import soak, turns
from hypic.check.checks import P2_LONGEST, P4_LONGEST, check_p1, check_p2, check_p3, check_p4
from hypic.check.judge import Judge
from hypic.check.result import CheckResult, Tally, failed
from hypic.check.session import Answer, Prompt, Session, SessionError
from hypic.config import HypicConfig

CHECKS = ("P1", "P2", "P3", "P4", "P5", "P6")
DEFAULT_MODELS = ("qwen3next", "qwen35", "llama")
"""Tiny models of `hypic.check.tiny_models`: gated delta networks, Qwen3.5 with mrope, attention only."""
DEFAULT_SOAK = 40


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to check.

    Attributes:
        checks: names out of CHECKS. seed: of all prompts. soak: requests of P5.
        config: hypic's settings; some checks change a few of them.
        flags: fields of SGLang's ServerArgs for every engine.
    """

    checks: tuple[str, ...] = CHECKS
    seed: int = 0
    soak: int = DEFAULT_SOAK
    config: HypicConfig = HypicConfig()
    flags: dict[str, Any] = {}


Progress = Callable[[str, int, int], None]


def check_model(name: str, model: str | Path, plan: Plan, progress: Progress) -> Iterator[CheckResult]:
    """Run the plan on one model; yields each result as it is there. An engine that fails is a failed check.

    Args:
        name: how results call the model. model: its path or name.
        progress: called with what is being done, how much of it is done, and how much there is.
    """
    judge = Judge(name, str(model), plan.seed)
    quiet: list[Answer] = []
    prompts: list[Prompt] = []
    arena = 0
    wanted = set(plan.checks)
    if wanted - {"P2"}:
        config = msgspec.structs.replace(plan.config, min_segment=0)
        main: dict[str, Callable[[Session, Judge, int], Tally | CheckResult]] = {
            "P1": check_p1,
            "P3": check_p3,
            "P4": check_p4,
            "P6": turns.check_p6,
        }
        names = [c for c in main if c in wanted]
        try:
            with Session(model, config, **plan.flags) as session:
                for check in names:
                    yield _timed(check, partial(main[check], session, judge, plan.seed), progress)
                if "P5" in wanted:
                    prompts = soak.soak_prompts(session, plan.seed, plan.soak)
                    arena = soak.small_arena(session)
                    quiet = soak.quiet_answers(session, prompts, progress)
        except SessionError as e:
            yield failed("+".join([*names, *(["P5"] if "P5" in wanted else [])]), judge.name, plan.seed, str(e))
            return
    if "P2" in wanted:
        config = msgspec.structs.replace(plan.config, force_link=True, seam_window=max(P2_LONGEST, P4_LONGEST))
        yield from _own_engine("P2", judge, model, config, plan, {}, {}, check_p2, progress)
    if "P5" in wanted:
        config = msgspec.structs.replace(plan.config, min_segment=0, memory=arena)

        def p5(session: Session, judge: Judge, seed: int) -> Tally:
            return soak.check_p5(session, judge, seed, prompts, quiet, progress)

        yield from _own_engine("P5", judge, model, config, plan, soak.ENVIRONMENT, soak.FLAGS, p5, progress)


def _own_engine(
    check: str,
    judge: Judge,
    model: str | Path,
    config: HypicConfig,
    plan: Plan,
    env: dict[str, str],
    flags: dict[str, Any],
    run: Callable[[Session, Judge, int], Tally | CheckResult],
    progress: Progress,
) -> Iterator[CheckResult]:
    """A check on an engine of its own; `flags` win over the user's."""
    try:
        with Session(model, config, env=env, **(plan.flags | flags)) as session:
            yield _timed(check, partial(run, session, judge, plan.seed), progress)
    except SessionError as e:
        yield failed(check, judge.name, plan.seed, str(e))


def _timed(check: str, run: Callable[[], Tally | CheckResult], progress: Progress) -> CheckResult:
    progress(check, 0, 1)
    began = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - began
    return found.result(seconds) if isinstance(found, Tally) else msgspec.structs.replace(found, seconds=seconds)


def default_models(names: Sequence[str] = DEFAULT_MODELS) -> list[tuple[str, Path]]:
    """The tiny models, built on first use."""
    from hypic.check.tiny_models import build

    return [(name, build(name)) for name in names]
