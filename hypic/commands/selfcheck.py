"""``hypic selfcheck``: prove on the installed engine and a model that links mean what they must."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from hypic.commands.serve import sglang_argv, wants_cpu
from hypic.config import ConfigError, from_env
from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment

_OTHER_NAMES = {"tensor_parallel_size": "tp_size", "data_parallel_size": "dp_size", "expert_parallel_size": "ep_size"}
"""argparse destinations of SGLang's flags that differ from the field of ServerArgs."""


def selfcheck(
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] [SGLANG FLAGS]", help="A model; default: three tiny ones.")
    ] = None,
    checks: Annotated[str, typer.Option(help="Which checks, for example P1,P4.")] = "P1,P2,P3,P4,P5,P6",
    soak: Annotated[int, typer.Option(help="Requests of the soak in P5.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of all prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Run the checks P1 to P6 on MODEL and exit with 1 if one fails.

    P1 one segment equals full recompute. P2 so do links whose seams cover everything. P3 artifacts do not depend on what
    compiled them, and requests do not touch each other. P4 a link equals an independent oracle. P5 a soak with aborts and
    retractions leaves every slot accounted for. P6 the next turn reuses a linked conversation, and nobody else does.

    A check that cannot be made (the oracle does not know the model, say) is skipped, which is not a pass.
    """
    console = Console(stderr=True)
    argv = sglang_argv(args or [])
    if wants_cpu(argv, os.environ):
        os.environ[CPU_MODE] = "1"
        set_environment()
    from hypic.check.selfcheck import CHECKS, Plan, check_model, default_models

    wanted = tuple(c.strip().upper() for c in checks.split(",") if c.strip())
    if unknown := sorted(set(wanted) - set(CHECKS)):
        raise typer.BadParameter(f"--checks {','.join(unknown)}: known are {', '.join(CHECKS)}")
    if soak < 1:
        raise typer.BadParameter(f"--soak {soak}: at least 1")
    try:
        config = from_env()
    except ConfigError as e:
        raise typer.BadParameter(str(e)) from None
    flags = server_fields(argv)
    path = flags.pop("model_path", None)
    plan = Plan(checks=wanted, seed=seed, soak=soak, config=config, flags=flags)
    results = []
    with console.status("starting") as status:
        for name, model in [(str(path), Path(path))] if path else default_models():
            status.update(f"{name}: starting an engine")

            def progress(what: str, done: int, of: int, name: str = name) -> None:
                status.update(f"{name}: {what} {done}/{of}")

            for result in check_model(name, model, plan, progress):
                results.append(result)
                console.print(f"{result.status:8}{name} {result.name} {result.detail}", highlight=False, markup=False)
    if as_json:
        entries = {f"{r.model}:{r.name}": msgspec.to_builtins(r) for r in results}
        print(json.dumps({"checks": entries, "passed": all(r.passed is not False for r in results)}))
    else:
        Console().print(_table(results))
    if not results or any(r.status == "failed" for r in results):
        raise typer.Exit(1)


def server_fields(argv: list[str]) -> dict[str, Any]:
    """SGLang's command line as fields of ServerArgs: those that were given. Bad flags end in SGLang's own error."""
    if not argv:
        return {}
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="hypic selfcheck")
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.required = False
    given = vars(parser.parse_args(argv))
    return {_OTHER_NAMES.get(k, k): v for k, v in given.items() if v != parser.get_default(k)}


def _table(results: list[Any]) -> Table:
    table = Table(title="hypic selfcheck")
    for column in ("model", "check", "status", "worst error", "tolerance", "n", "seconds"):
        table.add_column(column, justify="left" if column in ("model", "check", "status") else "right")
    colours = {"passed": "green", "failed": "red", "skipped": "yellow"}
    for r in results:
        worst, bound = ("" if x is None else f"{x:.1e}" for x in (r.worst_error, r.tolerance))
        status = f"[{colours[r.status]}]{r.status}[/]"
        table.add_row(r.model, r.name, status, worst, bound, str(r.n), f"{r.seconds:.0f}")
    return table
