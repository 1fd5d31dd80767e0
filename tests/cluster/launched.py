"""A real `hypic launch` with its workers, and how tests talk to it: sockets and signals only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from hypic.ports import free_ports
from tests.server.serving import PATIENCE, PLUGIN, START_PATIENCE, Server

WORKERS = 3


class Worker(Server):
    """A server whose processes are not ours."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=2 * PATIENCE)


class Cluster(Worker):
    """The endpoint, and what is behind it."""

    def __init__(self, url: str, folder: Path, log: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(url)
        self.folder, self.log, self.process = folder, log, process

    @property
    def control(self) -> str:
        """Address of the router's control socket."""
        (folder,) = self.folder.iterdir()
        return f"ipc://{folder}/control"

    def snapshot(self) -> dict[str, Any]:
        return dict(self.http.get("/workers").json())

    def workers(self) -> dict[str, dict[str, Any]]:
        return {w["name"]: w for w in self.snapshot()["workers"]}

    def worker(self, name: str) -> Worker:
        """Its own server, to be asked directly."""
        return Worker(self.workers()[name]["http"])

    def last_request(self) -> dict[str, Any]:
        return dict(self.snapshot()["requests"][-1])

    def wait(self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
        """Until it holds. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        while not (value := holds()):
            assert time.monotonic() < deadline, f"never {what}"
            time.sleep(0.02)
        return value

    def all_alive(self) -> bool:
        try:
            return bool(self.http.get("/health").json() == {"workers": WORKERS})
        except httpx.HTTPError:  # the front is started again at present
            return False

    def alive(self) -> list[str]:
        return [name for name, w in self.workers().items() if w["state"] == "alive"]

    def kill_router(self) -> None:
        """kill -9 of the front alone."""
        os.kill(pid := self.snapshot()["router"]["pid"], signal.SIGKILL)
        self.wait(lambda: not psutil.pid_exists(pid), "gone")

    def signal(self, name: str, number: int) -> int:
        """Signal all processes of a worker. Returns the id of the first."""
        pid = int(self.workers()[name]["pid"])
        os.killpg(pid, number)
        return pid

    def audit(self) -> None:
        """Exact accounting of every worker, once all are idle. Raises AssertionError."""

        def verdicts() -> dict[str, str]:
            states = self.http.get("/server_info").json()["internal_states"]
            return {s["worker"]: s["hypic_audit"] for s in states}

        deadline = time.monotonic() + PATIENCE
        while set((found := verdicts()).values()) != {"ok"}:
            bad = [v for v in found.values() if v != "ok" and not v.startswith("NotIdle")]
            assert not bad and time.monotonic() < deadline, found
            time.sleep(0.1)
        assert len(found) == WORKERS, found
        flights = self.wait(lambda: not any(w["compiling"] or w["running"] for w in self.workers().values()), "idle")
        assert flights

    def router_metric(self, name: str, **labels: str) -> float:
        return self.metrics().read(f"hypic:router_{name}", **labels)


@contextmanager
def launched(model: Path, folder: Path, *flags: str) -> Iterator[Cluster]:
    """`hypic launch MODEL FLAGS` until the block ends, all workers alive at its start.

    Args:
        folder: an empty one with a short path, for its sockets and its log.
    """
    (port,) = free_ports(1)
    sockets = folder / "run"
    sockets.mkdir(mode=0o700)
    log = folder / "log"
    command = [
        sys.executable,
        "-m",
        "hypic",
        "launch",
        str(model),
        "--workers",
        str(WORKERS),
        "--port",
        str(port),
        *flags,
    ]
    paths = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XDG_RUNTIME_DIR": str(sockets)}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
    cluster = Cluster(f"http://127.0.0.1:{port}", sockets, log, process)
    try:
        deadline = time.monotonic() + START_PATIENCE
        while not cluster.all_alive():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield cluster
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 0
        assert not list(sockets.iterdir()), "the folder of the sockets is gone with the cluster"
