"""Stock SGLang servers on this machine for as long as a block lasts: what a cluster is compared with."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypic.commands.serve import flag_value
from hypic.ports import LOCAL, free_ports
from hypic.processes import end, terminable
from hypic.router.launch.plan import LaunchError, split_tp, without
from hypic.router.launch.running import log_end

_KV_HEADS = "num_key_value_heads"
_HEADS = (
    "num_attention_heads", _KV_HEADS, "linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads", "mamba_n_heads",
)  # fmt: skip
"""Fields of a config that TP divides."""


@contextmanager
def stock_servers(
    argv: Sequence[str],
    servers: int = 1,
    *,
    cpu: bool,
    tp: int | None = None,
    stagger: bool = False,
    start_seconds: float = 1800.0,
) -> Iterator[list[str]]:
    """Base URLs of independent servers with the plugin off, all of them ready.

    Server i has the GPUs that worker i of a cluster has.

    Args:
        argv: SGLang's flags, the model among them, without --host and --port.
        tp: GPUs of each, whatever `argv` says.
        stagger: start one once the one before it is ready.

    Raises:
        LaunchError: one did not come up, and the text has the end of its log; or it could not.
    """
    given, rest = split_tp(argv)
    tp = int(given) if tp is None else tp
    if (why := uncut(Path(flag_value(argv, "--model-path") or ""), tp)) is not None:
        raise LaunchError(f"TP cannot cut this model into {tp} ranks: {why}")
    first = int(flag_value(argv, "--base-gpu-id") or 0)
    rest = without(rest, ("--base-gpu-id",))
    env = os.environ | {"HYPIC_ENABLED": "0"}
    if cpu:
        env.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // (servers * tp), 1)))
    deadline = time.monotonic() + start_seconds
    folder, ports = Path(tempfile.mkdtemp(prefix="hypic-stock-")), free_ports(servers)
    urls, logs = [f"http://{LOCAL}:{port}" for port in ports], [folder / f"{i}.log" for i in range(servers)]
    with terminable(), contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: end(processes))
        for i, port in enumerate(ports):
            command = [
                sys.executable,
                "-m",
                "hypic",
                "serve",
                *rest,
                "--hypic-off",
                "--host",
                LOCAL,
                "--port",
                str(port),
            ]
            command += ["--tp-size", str(tp)] if tp > 1 else []
            command += [] if cpu else ["--base-gpu-id", str(first + i * tp)]
            out = stack.enter_context(logs[i].open("w"))
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=env))
            if stagger:
                _until_ready(urls[i], processes[i], logs[i], deadline)
        for url, process, log in zip(urls, processes, logs, strict=True):
            _until_ready(url, process, log, deadline)
        yield urls
    shutil.rmtree(folder)


def uncut(model: Path, ranks: int) -> str | None:
    """Why TP cannot share the model's heads out evenly, by its config; None if it can, or there is no config here.

    The rules are SGLang's: KV heads may be fewer than ranks, and are copied then.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    text = config.get("text_config") or config
    for name in _HEADS:
        heads = text.get(name)
        if isinstance(heads, int) and heads % ranks and (name != _KV_HEADS or ranks % heads):
            return f"{name} is {heads}"
    return None


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path, deadline: float) -> None:
    while not _answers(f"{url}/health"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise LaunchError(f"stock SGLang did not come up; {log} ends with\n{log_end(log)}")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
