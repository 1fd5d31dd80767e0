"""``hypic doctor``: versions, hooks, refused flags and, for a model, support and memory plan."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hypic.config import HypicConfig
    from hypic.doctor.findings import Findings, ModelFinding


def doctor(
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [SGLANG FLAGS]", help="A model, then the flags that it would be served with."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--hypic-memory", metavar="SIZE", help="Plan with this arena, for example 2GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    models: Annotated[
        bool,
        typer.Option("--models", help="Print which architectures hypic's tests cover, in Markdown, and nothing else."),
    ] = False,
) -> None:
    """Does hypic fit this machine, the installed SGLang and MODEL? Exit code 1 if something does not.

    Applies every hook in this process and says which are in force, and why each is needed. With MODEL: whether it can
    be served, bytes of an artifact, and how many segments the arena holds. Starts no server and loads no weights.
    """
    if models:
        from hypic.check.coverage import table

        print(table())
        return
    from hypic.commands.flags import setting, take_hypic_flags
    from hypic.config import ConfigError, from_env

    try:
        import msgspec

        rest, config = take_hypic_flags(args or [], msgspec.structs.replace(from_env(os.environ), enabled=True))
        if memory is not None:
            config = msgspec.structs.replace(config, memory=setting("memory", memory))
    except ConfigError as error:
        typer.secho(f"hypic doctor: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    print("importing SGLang and applying the hooks, about ten seconds ...", file=sys.stderr)
    with contextlib.redirect_stdout(sys.stderr):
        found = examine(rest, config)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        from rich.console import Console

        from hypic.doctor.show import show

        show(found, Console())
    raise typer.Exit(1 if found.problems else 0)


def examine(args: list[str], config: HypicConfig) -> Findings:
    """Look at everything; nothing that is wrong raises. Changes this process's environment, as ``hypic serve`` does."""
    _quiet()
    from hypic.commands.serve import ServeError, prepare_environment, sglang_argv, wants_cpu
    from hypic.doctor import installation
    from hypic.doctor.findings import Findings
    from hypic.engine.hook import SUPPORTED_SGLANG

    found = Findings(supported_sglang=SUPPORTED_SGLANG, versions=installation.versions())
    found.refused_flags = installation.refused_flags()
    found.problems = [f"{v.name} {v.version or ''}: {v.problem}" for v in found.versions if v.problem]
    argv = sglang_argv(args)
    try:
        cpu = wants_cpu(argv, os.environ)
        prepare_environment(config, argv, cpu, os.environ)
        found.platform = installation.machine(cpu)
        tables = installation.apply_hooks(cpu)
    except (ImportError, RuntimeError, ServeError) as error:  # torch has errors of its own where a driver is missing
        found.problems.append(f"SGLang cannot be imported: {error}")
        return found
    for table in tables:
        rows = installation.hook_findings(table)
        found.hooks += rows
        found.problems += [row.problem for row in rows if row.problem] + installation.table_problems(table)
    if argv:
        found.model = _model(argv, args[0], config, found, cpu)
        found.problems += [f"{found.model.path}: {problem}" for problem in found.model.problems]
    return found


def _model(argv: list[str], path: str, config: HypicConfig, found: Findings, cpu: bool) -> ModelFinding:
    """The model that ``argv`` names; marks in ``found`` the refused flags that ``argv`` holds."""
    from hypic.commands.serve import flag_value, read_server_args
    from hypic.doctor.findings import ModelFinding
    from hypic.doctor.model import examine as examine_model
    from hypic.doctor.model import folder_problem
    from hypic.engine.hook import UnsupportedSGLang
    from hypic.engine.support import Unsupported

    model = ModelFinding(path=path)
    assert found.platform is not None
    if problem := folder_problem(flag_value(argv, "--model-path") or ""):
        model.problems.append(problem)
        return model
    try:
        try:
            server_args = read_server_args(argv)
        except Unsupported as error:  # examined all the same: there is more to say than why
            server_args = error.server_args
        examine_model(model, server_args, config, found.platform.memory_free, cpu)
    except Unsupported as error:
        model.problems.append(str(error))
        for refused in found.refused_flags:
            refused.given = f"\n  {refused.flag}:" in str(error)
    except UnsupportedSGLang:
        model.problems.append("not examined: the hooks do not apply")
    except Exception as error:  # whatever SGLang and transformers say of an unreadable or odd config
        model.problems.append(f"SGLang cannot serve it: {str(error).strip() or type(error).__name__}")
    return model


def _quiet() -> None:
    """SGLang and its dependencies warn, on import, of what they do not find."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
