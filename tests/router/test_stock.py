"""Stock servers beside a cluster: which GPUs they get, what is said of one that fails, and that none outlives its block. The
processes are real; in place of `hypic serve` they run a small server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hypic.commands.serve import flag_value
from hypic.processes import end
from hypic.router.launch.plan import LaunchError
from hypic.router.launch.stock import stock_servers

SERVE = """
import http.server, json, os, sys
if "--broken" in sys.argv:
    sys.exit("no such flag")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404), self.end_headers()
    def log_message(self, *_): pass
told = {"argv": sys.argv[1:], "enabled": os.environ["HYPIC_ENABLED"], "pid": os.getpid()}
open(os.environ["TOLD"] + "/" + str(os.getpid()), "w").write(json.dumps(told))
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
BLOCK = """
import os, sys, time
from hypic.router.launch.stock import stock_servers
os.chdir(sys.argv[1])
os.environ["PYTHONPATH"] = sys.argv[1]
with stock_servers(["--model-path", "m"], 2, cpu=True) as urls:
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers write what they were started with; `python -m hypic` is SERVE here."""
    package, folder = tmp_path / "hypic", tmp_path / "told"
    package.mkdir()
    folder.mkdir()
    (package / "__main__.py").write_text(SERVE)
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TOLD", str(folder))
    monkeypatch.setenv("HYPIC_ENABLED", "1")
    monkeypatch.chdir(tmp_path)
    return folder


def starts(told: Path) -> list[dict[str, object]]:
    import msgspec

    return [msgspec.json.decode(file.read_bytes()) for file in told.iterdir()]


def test_each_server_has_the_gpus_of_its_number(told: Path) -> None:
    argv = ["--model-path", "m", "--tp", "4", "--base-gpu-id", "1", "--dtype", "bfloat16"]
    with stock_servers(argv, 2, cpu=False, tp=2, stagger=True) as urls:
        assert len(set(urls)) == 2
        found = starts(told)
    gpus = sorted(flag_value(f["argv"], "--base-gpu-id") for f in found)  # type: ignore[arg-type,type-var]
    assert gpus == ["1", "3"] and all(f["enabled"] == "0" for f in found)
    for f in found:
        words: list[str] = f["argv"]  # type: ignore[assignment]
        assert words[:3] == ["serve", "--model-path", "m"] and "--hypic-off" in words and "--tp" not in words
        assert (flag_value(words, "--tp-size"), flag_value(words, "--dtype")) == ("2", "bfloat16")
        assert not psutil.pid_exists(int(f["pid"])), "it ended with the block"  # type: ignore[call-overload]


def test_one_gpu_each_and_none_on_a_cpu(told: Path) -> None:
    with stock_servers(["--model-path", "m"], 1, cpu=True):
        (found,) = starts(told)
    assert not {"--base-gpu-id", "--tp-size"} & set(found["argv"])  # type: ignore[call-overload]


def test_a_server_that_fails_is_quoted(told: Path) -> None:
    with pytest.raises(LaunchError, match="no such flag"), stock_servers(["--broken"], 2, cpu=True):
        pass


@pytest.mark.parametrize(
    ("fields", "ranks", "says"),
    [
        ({"num_attention_heads": 16, "num_key_value_heads": 2}, 8, None),
        ({"num_attention_heads": 16, "num_key_value_heads": 16}, 8, None),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 8, "num_attention_heads is 12"),
        ({"num_attention_heads": 24, "num_key_value_heads": 3}, 8, "num_key_value_heads is 3"),
        ({"text_config": {"num_attention_heads": 8, "linear_num_key_heads": 4}}, 8, "linear_num_key_heads is 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 1, None),
    ],
)
def test_a_shape_that_tp_cannot_cut_is_not_started(
    told: Path, tmp_path: Path, fields: dict[str, object], ranks: int, says: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    argv = ["--model-path", str(tmp_path)]
    refused = contextlib.nullcontext() if says is None else pytest.raises(LaunchError, match=f"{ranks} ranks: {says}")
    with refused, stock_servers(argv, 1, cpu=True, tp=ranks):
        pass
    assert len(starts(told)) == (1 if says is None else 0)


def test_a_signal_to_who_started_them_ends_them(told: Path) -> None:
    """As `timeout` and `hypic replay --budget` do it."""
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", BLOCK, str(told.parent)]
    block = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    assert block.stdout is not None and block.stdout.readline() == "up\n"
    servers = [int(f["pid"]) for f in starts(told)]  # type: ignore[call-overload]
    block.send_signal(signal.SIGTERM)
    assert block.wait(10) == 128 + signal.SIGTERM
    assert len(servers) == 2 and not any(psutil.pid_exists(pid) for pid in servers)


def test_what_does_not_end_is_killed_with_all_that_it_started() -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}]); {deaf}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    (child,) = psutil.Process(process.pid).children()
    began = time.monotonic()
    end([process], seconds=0.3)
    assert process.poll() == -signal.SIGKILL and time.monotonic() - began < 5
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
