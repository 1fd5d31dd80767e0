"""A cluster for as long as a block lasts: ``hypic launch`` in a process of its own, as benchmarks and checks use it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypic.ports import LOCAL, free_ports
from hypic.processes import end, terminable
from hypic.router.launch.plan import LaunchError
from hypic.router.launch.supervisor import get_json


@contextmanager
def running(
    argv: Sequence[str],
    workers: int,
    policy: str = "lpt",
    stagger: bool = False,
    start_seconds: float = 1800.0,
    log: Path | None = None,
) -> Iterator[str]:
    """The base URL of a cluster whose workers are all alive.

    Args:
        argv: SGLang's and hypic's flags, the model among them, without --host and --port.
        stagger: start a worker once the one before it is alive.
        log: where its log stays; without, it is deleted if all went well.

    Raises:
        LaunchError: it did not come up; the text has the end of its log.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "hypic", "launch", *argv, "--workers", str(workers), "--policy", policy]
    command += ["--stagger"] if stagger else []
    file = log or Path(tempfile.mkdtemp(prefix="hypic-launch-")) / "log"
    with terminable(), file.open("w") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out, env=os.environ)
        url, deadline = f"http://{LOCAL}:{port}", time.monotonic() + start_seconds
        try:
            while get_json(f"{url}/health") != {"workers": workers}:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise LaunchError(f"{workers} workers did not come up; {file} ends with\n{log_end(file)}")
                time.sleep(0.2)
            yield url
        finally:
            end([process])
    if log is None:
        shutil.rmtree(file.parent)


def log_end(path: Path, size: int = 3000) -> str:
    return path.read_text(errors="replace")[-size:]
