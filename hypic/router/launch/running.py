"""A cluster for as long as a block lasts: ``hypic launch`` in a process of its own, as benchmarks and checks use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypic.router.launch.plan import LOCAL, LaunchError, free_ports
from hypic.router.launch.supervisor import get_json

STOP_SECONDS = 30.0


@contextmanager
def running(
    argv: Sequence[str], workers: int, policy: str = "lpt", options: Sequence[str] = (), start_seconds: float = 1800.0
) -> Iterator[str]:
    """The base URL of a cluster whose workers are all alive.

    Args:
        argv: SGLang's and hypic's flags, the model among them, without --host and --port.
        options: more of `hypic launch`'s own.

    Raises:
        LaunchError: it did not come up; the text has the end of its log.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "hypic", "launch", *argv, "--workers", str(workers), "--policy", policy, *options]
    with tempfile.NamedTemporaryFile("w+", prefix="hypic-launch-", suffix=".log", delete=False) as log:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log, env=os.environ)
        url, deadline = f"http://{LOCAL}:{port}", time.monotonic() + start_seconds
        try:
            while get_json(f"{url}/health") != {"workers": workers}:
                if process.poll() is not None or time.monotonic() > deadline:
                    end = Path(log.name).read_text(errors="replace")[-3000:]
                    raise LaunchError(f"{workers} workers did not come up; {log.name} ends with\n{end}")
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    os.unlink(log.name)
