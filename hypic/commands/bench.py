"""``hypic bench``: linked prompts beside stock SGLang, measured in one go."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from hypic.bench.result import BenchResult
from hypic.bench.scatter_report import plot as plot_scatter
from hypic.bench.scatter_result import Scatter, ScatterResult
from hypic.bench.suites import KERNELS, MAX_SCALE_TOKENS, SCATTER, SUITES, TOGETHER, Plan
from hypic.bench.workload import Workload
from hypic.commands.flags import server_fields, setting, take_hypic_flags
from hypic.commands.serve import ServeError, timed_argv, wants_cpu
from hypic.config import ConfigError, from_env

SEGMENT_COUNTS = "4,16,64,128"
SEGMENT_LENGTHS = "512,2048,8192,16384"
TABLE_WIDTH = 140


def bench(
    args: Annotated[list[str], typer.Argument(metavar="MODEL [SGLANG FLAGS]", help="A model, then SGLang's flags.")],
    suites: Annotated[str, typer.Option(help=f"Which of {', '.join(SUITES)}, {KERNELS}, {SCATTER}.")] = "ttft",
    segments: Annotated[int, typer.Option(min=1, help="Segments in a prompt.")] = 16,
    segment_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a segment.")] = 2048,
    system: Annotated[int, typer.Option(min=0, help="Tokens in front of the segments.")] = 32,
    query: Annotated[int, typer.Option(min=1, help="Tokens behind the segments.")] = 64,
    reps: Annotated[int, typer.Option(min=1, help="Repetitions of each case, after one to warm up.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the token ids.")] = 0,
    together: Annotated[str, typer.Option(help="concurrency: numbers of requests.")] = ",".join(map(str, TOGETHER)),
    counts: Annotated[str, typer.Option(help="scale: numbers of segments.")] = SEGMENT_COUNTS,
    lengths: Annotated[str, typer.Option(help="scale: tokens of a segment.")] = SEGMENT_LENGTHS,
    workers: Annotated[str, typer.Option(help="scatter: numbers of workers, 1 among them.")] = "1,2",
    scatter_segments: Annotated[
        str | None, typer.Option(help="scatter: numbers of segments, one length of prompt each. Default: --segments.")
    ] = None,
    tp_alternative: Annotated[
        int, typer.Option(min=0, help="scatter: stock SGLang on so many GPUs of one TP group, too; 0 is not.")
    ] = 0,
    stagger: Annotated[
        bool, typer.Option("--stagger", help="scatter: load weights in one worker at a time (host memory).")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(min=1, help="scatter: seconds for all of it; what does not fit is left out and named."),
    ] = None,
    memory: Annotated[str | None, typer.Option("--hypic-memory", help="Arena size, for example 8GiB.")] = None,
    engines: Annotated[str, typer.Option(help="Which engines to time: stock,hypic or one of them.")] = "stock,hypic",
    baseline: Annotated[
        list[str] | None, typer.Option(help="Flags of one more stock engine, such as '--attention-backend flashinfer'.")
    ] = None,
    dummy_horizon: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --load-format dummy: tokens over which all heads of linear layers remember: building T then costs "
            "the most. 0 leaves them as SGLang draws them: all forget at once, and T costs nothing. Default 16384.",
        ),
    ] = None,
    no_selfcheck: Annotated[
        bool, typer.Option("--no-selfcheck", help="Time hypic without proving it right under these flags first.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json, bench.md and bench.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Time prompts made of segments on MODEL, on hypic and on stock SGLang, one engine after the other.

    ttft: cold, prefix hit, warm, next turn; ordinary requests, decoding, throughput. concurrency: warm requests at once. scale:
    warm links over numbers and lengths of segments (up to 262,144 tokens of them, cut to what the context holds beside the
    rest of the prompt), with a fit of what the time is made of.
    kernels: hypic's own kernels alone, and what building artifacts takes of a cold TTFT. scatter: cold prompts of equal and of
    uneven segments on several workers behind a router, LPT and round robin, beside one worker, the simulation, and stock SGLang
    on one GPU and (--tp-alternative N) on N; whether several workers answer as one does.

    Times are TTFT from generate(input_ids) to the first token. First hypic's self-check runs on a tiny model under the
    same flags; if it fails, nothing is timed. `--load-format dummy` measures a shape without its weights, with heads of linear
    layers that remember (`--dummy-horizon`).
    """
    from hypic.bench import dummy
    from hypic.bench.report import markdown, plot, tables
    from hypic.bench.runner import BenchError, run_bench

    console = Console(stderr=True)
    names, wanted = (
        _names("--engines", engines, ("stock", "hypic")),
        _names("--suites", suites, (*SUITES, KERNELS, SCATTER)),
    )
    numbers = {
        "--counts": counts, "--lengths": lengths, "--together": together, "--workers": workers,
        "--scatter-segments": scatter_segments or str(segments),
    }  # fmt: skip
    many, long, at_once, several, scattered = (tuple(_numbers(flag, text)) for flag, text in numbers.items())
    scatter = Scatter(workers=several, counts=scattered, tp=tp_alternative, budget=budget, stagger=stagger)
    try:
        more = {"memory": setting("memory", memory)} if memory else {}
        rest, config = take_hypic_flags(args, msgspec.structs.replace(from_env(), enabled=True, **more))
        argv = timed_argv(rest)
        cpu = wants_cpu(argv, os.environ)
        for more in ("", *(baseline or ())):  # a flag that does not exist is found now, not after the self-check
            server_fields([*argv, *shlex.split(more)])
    except (ConfigError, ServeError) as e:
        raise typer.BadParameter(str(e)) from None
    work = Workload(system, segments, segment_tokens, query, reps, seed)
    grid = [(n, m) for n in many for m in long if n * m <= MAX_SCALE_TOKENS]
    try:
        inherited = dummy.environment(argv, dummy_horizon)
    except ValueError as e:
        raise typer.BadParameter(f"--dummy-horizon: {e}") from None
    plan = Plan(tuple(wanted), work, config.seam_window, tuple(grid), at_once, scatter)
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise typer.BadParameter(f"--out {out}: {e}") from None
    try:
        result = run_bench(
            plan,
            argv,
            config,
            engines=names,
            baselines=baseline or [],
            cpu=cpu,
            selfcheck=not no_selfcheck,
            say=lambda line: console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True),
            keep=lambda part: _write(out, part) if out else None,
            inherited=inherited,
        )
    except BenchError as e:
        console.print(f"hypic bench: {e}", style="red", markup=False)
        raise typer.Exit(1) from None
    if not result.selfcheck and "hypic" in names:
        console.print(
            "hypic bench: the self-check was not run: these figures do not say that the answers are right",
            style="yellow",
        )
    if out and result.scatter is not None:
        write_scatter(out, result.scatter)
    if out:
        (out / "bench.md").write_text("\n".join(markdown(result)) + "\n")
    if out and not plot(result, out / "bench.png"):
        console.print("hypic bench: no bench.png, since matplotlib is not installed", style="yellow")
    if as_json:
        print(_encoded(result))
    else:
        terminal = Console()
        terminal.width = max(terminal.width, TABLE_WIDTH)
        for table in tables(result):
            terminal.print(table)


def _encoded(result: BenchResult) -> str:
    return msgspec.json.format(msgspec.json.encode(result), indent=1).decode()


def _write(out: Path, result: BenchResult) -> None:
    (out / "bench.json").write_text(_encoded(result) + "\n")


def write_scatter(out: Path, result: ScatterResult) -> None:
    """Measured costs, for `hypic simulate` and `hypic launch --costs`, and a plot if matplotlib is there."""
    (out / "costs.json").write_bytes(msgspec.json.format(msgspec.json.encode(result.costs), indent=1) + b"\n")
    with contextlib.suppress(ImportError):
        plot_scatter(result, out / "scatter.png")


def _names(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [n.strip() for n in text.split(",") if n.strip()]
    if not names or (unknown := [n for n in names if n not in known]):
        raise typer.BadParameter(
            f"{flag} {text!r}: known are {', '.join(known)}" + (f"; not {unknown[0]!r}" if names else "")
        )
    return names


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(n) for n in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{flag} {text!r}: whole numbers from 1, separated by commas")
    return numbers
