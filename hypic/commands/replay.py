"""``hypic replay``: traces of requests, made, summed up, and replayed on hypic and on stock SGLang."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hypic.commands.flags import server_fields, setting, take_hypic_flags
from hypic.commands.serve import ServeError, timed_argv, wants_cpu
from hypic.config import ConfigError, HypicConfig, from_env
from hypic.traces.engines import read_engine
from hypic.traces.figures import Slo
from hypic.traces.format import TraceError, TraceRequest, write
from hypic.traces.generate import generate as draw_requests
from hypic.traces.readers import READERS, TraceWarning, read
from hypic.traces.report import summary_table
from hypic.traces.result import Plan, ReplayResult
from hypic.traces.spec import read_spec
from hypic.traces.summary import Capacity, Summary, summarise

TABLE_WIDTH = 150


def replay(
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL] [SGLANG FLAGS]", help="A model, then SGLang's flags.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="The trace to replay or to sum up.")] = None,
    kind: Annotated[str, typer.Option("--format", help=f"Of --trace: auto, {', '.join(READERS)}.")] = "auto",
    generate: Annotated[
        Path | None,
        typer.Option(metavar="SPEC", help="Make the trace from a spec, such as traces/rag-production.toml."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Without MODEL: the file for the trace. Else: a folder for replay.json, replay.png and outcomes."
        ),
    ] = None,
    engines: Annotated[
        str,
        typer.Option(
            help="hypic, prefix (stock SGLang), none (stock without its radix cache); cluster:N (hypic launch) and prefix:N (so "
            "many stock servers, each prompt where its prefix is or, with prefix:N:round_robin, to one after the other)."
        ),
    ] = "hypic,prefix,none",
    stagger: Annotated[
        bool, typer.Option("--stagger", help="cluster:N, prefix:N: load weights in one server at a time (host memory).")
    ] = False,
    url: Annotated[
        str | None, typer.Option(help="Replay on this server (OpenAI API) instead of starting engines.")
    ] = None,
    marks: Annotated[bool, typer.Option("--marks/--no-marks", help="--url: send the positions of segments.")] = True,
    flush: Annotated[
        bool, typer.Option("--flush/--no-flush", help="--url: empty the server's caches before each run.")
    ] = True,
    vocab: Annotated[int, typer.Option(min=2, help="--url: drawn token ids are below this.")] = 32000,
    served_model: Annotated[str, typer.Option(help="--url: the model's name there.")] = "default",
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests at the head of the trace that fill the caches, not timed.")
    ] = 100,
    warmup_at_once: Annotated[int, typer.Option(min=1, help="How many of those at a time.")] = 4,
    requests: Annotated[
        int, typer.Option(min=1, help="Requests behind those that are timed, at most, in each run.")
    ] = 200,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="A run stops sending after so many.")] = None,
    qps: Annotated[float | None, typer.Option(min=0.001, help="Stretch the times to this mean rate.")] = None,
    speedup: Annotated[float, typer.Option(min=0.001, help="Or divide the times by this.")] = 1.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request, from when it is due.")] = 60.0,
    slo_ttft: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds to the first token that a request may take.")
    ] = None,
    slo_tpot: Annotated[float | None, typer.Option(min=0.0001, help="Seconds for each token after it.")] = None,
    slo_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the requests that must keep that.")
    ] = 0.95,
    find_qps: Annotated[
        bool, typer.Option("--find-qps", help="Find the highest rate that keeps --slo-ttft, by bisection.")
    ] = False,
    start_qps: Annotated[float, typer.Option(min=0.001, help="The first rate to try.")] = 1.0,
    tolerance: Annotated[float, typer.Option(min=0.01, help="End when kept and lost rate are this close.")] = 0.1,
    probes: Annotated[int, typer.Option(min=1, help="Rates to try at most, on each engine.")] = 12,
    sweep_cached: Annotated[
        str | None,
        typer.Option(
            help="Time one request at a time with these percentages of it cached; beside --qps or --find-qps."
        ),
    ] = None,
    sweep_requests: Annotated[int, typer.Option(min=1, help="How many for each percentage.")] = 10,
    max_lag: Annotated[
        float, typer.Option(min=0.001, help="A run is invalid if the client's own p99 lag is above this.")
    ] = 0.05,
    budget: Annotated[
        float | None, typer.Option(min=1, help="Seconds in which all must end, starts of engines included.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what --out has from the same trace and options.")
    ] = False,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Summary: what a cache of segments holds, in tokens or, such as 24GiB, in bytes."
        ),
    ] = None,
    segment_bytes: Annotated[
        str, typer.Option(help="Summary, --capacity in bytes: fixed part of an artifact (see hypic doctor).")
    ] = "0",
    token_bytes: Annotated[str, typer.Option(help="And what each token adds.")] = "1",
    seed: Annotated[int, typer.Option(help="Of token ids.")] = 0,
    memory: Annotated[str | None, typer.Option("--hypic-memory", help="Arena size, for example 8GiB.")] = None,
    no_selfcheck: Annotated[
        bool, typer.Option("--no-selfcheck", help="Time hypic without proving it right first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Replay a trace on MODEL in an open loop, on hypic and on stock SGLang; or, without MODEL, make it or sum it up.

    hypic replay --generate SPEC --out trace.jsonl; hypic replay --trace trace.jsonl; hypic replay MODEL --trace trace.jsonl.

    Times count from when a request was due. Every run begins with flushed caches and the same warm-up. See traces/README.md
    for the format and docs/BENCHMARKS.md for what the figures mean.
    """
    began, console = time.time(), Console(stderr=True)
    if (trace is None) == (generate is None):
        raise typer.BadParameter("give --trace FILE or --generate SPEC")
    if kind != "auto" and kind not in READERS:
        raise typer.BadParameter(f"--format {kind!r}: known are auto, {', '.join(READERS)}")
    space = _capacity(capacity, segment_bytes, token_bytes)
    name = str(trace or generate)
    try:
        config = msgspec.structs.replace(
            from_env(), enabled=True, **({"memory": setting("memory", memory)} if memory else {})
        )
        source = _source(trace, generate, kind, console)
        if not args and url is None:
            _without_model(source, out if generate else None, name, warmup if trace else 0, space, config, as_json)
            return
        plan = Plan(
            warmup=warmup, warmup_at_once=warmup_at_once, requests=requests, seconds=seconds, qps=qps, speedup=speedup,
            timeout=timeout, max_lag=max_lag, slo=Slo(slo_ttft, slo_tpot, slo_share), find=find_qps, start_qps=start_qps,
            tolerance=tolerance, probes=probes, sweep=_shares(sweep_cached), sweep_requests=sweep_requests, seed=seed,
        )  # fmt: skip
        if find_qps and slo_ttft is None:
            raise typer.BadParameter("--find-qps needs --slo-ttft")
        wanted = _engines(engines)
        argv, cpu = _model(args or [], url)
        rest, config = take_hypic_flags(argv, config)
        server_fields(rest)
        used = list(islice(source, warmup + requests))
    except (ConfigError, ServeError, TraceError) as e:
        raise typer.BadParameter(str(e)) from None
    _replay(
        plan, used, name, space, config, rest, cpu, wanted, url, console, began + budget if budget else None, out, resume,
        {"hypic": marks, "flush": flush, "vocab": vocab, "model": served_model}, not no_selfcheck, stagger, as_json,
    )  # fmt: skip


def _replay(
    plan: Plan,
    used: Sequence[TraceRequest],
    name: str,
    space: Capacity | None,
    config: HypicConfig,
    argv: list[str],
    cpu: bool,
    engines: Sequence[str],
    url: str | None,
    console: Console,
    deadline: float | None,
    out: Path | None,
    resume: bool,
    server: dict[str, Any],
    selfcheck: bool,
    stagger: bool,
    as_json: bool,
) -> None:
    from hypic.bench.runner import BenchError
    from hypic.traces.report import plot, tables
    from hypic.traces.runner import ReplayError, new_result, replay, replay_url

    bar = Progress(
        TextColumn("{task.fields[engine]}"), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task("starting", engine="", total=None)

    def keep(part: ReplayResult) -> None:
        if out:
            (out / "replay.json").write_text(encoded(part) + "\n")

    reports: dict[str, Any] = {
        "deadline": deadline,
        "out": out,
        "say": lambda line: console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True),
        "tick": lambda e, p: bar.update(task, description=p.what, completed=p.done, total=p.total, engine=e),
        "keep": keep,
    }
    try:
        if out:
            out.mkdir(parents=True, exist_ok=True)
        result = new_result(used, plan, name, space, config.min_segment)
        if resume:
            _resume(result, out)
        with bar:
            if url is not None:
                replay_url(result, used, url, key=os.environ.get("OPENAI_API_KEY"), **server, **reports)
            else:
                how: dict[str, Any] = {"cpu": cpu, "selfcheck": selfcheck, "stagger": stagger}
                replay(result, used, argv, config, engines=engines, **how, **reports)
    except (BenchError, ReplayError, RuntimeError, OSError) as e:
        console.print(f"hypic replay: {e}", style="red", markup=False)
        raise typer.Exit(1) from None
    if out and not plot(result, out / "replay.png"):
        console.print("hypic replay: no replay.png, since matplotlib is not installed", style="yellow")
    if as_json:
        print(encoded(result))
    else:
        terminal = Console()
        terminal.width = max(terminal.width, TABLE_WIDTH)
        for table in tables(result):
            terminal.print(table)
    late = [f"{e.name}, run {i}" for e in result.engines for i, r in enumerate(e.runs) if not r.figures.kept_up]
    if late:
        console.print(
            f"hypic replay: the client could not keep up in {'; '.join(late)}: those say nothing about the engine. Give the "
            "client a core of its own, lower the rate, or raise --max-lag if the lag does not matter to you",
            style="red",
            markup=False,
        )
        raise typer.Exit(1)


def encoded(result: ReplayResult | Summary) -> str:
    return msgspec.json.format(msgspec.json.encode(result, enc_hook=str), indent=1).decode()


def _source(trace: Path | None, spec: Path | None, kind: str, console: Console) -> Iterator[TraceRequest]:
    """The requests; warnings of readers go to the console."""

    def show(message: Warning | str, *_: Any) -> None:
        console.print(f"hypic replay: {message}", style="yellow", markup=False)

    with warnings.catch_warnings():
        warnings.simplefilter("always", TraceWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield from draw_requests(read_spec(spec)) if spec else read(trace or Path(), kind)


def _without_model(
    source: Iterator[TraceRequest],
    file: Path | None,
    name: str,
    warmup: int,
    space: Capacity | None,
    config: HypicConfig,
    as_json: bool,
) -> None:
    """Write the trace if there is a file for it, then sum it up."""
    if file:
        try:
            write(source, file)
        except OSError as e:
            raise typer.BadParameter(f"--out {file}: {e}") from None
        source = read(file, "hypic")
    try:
        found = summarise(source, warmup=warmup, capacity=space, min_segment=config.min_segment)
    except TraceError:  # names its file
        raise
    except ValueError as e:
        raise typer.BadParameter(f"{name}: {e}") from None
    if as_json:
        print(encoded(found))
    else:
        Console().print(summary_table(found, name))


def _resume(result: ReplayResult, out: Path | None) -> None:
    from hypic.traces.runner import ReplayError

    file = (out or Path()) / "replay.json"
    if out is None or not file.is_file():
        return
    before = msgspec.json.decode(file.read_bytes(), type=ReplayResult)
    if before.digest != result.digest:
        raise ReplayError(f"--resume: {file} has another trace or other options; give another --out")
    result.engines, result.selfcheck = before.engines, before.selfcheck


def _model(args: list[str], url: str | None) -> tuple[list[str], bool]:
    """SGLang's flags, and whether this is a CPU. Raises ServeError."""
    if url is not None:
        if args:
            raise typer.BadParameter("give MODEL or --url, not both")
        return [], False
    argv = timed_argv(args)
    return argv, wants_cpu(argv, os.environ)


def _engines(text: str) -> list[str]:
    names = [n.strip() for n in text.split(",")]
    try:
        for name in names:
            read_engine(name)
    except ValueError as e:
        raise typer.BadParameter(f"--engines {text!r}: {e}") from None
    return names


def _shares(text: str | None) -> tuple[float, ...]:
    try:
        shares = tuple(float(p) / 100 for p in text.split(",")) if text else ()
    except ValueError:
        shares = (-1.0,)
    if any(not 0 <= s <= 1 for s in shares):
        raise typer.BadParameter(f"--sweep-cached {text!r}: percentages from 0 to 100, separated by commas")
    return shares


def _capacity(total: str | None, per_segment: str, per_token: str) -> Capacity | None:
    if total is None:
        return None
    try:
        sizes = [float(t) if t.isdigit() else float(setting("memory", t)) for t in (total, per_segment, per_token)]
    except ConfigError as e:
        raise typer.BadParameter(f"--capacity, --segment-bytes, --token-bytes: {e}") from None
    return Capacity(*sizes)
