"""``hypic selfcheck``: prove on the installed engine and a model that links mean what they must."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from hypic.check.result import CHECKS
from hypic.commands.flags import server_fields, take_hypic_flags
from hypic.commands.serve import ServeError, flag_value, sglang_argv, wants_cpu
from hypic.config import ConfigError, HypicConfig, from_env
from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment

if TYPE_CHECKING:
    from hypic.check.result import CheckResult
    from hypic.check.selfcheck import Plan


_TAIL_LINES = 40
"""How much of an engine's log is shown when it dies: more than the traceback of its error has."""


def selfcheck(
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] [SGLANG FLAGS]", help="A model; default: three tiny ones.")
    ] = None,
    checks: Annotated[str, typer.Option(help="Which checks, for example P1,P4.")] = "P1,P2,P3,P4,P5,P6",
    soak: Annotated[int, typer.Option(help="Requests of the soak in P5.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of all prompts.")] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Check P3 and P4 on so many workers behind a router, and nothing else.")
    ] = 0,
    log: Annotated[Path | None, typer.Option(help="Keep what the engines print in this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Run the checks P1 to P6 on MODEL and exit with 1 if one fails.

    P1 one segment equals full recompute. P2 so do links whose seams cover everything. P3 artifacts do not depend on what
    compiled them, and requests do not touch each other. P4 a link equals an independent oracle. P5 a soak with aborts and
    retractions leaves every slot accounted for. P6 the next turn reuses a linked conversation, and nobody else does.

    With --workers N: P3 and P4 across the workers of a cluster, whose answers must be those of one worker alone.

    A check that cannot be made (the oracle does not know the model, say) is skipped, which is not a pass.
    """
    wanted = tuple(c.strip().upper() for c in checks.split(",") if c.strip())
    if not wanted or (unknown := sorted(set(wanted) - set(CHECKS))):
        raise typer.BadParameter(
            f"--checks {','.join(unknown) if wanted else repr(checks)}: known are {', '.join(CHECKS)}"
        )
    if soak < 1:
        raise typer.BadParameter(f"--soak {soak}: at least 1")
    if log is not None and (log.is_dir() or not log.parent.is_dir()):
        raise typer.BadParameter(f"--log {log}: not a file in a folder that is there")
    try:
        rest, config = take_hypic_flags(args or [], from_env())
        argv = sglang_argv(rest)
        on_cpu = wants_cpu(argv, os.environ)
    except (ConfigError, ServeError) as e:
        raise typer.BadParameter(str(e)) from None
    if on_cpu:
        os.environ[CPU_MODE] = "1"
        set_environment()
    from hypic.check.selfcheck import Plan

    if workers:
        _check_workers(argv, config, workers, seed, log, as_json)
        return
    try:
        flags = server_fields(argv)
    except ConfigError as e:
        raise typer.BadParameter(str(e)) from None
    path = flags.pop("model_path", None)
    plan = Plan(checks=wanted, seed=seed, soak=soak, config=config, flags=flags)
    with engine_output(log) as (terminal, printed):
        results = _run(path, plan, Console(file=terminal), printed)
    _finish(results, printed, log is not None, as_json)


def _finish(results: list[CheckResult], log: Path, keep: bool, as_json: bool) -> None:
    """Print what was found; exit with 1 if a check failed."""
    failed = not any(r.passed for r in results) or any(r.status == "failed" for r in results)
    if as_json:
        entries = {f"{r.model}:{r.name}": msgspec.to_builtins(r) for r in results}
        print(json.dumps({"passed": not failed, "checks": entries}))
    else:
        Console().print(_table(results))
    if failed:
        typer.echo(f"What the engines printed: {log}", err=True)
        raise typer.Exit(1)
    if not keep:
        log.unlink()


def _check_workers(
    argv: list[str], config: HypicConfig, workers: int, seed: int, log: Path | None, as_json: bool
) -> None:
    from hypic.check.selfcheck import default_models
    from hypic.check.workers import check_workers

    path = flag_value(argv, "--model-path")
    rest = [*argv]
    if path is not None:
        at = rest.index("--model-path")
        del rest[at : at + 2]
    with engine_output(log) as (terminal, printed):
        console, results = Console(file=terminal), []
        with console.status("starting") as status:
            for name, model in [(path, Path(path))] if path else default_models():

                def progress(what: str, _done: int, _of: int, name: str = name) -> None:
                    status.update(f"{name}: {what}")

                for result in check_workers(name, model, rest, config, workers, seed, progress):
                    results.append(result)
                    console.print(
                        f"{result.status:8}{name} {result.name} {result.detail}", highlight=False, markup=False
                    )
    _finish(results, printed, log is not None, as_json)


def _run(path: str | None, plan: Plan, console: Console, log: Path) -> list[CheckResult]:
    """Results on the model at `path`, or on the tiny ones; each is told as it is there, and why an engine died."""
    from hypic.check.selfcheck import check_model, default_models

    results: list[CheckResult] = []
    with console.status("starting") as status:
        for name, model in [(path, path)] if path else default_models():

            def progress(what: str, done: int, of: int, name: str = name) -> None:
                status.update(f"{name}: {what}" + (f" {done}/{of}" if of > 1 else ""))

            for result in check_model(name, model, plan, progress):
                told = next(
                    (r for r in results if r.detail and (r.model, r.detail) == (result.model, result.detail)), None
                )
                results.append(result)
                detail = f"as {told.name}" if told else result.detail
                console.print(f"{result.status:8}{name} {result.name} {detail}", highlight=False, markup=False)
                if not told and result.status == "failed" and result.worst_error is None:
                    console.print(f"The last lines of {log}:", highlight=False, markup=False, soft_wrap=True)
                    for line in last_lines(log):
                        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    return results


def last_lines(log: Path, count: int = _TAIL_LINES) -> list[str]:
    """The last lines of a log that say something; of a progress bar, its last state."""
    lines = (line.rstrip().rpartition("\r")[2] for line in log.read_text("utf-8", "replace").split("\n"))
    return list(deque((line for line in lines if line.strip()), maxlen=count))


@contextmanager
def engine_output(log: Path | None) -> Iterator[tuple[TextIO, Path]]:
    """Everything that this process and those it starts print goes to a file: standard output is for the result alone.

    Args:
        log: the file, None: a new one.
    Yields:
        What was standard error, and the file.
    """
    if log is None:
        handle, name = tempfile.mkstemp(prefix="hypic-selfcheck-", suffix=".log")
    else:
        handle, name = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), str(log)
    saved = os.dup(1), os.dup(2)
    terminal = os.fdopen(os.dup(2), "w")
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        yield terminal, Path(name)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
        terminal.close()
        os.close(handle)


def _table(results: list[CheckResult]) -> Table:
    table = Table(title="hypic selfcheck")
    for column in ("model", "check", "status", "worst error", "tolerance", "n", "seconds"):
        table.add_column(column, justify="left" if column in ("model", "check", "status") else "right")
    colours = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for r in results:
        worst, bound = ("" if x is None else f"{x:.1e}" for x in (r.worst_error, r.tolerance))
        status = f"[{colours[r.status]}]{r.status}[/]"
        table.add_row(r.model, r.name, status, worst, bound, str(r.n), f"{r.seconds:.0f}")
    return table
