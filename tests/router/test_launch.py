"""What `hypic launch` starts, and how it looks after it. The processes are real, what they run is small."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import msgspec
import psutil
import pytest

from hypic.commands.launch import read_layout
from hypic.config import from_env
from hypic.ports import free_ports
from hypic.router.launch.plan import LaunchError, Layout, Process, processes
from hypic.router.launch.supervisor import Supervisor
from hypic.router.transport.security import Curve, curve_of, make_keys, public_key

CONFIG = from_env({"HYPIC_ENABLED": "1", "HYPIC_SEAM_WINDOW": "12"})
FRONT = """
import http.server, json, os, sys
open(sys.argv[1] + "/control", "w").close()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.headers["authorization"] != "Bearer k":
            return self.send_error(401)
        names = json.load(open(sys.argv[1] + "/processes.json"))
        self.send_response(200), self.end_headers()
        alive = [{"name": n, "state": "alive" if p["pid"] and n != "BAD" else "absent"} for n, p in names.items()]
        self.wfile.write(json.dumps({"workers": alive}).encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""
SLEEP = "import time; print('I am here', flush=True); time.sleep(600)"


def test_each_worker_has_its_gpus_ports_and_sockets(tmp_path: Path) -> None:
    argv = ("--model-path", "m", "--tp=2", "--host", "0.0.0.0", "--port=81", "--base-gpu-id", "1", "--api-key", "k")
    costs = tmp_path / "c.toml"
    layout = Layout(argv=argv, config=CONFIG, workers=3, tp=2, policy="round_robin", costs=costs)
    front, workers = processes(layout, tmp_path, "sesame", {"PATH": "/bin"})
    assert front.http == "http://127.0.0.1:81"
    assert front.command[3:] == ("--model-path", "m", "--tp=2", "--host", "0.0.0.0", "--port=81", "--api-key", "k")
    assert front.env["HYPIC_ROUTER_POLICY"] == "round_robin" and front.env["HYPIC_ROUTER_COSTS"] == str(costs)
    assert [w.name for w in workers] == ["w0", "w1", "w2"] and len({w.http for w in workers}) == 3
    for i, w in enumerate(workers):
        flags = w.command[4:]
        assert flags[:5] == ("--model-path", "m", "--tp=2", "--api-key", "k")
        assert flags[flags.index("--base-gpu-id") + 1] == str(1 + 2 * i)
        assert (
            w.http == f"http://127.0.0.1:{flags[flags.index('--port') + 1]}"
            and "--incremental-streaming-output" in flags
        )
        assert (w.env["HYPIC_WORKER"], w.env["HYPIC_DATA"]) == (w.name, f"ipc://{tmp_path}/{w.name}")
        assert w.env["HYPIC_ROUTER"] == front.env["HYPIC_ROUTER_BIND"] == f"ipc://{tmp_path}/control"
        assert from_env(w.env).router and not from_env(front.env).router, "the front is no worker"
        for env in (w.env, front.env):
            assert env["HYPIC_ROUTER_TOKEN"] == "sesame"
            assert env["HYPIC_SEAM_WINDOW"] == "12" and env["PATH"] == "/bin"


def test_workers_of_other_hosts_may_join_over_tcp_with_keys_alone(tmp_path: Path) -> None:
    public, secret = make_keys(tmp_path, "router")
    given = {
        "HYPIC_ROUTER": "tcp://10.1.2.3:5570",
        "HYPIC_CURVE_SECRET": str(secret),
        "HYPIC_CURVE_ALLOWED": str(tmp_path),
    }
    layout = Layout(argv=("--model-path", "m"), config=from_env(given), workers=1)
    front, (worker,) = processes(layout, tmp_path, "drawn", {"HYPIC_ROUTER_TOKEN": "shared by the hosts"})
    assert front.env["HYPIC_ROUTER_BIND"] == worker.env["HYPIC_ROUTER"] == "tcp://10.1.2.3:5570"
    assert worker.env["HYPIC_DATA"] == "tcp://10.1.2.3:0" and not front.env["HYPIC_ROUTER"]
    for env in (front.env, worker.env):
        assert curve_of(from_env(env)) == Curve(secret, tmp_path)
        assert env["HYPIC_ROUTER_TOKEN"] == "shared by the hosts"
    assert public_key(Path(worker.env["HYPIC_ROUTER_KEY"])) == public_key(public)
    alone = msgspec.structs.replace(layout, workers=0)
    assert processes(alone, tmp_path, "t", {})[1] == []
    for wrong, says in (
        ({"HYPIC_CURVE_SECRET": "", "HYPIC_CURVE_ALLOWED": ""}, "TCP only with CURVE"),
        ({"HYPIC_CURVE_ALLOWED": ""}, "both"),
        ({"HYPIC_CURVE_SECRET": str(public)}, "no secret key|read by others"),
        ({"HYPIC_CURVE_SECRET": str(tmp_path / "none")}, "No such file"),
        ({"HYPIC_ROUTER": "tcp://0.0.0.0:5570"}, "not all of them"),
    ):
        with pytest.raises(LaunchError, match=says):
            processes(msgspec.structs.replace(layout, config=from_env(given | wrong)), tmp_path, "t", {})
    with pytest.raises(LaunchError, match="--workers 0"):
        processes(msgspec.structs.replace(alone, config=CONFIG), tmp_path, "t", {})
    with pytest.raises(LaunchError, match="--tp"):
        processes(msgspec.structs.replace(layout, tp=2), tmp_path, "t", {})


def test_workers_share_the_cores_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    layout = Layout(argv=("--model-path", "m"), config=CONFIG, workers=4, cpu=True)
    _, workers = processes(layout, tmp_path, "t", {})
    assert all(w.env["OMP_NUM_THREADS"] == "2" and "--base-gpu-id" not in w.command for w in workers)
    _, workers = processes(layout, tmp_path, "t", {"OMP_NUM_THREADS": "7"})
    assert workers[0].env["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ([], "name a model"),
        (["/nowhere"], "no config.json"),
        (["m", "--tp", "none"], "--tp none"),
        (["m", "--nnodes", "2"], "--nnodes"),
    ],
)
def test_what_cannot_be_started(args: list[str], word: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=word):
        processes(read_layout(args, 2), tmp_path, "t", {})
    with pytest.raises(LaunchError, match="--policy"):
        read_layout(["m"], 2, policy="random")


def test_no_more_workers_are_waited_for_than_can_come() -> None:
    assert [read_layout(["m"], 3, min_workers=n).least for n in (0, 2, 3)] == [3, 2, 3]
    with pytest.raises(LaunchError, match="--min-workers 4: there are 3"):
        read_layout(["m"], 3, min_workers=4)
    assert read_layout(["m", "--hypic-router", "tcp://10.1.2.3:5570"], 1, min_workers=4).least == 4, "others join"


def supervisor(
    folder: Path, programs: Iterable[str], front: str = FRONT, out: TextIO | None = None, local: bool = True
) -> Supervisor:
    (port,) = free_ports(1)
    env = dict(os.environ)
    first = Process("router", (sys.executable, "-c", front, str(folder), str(port)), env, f"http://127.0.0.1:{port}")
    workers = [Process(f"w{i}", (sys.executable, "-c", p, str(folder)), env, "") for i, p in enumerate(programs)]
    return Supervisor(first, workers, folder, out=out, local=local, api_key="k")


def test_logs_restarts_and_the_end(folder: Path) -> None:
    """Lines carry names; a worker that is killed comes back and is counted; in the end no process is left, nor what they
    started."""
    nested = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"

    async def main() -> tuple[str, list[int]]:
        out = io.StringIO()
        s = supervisor(folder, [SLEEP, nested], out=out)
        try:
            async with asyncio.timeout(60):
                await s.start(least=2)
                pids = [c.pid for c in (s.front, *s.workers)]
                while "w0     | I am here" not in out.getvalue():
                    await asyncio.sleep(0.05)
                os.kill(s.workers[0].pid, signal.SIGKILL)
                while s.workers[0].pid == pids[1] or out.getvalue().count("I am here") < 4:
                    await asyncio.sleep(0.05)
                pids += [s.workers[0].pid, *(p.pid for p in psutil.Process(s.workers[1].pid).children())]
                assert len(pids) == 5 and s.workers[0].restarts == 1
                s._write_status()
                status = json.loads((folder / "processes.json").read_text())
                assert status["w0"] == {"pid": s.workers[0].pid, "restarts": 1} and status["w1"]["restarts"] == 0
        finally:
            await s.stop()
        return out.getvalue(), pids

    log, pids = asyncio.run(main())
    assert log.count("w1     | I am here") == 2
    deadline = time.monotonic() + 30
    while alive := [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def test_a_front_for_workers_of_other_hosts_alone(folder: Path) -> None:
    """There is no socket in the folder to wait for."""

    async def main() -> None:
        s = supervisor(
            folder, [], FRONT.replace('open(sys.argv[1] + "/control", "w").close()', ""), io.StringIO(), local=False
        )
        try:
            async with asyncio.timeout(60):
                await s.start(least=0)
        finally:
            await s.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("who", "elsewhere"), [("router", True), ("router", False), ("w1", True)])
def test_what_never_comes_up_ends_the_launch_with_what_it_said(
    folder: Path, who: str, elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words stand in the log; they are repeated only if errors go elsewhere than logs."""
    bad = "import sys, time; print('no such model', flush=True); time.sleep(1); sys.exit(3)"
    log, errors = (tmp_path / "log").open("a"), (tmp_path / ("errors" if elsewhere else "log")).open("a")
    monkeypatch.setattr(sys, "stderr", errors)
    says = f"(?s){who} ended with status 3 before.*" + ("no such model" if elsewhere else "above$")

    async def main() -> None:
        s = supervisor(
            folder,
            [SLEEP, bad if who == "w1" else SLEEP],
            bad if who == "router" else FRONT.replace("BAD", who),
            log,
        )
        try:
            async with asyncio.timeout(60):
                with pytest.raises(LaunchError, match=says):
                    await s.start(least=2)
        finally:
            await s.stop()
        assert len(s._tasks) == (3 if who == "w1" else 1), "nothing is started behind a front that cannot serve"

    asyncio.run(main())
    assert (tmp_path / "log").read_text().count("no such model") == 1


def test_a_signal_ends_the_command_and_removes_its_folder(tmp_path: Path) -> None:
    """The real command, stopped while its front starts."""
    from hypic.check.tiny_models import build

    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "hypic", "launch", str(build("qwen35")), "--port", str(free_ports(1)[0])]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not (children := psutil.Process(process.pid).children()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)
    assert process.returncode == 0 and not list(tmp_path.iterdir())
    psutil.wait_procs(children, timeout=30)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children)
