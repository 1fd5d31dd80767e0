"""``hypic serve``: which flags and variables reach SGLang, and the real server on a CPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from hypic.cli import app
from hypic.commands import serve
from hypic.config import STOCK, ConfigError, HypicConfig, from_env
from hypic.ports import free_ports, is_taken

READY_SECONDS = 30
"""Promised on two idle cores. The test allows five times as much, since it may share them."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the command up to the server; what it would have got: ``argv`` and the environment."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(serve, "is_taken", lambda host, port: False)
    monkeypatch.setattr(serve, "run_server", lambda argv, cpu: seen.update(argv=argv, config=from_env(os.environ)))
    return seen


def test_flags_are_split_between_hypic_and_sglang(launched: dict[str, Any]) -> None:
    line = ["serve", "some/model", "--hypic-seam-window", "4", "--port", "31000", "--chunked-prefill-size", "-1"]
    line += ["--hypic-memory=2GiB", "--json-model-override-args", '{"a": 1}', "--hypic-separator", "<<PIC_SEP>>"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 0, result.output
    assert launched["argv"] == [
        *("--model-path", "some/model", "--port", "31000", "--chunked-prefill-size", "-1"),
        *("--json-model-override-args", '{"a": 1}'),
    ]
    expected = HypicConfig(enabled=True, seam_window=4, memory=2 * 2**30, separator="<<PIC_SEP>>")
    assert launched["config"] == expected


def test_flags_win_over_the_environment(launched: dict[str, Any]) -> None:
    os.environ.update(HYPIC_SEAM_WINDOW="16", HYPIC_MIN_SEGMENT="100")
    CliRunner().invoke(app, ["serve", "m", "--hypic-min-segment", "32", "--hypic-no-start-check"])
    assert launched["config"] == HypicConfig(enabled=True, seam_window=16, min_segment=32, start_check=False)


def test_off_serves_stock_sglang(launched: dict[str, Any]) -> None:
    CliRunner().invoke(app, ["serve", "m", "--hypic-off"])
    assert not launched["config"].enabled


@pytest.mark.parametrize("line", [["m", "--hypic-memory", "lots"], ["m", "--hypic-seam-window", "0"], []])
def test_unusable_arguments_end_with_one_clear_line(line: list[str], launched: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["serve", *line])
    assert result.exit_code == 2
    assert result.output.startswith("hypic serve: ")
    assert not launched


@pytest.mark.parametrize("command", ["serve", "launch"])
def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(
    command: str, launched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "is_taken", is_taken)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(app, [command, "m", "--port", port])
        assert result.exit_code == 2
        assert result.output.startswith(f"hypic {command}: --port {port}: another process listens there on 127.0.0.1")
        assert CliRunner().invoke(app, [command, "m", "--host=0.0.0.0", f"--port={port}"]).exit_code == 2
        assert not launched
        serve.require_port(["--host", "127.0.0.2", "--port", port])
    serve.require_port(["--port", port])


@pytest.mark.parametrize(
    ("argv", "environ", "cpu"),
    [
        (["--device", "cpu"], {}, True),
        (["--device=cuda"], {}, False),
        (["--device", "cuda"], {"HYPIC_CPU": "1"}, True),
        ([], {"HYPIC_CPU": "0"}, False),
    ],
)
def test_choice_of_device(argv: list[str], environ: dict[str, str], cpu: bool) -> None:
    assert serve.wants_cpu(argv, environ) is cpu


def test_cpu_mode_is_not_set_on_a_gpu_machine() -> None:
    environ: dict[str, str] = {}
    serve.prepare_environment(HypicConfig(enabled=True), [], cpu=False, environ=environ)
    assert environ == HypicConfig(enabled=True).to_env()
    serve.prepare_environment(HypicConfig(enabled=False), [], cpu=False, environ=environ)
    assert environ == HypicConfig().to_env() | STOCK


def test_bad_size_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        serve.merge_config(HypicConfig(), memory="2 potatoes")


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = "import sys, hypic.cli; sys.exit(str({'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.stderr.strip() == "set()"


@contextmanager
def server(model: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "hypic", "serve", str(model), "--port", str(port), "--log-level", "error", *flags]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_until_ready(url: str, launcher: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_real_server_answers_a_chat(tiny_model: Callable[[str], Path]) -> None:
    """The whole product path: our command, SGLang's server and its processes. They do not outlive a launcher that is killed."""
    with server(tiny_model("qwen3next"), "--hypic-off") as (url, launcher):
        wait_until_ready(url, launcher, 5 * READY_SECONDS)
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
        answer = post(f"{url}/v1/chat/completions", chat)
        assert answer["usage"]["completion_tokens"] == 4
        assert post(f"{url}/v1/chat/completions", chat)["choices"] == answer["choices"]
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) >= 3, "fork server, scheduler, detokenizer"
        launcher.kill()
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive
