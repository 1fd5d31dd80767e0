"""Child processes that must not outlive us."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

STOP_SECONDS = 30.0


@contextmanager
def terminable(*signals: signal.Signals) -> Iterator[None]:
    """These signals (none: SIGTERM) leave the block as Ctrl-C does, so that it ends what it started: servers hold GPUs.

    Outside of the main thread, where no signal arrives, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in signals or (signal.SIGTERM,)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(processes: Sequence[subprocess.Popen[Any]], seconds: float = STOP_SECONDS) -> None:
    """SIGTERM, and for what does not end in time, SIGKILL, with all that it started."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                try:
                    one.kill()
                except psutil.NoSuchProcess:
                    continue
            process.wait()


def end_group(leader: subprocess.Popen[Any], seconds: float) -> None:
    """SIGTERM to a process that was started in a session of its own; then SIGKILL to all of its group that are left."""
    try:
        leader.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)
