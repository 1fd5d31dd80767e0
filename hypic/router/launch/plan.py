"""What ``hypic launch`` starts: command line and environment of each process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypic.config import HypicConfig
from hypic.ports import LOCAL, free_ports
from hypic.router.transport.security import InsecureError, check_address, curve_of

_FRONT_ONLY = ("--host", "--port", "--fastapi-root-path", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs")
"""SGLang's flags that say how the endpoint is reached: workers are reached by their router alone, on this host."""
_WORKER_ONLY = ("--base-gpu-id", "--gpu-id-step", "--nccl-port", "--dist-init-addr", "--nnodes", "--node-rank")
_TP_FLAGS = ("--tp", "--tp-size", "--tensor-parallel-size")


class LaunchError(RuntimeError):
    """The cluster cannot be started; the text says why and what to do."""


class Process(NamedTuple):
    """A process of the cluster: its name in logs and on the control socket."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    http: str
    """Base URL of its server."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    Attributes:
        argv: SGLang's flags, the model among them.
        config: the plugin's settings.
        workers: how many here; more may join from other hosts, if the settings name an address for them.
        tp: GPUs of each.
        cpu: no GPUs.
        policy, costs: of the router.
        least: workers that must be alive at the start; above ``workers`` if others have to join.
    """

    argv: tuple[str, ...]
    config: HypicConfig
    workers: int
    tp: int = 1
    cpu: bool = False
    policy: str = "lpt"
    costs: Path | None = None
    least: int = 0


def processes(layout: Layout, folder: Path, token: str, environ: Mapping[str, str]) -> tuple[Process, list[Process]]:
    """The front, and the workers in order.

    Args:
        folder: for sockets, entered by us alone.
        token: by which workers know their router.

    Raises:
        LaunchError: a flag that cannot go with several workers.
    """
    for flag in ("--nnodes", "--node-rank", "--dist-init-addr"):
        if _value(layout.argv, flag) is not None:
            raise LaunchError(f"{flag}: hypic launch starts workers on one node; leave it out")
    config = layout.config
    control = config.router or f"ipc://{folder}/control"
    elsewhere = control.startswith("tcp://")
    if elsewhere:
        _check_tcp(layout)
    elif not layout.workers:
        raise LaunchError(
            "--workers 0: a front alone needs an address for workers of other hosts: --hypic-router tcp://..."
        )
    shared = {
        **environ,
        **common_env(layout, environ),
        "HYPIC_ROUTER_TOKEN": environ.get("HYPIC_ROUTER_TOKEN") or token,
    }
    front_env = {
        **shared,
        "HYPIC_ROUTER": "",  # it is no worker
        "HYPIC_ROUTER_BIND": control,
        "HYPIC_ROUTER_POLICY": layout.policy,
        "HYPIC_ROUTER_STATUS": str(status_file(folder)),
    }
    if layout.costs is not None:
        front_env["HYPIC_ROUTER_COSTS"] = str(layout.costs.absolute())
    host, port = _value(layout.argv, "--host") or LOCAL, _value(layout.argv, "--port") or "30000"
    front = Process(
        "router",
        (sys.executable, "-m", "hypic.router.front", *without(layout.argv, _WORKER_ONLY)),
        front_env,
        f"http://{LOCAL if host == '0.0.0.0' else host}:{port}",
    )
    argv = without(layout.argv, (*_FRONT_ONLY, "--base-gpu-id"))
    first = int(_value(layout.argv, "--base-gpu-id") or 0)
    out = []
    for i, worker_port in enumerate(free_ports(layout.workers)):
        name = f"w{i}"
        data = f"{control.rpartition(':')[0]}:0" if elsewhere else f"ipc://{folder}/{name}"
        env = {**shared, "HYPIC_ROUTER": control, "HYPIC_WORKER": name, "HYPIC_DATA": data}
        if elsewhere:
            env["HYPIC_ROUTER_KEY"] = config.curve_secret  # which holds the public one, too: front and workers share it
        flags = ["--host", LOCAL, "--port", str(worker_port), "--incremental-streaming-output"]
        if not layout.cpu:
            flags += ["--base-gpu-id", str(first + i * layout.tp)]
        command = (sys.executable, "-m", "hypic", "serve", *argv, *flags)
        out.append(Process(name, command, env, f"http://{LOCAL}:{worker_port}"))
    return front, out


def _check_tcp(layout: Layout) -> None:
    """Workers of other hosts are to join. Raises LaunchError: not like this."""
    config = layout.config
    if layout.tp > 1 and layout.workers:
        raise LaunchError(
            "--hypic-router tcp:// with --tp: workers that other hosts fetch from have one rank each so far"
        )
    try:
        curve = curve_of(config)
        check_address(config.router, curve)
        if curve is not None:
            curve.own_keys()
    except (InsecureError, OSError) as e:
        raise LaunchError(f"--hypic-router {e} (--hypic-curve-secret, --hypic-curve-allowed)") from None


def common_env(layout: Layout, environ: Mapping[str, str]) -> dict[str, str]:
    """The plugin's settings, and CPU mode where that is asked for."""
    if not layout.cpu:
        return layout.config.to_env()
    from hypic.commands.serve import flag_value
    from hypic.platform_cpu.defaults import set_environment

    env = dict(environ)
    threads = str(max((os.cpu_count() or 1) // max(layout.workers, 1), 1))
    env.setdefault("OMP_NUM_THREADS", threads)
    set_environment(env, flag_value(layout.argv, "--dtype"))
    new = {name: value for name, value in env.items() if environ.get(name) != value}
    return {**layout.config.to_env(), "HYPIC_CPU": "1", **new}


def status_file(folder: Path) -> Path:
    """Where the launcher writes for the front what it knows of the workers' processes."""
    return folder / "processes.json"


def _value(argv: Sequence[str], flag: str) -> str | None:
    from hypic.commands.serve import flag_value

    return flag_value(argv, flag)


def split_tp(argv: Sequence[str]) -> tuple[str, list[str]]:
    """How many GPUs `argv` wants for each server, "1" if it does not say, and the rest of it."""
    return next((value for flag in _TP_FLAGS if (value := _value(argv, flag))), "1"), without(argv, _TP_FLAGS)


def without(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """`argv` without these flags and their values."""
    out, words = [], iter(argv)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in flags:
            out.append(word)
        elif not equals:
            next(words, None)
    return out
