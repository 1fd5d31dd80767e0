"""``hypic launch``: one endpoint over several workers on this machine."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from hypic.commands.flags import take_hypic_flags
from hypic.commands.serve import ServeError, flag_value, require_port, sglang_argv, wants_cpu
from hypic.config import ConfigError, from_env
from hypic.router.costs import CostsError, read_costs
from hypic.router.launch.nursery import Nursery
from hypic.router.launch.plan import LaunchError, Layout, common_env, processes, split_tp
from hypic.router.launch.supervisor import Supervisor
from hypic.router.transport.security import make_folder


def launch(
    args: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL [FLAGS]", help="A model, then flags of `hypic serve`: --hypic-* and SGLang's."),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers", min=0, max=64, help="Workers: one for each GPU, or TP group. 0: all are on other hosts."
        ),
    ] = 2,
    policy: Annotated[str, typer.Option("--policy", help="Who compiles what: lpt or round_robin.")] = "lpt",
    costs: Annotated[
        Path | None, typer.Option("--costs", help="Measured costs to begin with (see benchmarks/costs).")
    ] = None,
    min_workers: Annotated[
        int, typer.Option("--min-workers", min=0, help="Workers that must be alive at the start; 0 is all of them.")
    ] = 0,
    stagger: Annotated[
        bool, typer.Option("--stagger", help="Load weights in one worker at a time (host memory).")
    ] = False,
) -> None:
    """Serve MODEL with several workers behind one OpenAI-compatible endpoint.

    The segments of a long cold prompt are compiled side by side; a prompt that would gain nothing stays on one worker.
    --host and --port say where the endpoint is, --tp how many GPUs each worker has. GET /workers, `hypic top` and
    GET /metrics show what goes on. A worker that dies is started again. --hypic-router tcp://HOST:PORT with CURVE keys has
    workers of other hosts join (docs/ROUTER.md).
    """
    try:
        layout = read_layout(args or [], workers, policy, costs, min_workers)
        require_port(layout.argv)
        status = asyncio.run(_run(layout, stagger))
    except (ConfigError, CostsError, LaunchError, ServeError) as error:
        typer.secho(f"hypic launch: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def read_layout(
    args: list[str], workers: int, policy: str = "lpt", costs: Path | None = None, min_workers: int = 0
) -> Layout:
    """What the command line asks for. Raises ConfigError, CostsError, LaunchError or ServeError."""
    if policy not in ("lpt", "round_robin"):
        raise LaunchError(f"--policy {policy}: write lpt or round_robin")
    if costs is not None:
        read_costs(costs)
    argv, config = take_hypic_flags(sglang_argv(args), from_env(os.environ))
    config = msgspec.structs.replace(config, enabled=True)
    model = flag_value(argv, "--model-path") or flag_value(argv, "--model")
    if model is None:
        raise LaunchError("name a model: hypic launch MODEL --workers N")
    if model.startswith(("/", ".")) and not (Path(model) / "config.json").is_file():
        raise LaunchError(f"MODEL {model}: there is no config.json")
    tp, _ = split_tp(argv)
    if not tp.isdigit() or int(tp) < 1:
        raise LaunchError(f"--tp {tp}: a number of GPUs")
    if min_workers > workers and not config.router.startswith("tcp://"):
        raise LaunchError(f"--min-workers {min_workers}: there are {workers} (--workers), and none can join; lower it")
    return Layout(
        argv=tuple(argv),
        config=config,
        workers=workers,
        tp=int(tp),
        cpu=wants_cpu(argv, os.environ),
        policy=policy,
        costs=costs,
        least=min_workers or workers,
    )


async def _run(layout: Layout, stagger: bool) -> int:
    """Until a signal comes. Raises LaunchError."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    folder = make_folder()
    supervisor = nursery = None
    try:
        front, children = processes(layout, folder, secrets.token_urlsafe(32), os.environ)
        nursery = Nursery(common_env(layout, os.environ)) if layout.cpu else None
        local = not layout.config.router.startswith("tcp://")
        supervisor = Supervisor(
            front,
            children,
            folder,
            stagger,
            nursery=nursery,
            local=local,
            api_key=flag_value(layout.argv, "--api-key") or "",
        )
        serving = asyncio.create_task(_serve(supervisor, layout.least))
        stop = asyncio.create_task(stopped.wait())
        await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        serving.cancel()
        return 0
    finally:
        if nursery is not None:
            nursery.close()
        if supervisor is not None:
            await supervisor.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _serve(supervisor: Supervisor, least: int) -> None:
    await supervisor.start(least)
    print(
        f"hypic launch: {supervisor.front.process.http} is ready, {least} workers or more are alive",
        file=sys.stderr,
        flush=True,
    )
    await supervisor.run()
