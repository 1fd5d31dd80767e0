"""A server in a child process: started, waited for, and stopped with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypic.demo import DemoError
from hypic.demo.client import Client
from hypic.processes import end_group, terminable

START_SECONDS = 300.0
"""Ready within 30 s on two idle cores; a busy machine may take several times as long."""
STOP_SECONDS = 15.0

_LOG_LINES = 25


class ServerError(DemoError):
    """The server did not start or has died; the text ends with the last lines of its log."""


class Server:
    """A child process that will serve HTTP at :attr:`client`'s address.

    Args:
        command: what to run.
        port: where it will listen on 127.0.0.1.
        log: file that gets its output.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.client = Client(f"http://127.0.0.1:{port}")
        self._log = log
        with log.open("w") as out:
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we end the whole group.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment(), start_new_session=True
            )

    def wait_until_ready(self, waited: Callable[[float], None] = lambda _: None) -> None:
        """Return once it answers; ``waited`` hears from time to time for how many seconds this has taken.

        Raises:
            ServerError: it ended, or took longer than START_SECONDS.
        """
        began = time.monotonic()
        while not self.client.answers():
            seconds = time.monotonic() - began
            self.require_alive()
            if seconds > START_SECONDS:
                raise ServerError(f"the server is not ready after {seconds:.0f} s. {self._tail()}")
            waited(seconds)
            time.sleep(0.2)

    def require_alive(self) -> None:
        """Raises ServerError if the process has ended."""
        if (code := self._process.poll()) is not None:
            raise ServerError(f"the server ended with exit code {code}. {self._tail()}")

    def stop(self) -> None:
        """End the process and all that it started: asked first, then killed."""
        end_group(self._process, STOP_SECONDS)

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return f"Its log, {self._log}, ends with:\n" + "\n".join(f"  {line}" for line in lines)


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[Server]:
    """A :class:`Server`, not necessarily ready, that is stopped at the end of the block, also by SIGTERM or Ctrl-C."""
    with terminable(signal.SIGTERM, signal.SIGHUP):
        server = Server(command, port, log)
        try:
            yield server
        finally:
            server.stop()


def serve_command(model: str, port: int, flags: Sequence[str] = ()) -> list[str]:
    """``hypic serve`` on the CPU, so that what it prints means the same on every machine."""
    own = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    own += ["--enable-cache-report", "--skip-server-warmup"]
    return [sys.executable, "-m", "hypic", "serve", model, *own, *flags]


def _environment() -> dict[str, str]:
    """This process's environment without settings of hypic, which would change what the demo shows."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HYPIC_")}
