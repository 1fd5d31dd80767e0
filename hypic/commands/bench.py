"""``hypic bench``: TTFT of linked prompts beside stock SGLang's, measured in one go."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from hypic.bench import Timing, Workload
from hypic.commands.serve import sglang_argv, wants_cpu
from hypic.config import ConfigError, from_env, parse_bytes
from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment

_RESULT = "hypic-bench-result "


def bench(
    args: Annotated[list[str], typer.Argument(metavar="MODEL [SGLANG FLAGS]", help="A model, then SGLang's flags.")],
    segments: Annotated[int, typer.Option(help="Segments in a prompt.")] = 16,
    segment_tokens: Annotated[int, typer.Option(help="Tokens of a segment.")] = 2048,
    system: Annotated[int, typer.Option(help="Tokens in front of the segments.")] = 32,
    query: Annotated[int, typer.Option(help="Tokens behind the segments.")] = 64,
    reps: Annotated[int, typer.Option(help="Repetitions of each case, after one to warm up.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the token ids.")] = 0,
    memory: Annotated[str | None, typer.Option("--hypic-memory", help="Arena size, for example 8GiB.")] = None,
    engines: Annotated[str, typer.Option(help="Which engines to time: stock,hypic or one of them.")] = "stock,hypic",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time prompts of SEGMENTS documents on MODEL: stock cold, stock prefix hit, hypic cold, warm and next turn.

    TTFT from generate() to the first token, batch 1, median. Both engines run one after the other on this machine with
    the same flags. `--load-format dummy` measures a shape without its weights.
    """
    console = Console(stderr=True)
    workload = Workload(system, segments, segment_tokens, query, reps, seed)
    argv = sglang_argv(args)
    try:
        config = msgspec.structs.replace(
            from_env(), enabled=True, **({"memory": parse_bytes(memory)} if memory else {})
        )
    except ConfigError as e:
        raise typer.BadParameter(str(e)) from None
    timings: list[Timing] = []
    for name in engines.split(","):
        if name not in ("stock", "hypic"):
            raise typer.BadParameter(f"--engines: {name!r} is neither stock nor hypic")
        environ = dict(os.environ) | (config.to_env() if name == "hypic" else {"HYPIC_ENABLED": "0"})
        if wants_cpu(argv, os.environ):
            environ[CPU_MODE] = "1"
            set_environment(environ)
        timings += _run_child(name, workload, argv, environ, console)
    if as_json:
        print(
            json.dumps(
                {"workload": msgspec.to_builtins(workload), "flags": argv, "timings": msgspec.to_builtins(timings)}
            )
        )
    else:
        Console().print(_table(workload, timings))


def _run_child(
    name: str, workload: Workload, argv: list[str], environ: dict[str, str], console: Console
) -> list[Timing]:
    command = [sys.executable, "-m", "hypic.commands.bench", name, json.dumps(msgspec.to_builtins(workload)), *argv]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        found = None
        for line in child.stdout:
            if line.startswith(_RESULT):
                found = msgspec.json.decode(line[len(_RESULT) :], type=list[Timing])
            else:
                console.print(line.rstrip(), style="dim", highlight=False, markup=False)
    if found is None:
        console.print(
            f"hypic bench: the {name} engine ended with exit code {child.returncode}; see its log above", style="red"
        )
        raise typer.Exit(1)
    return found


def _table(workload: Workload, timings: list[Timing]) -> Table:
    table = Table(title=f"TTFT, {workload.tokens} tokens in {workload.segments} segments of {workload.segment_tokens}")
    for column in ("engine", "case", "median ms", "min", "max", "n", "cached tokens", "stock cold / this"):
        table.add_column(column, justify="left" if column in ("engine", "case") else "right")
    base = next((t.median for t in timings if (t.engine, t.case) == ("stock", "cold")), None)
    for t in timings:
        ratio = "" if base is None else f"{base / t.median:.2f}x"
        numbers = [f"{x:.1f}" for x in (t.median, min(t.ms), max(t.ms))]
        table.add_row(t.engine, t.case, *numbers, str(len(t.ms)), str(t.cached[-1]), ratio)
    return table


def _child(name: str, workload_json: str, argv: list[str]) -> None:
    """One engine, in this process; the result is the last line."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    from hypic.bench import measure

    parser = argparse.ArgumentParser(prog="hypic bench")
    ServerArgs.add_cli_args(parser)
    flags = parser.parse_args(argv)
    flags.enable_multimodal = False  # prompts are token ids of text; a vision tower would only take memory
    server_args: Any = ServerArgs.from_cli_args(flags)
    engine = Engine(server_args=server_args)
    try:
        timings = measure(
            engine, name, msgspec.json.decode(workload_json, type=Workload), lambda s: print(s, flush=True)
        )
    finally:
        engine.shutdown()
    print(_RESULT + msgspec.json.encode(timings).decode(), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], sys.argv[3:])
