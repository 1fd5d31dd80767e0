"""`hypic top`: the Gantt chart of a request, and what is shown of a cluster."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hypic.cli import app
from hypic.router.launch.view import Bar, bars, gantt, plot, screen, size


def line(worker: str, **times: float) -> dict[str, Any]:
    fields = dict.fromkeys(("begun", "done", "sent", "arrived"))
    return {"id": "x", "tokens": 9, "nbytes": 9, "role": "compile", "worker": worker, "rerouted": 0, **fields, **times}


def request(*segments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    times = {"placed": 0.1, "expected": 2.0, "forwarded": 2.0, "first_token": None, "ended": None}
    base = {"rid": "0123456789abcdef", "combine": "w0", "prompt_tokens": 40, "outcome": "", "segments": list(segments)}
    return {**base, **times, **fields}


DONE = request(
    line("w0", begun=2.0, done=40.0),
    line("w1", begun=3.0, done=60.0, sent=61.0, arrived=70.0),
    first_token=90.0,
    ended=100.0,
    outcome="answered",
)


def test_the_bars_of_a_request() -> None:
    assert bars(DONE) == [
        Bar("w0", "compile", 2.0, 40.0),
        Bar("w1", "compile", 3.0, 60.0),
        Bar("w0", "transfer", 61.0, 70.0),
        Bar("w0", "link", 70.0, 90.0),
        Bar("w0", "decode", 90.0, 100.0),
    ]
    assert bars(request(line("w1", begun=3.0, done=60.0))) == [Bar("w1", "compile", 3.0, 60.0)], "under way"
    assert bars(request(forwarded=None)) == [] and list(gantt(request(forwarded=None))) == []


def test_a_line_of_bars_for_each_worker() -> None:
    w0, w1, scale = (text.plain for text in gantt(DONE, width=100))
    assert w0[9:] == "  " + 38 * "█" + 21 * " " + 9 * "▒" + 20 * "▓" + 10 * "─"
    assert w1[9:].rstrip() == "   " + 57 * "█" and scale.endswith("100 ms")


def test_what_is_shown(tmp_path: Path) -> None:
    alive = {
        "name": "w0", "state": "alive", "pid": 1, "restarts": 2, "http": "http://127.0.0.1:4711", "running": 1, "linking": 0,
        "queued_tokens": 77, "tokens_per_s": 1234.0, "arena_bytes": 4 << 20, "arena_free": 1 << 20, "artifacts": 9,
        "compiling": 3,
    }  # fmt: skip
    absent = {"name": "w1", "state": "absent", "pid": 0, "restarts": 5}
    costs = {"transfer_gb_s": 1.5, "message_s": 0.002}
    snapshot = {"workers": [alive, absent], "policy": "lpt", "costs": costs, "requests": [DONE, request()]}
    console = Console(width=120, record=True)
    console.print(screen(snapshot))
    text = console.export_text()
    for word in (
        "1 of 2 workers alive",
        "4711",
        "1234",
        "75%",
        "absent",
        "2 compile",
        "answered",
        "1.50 GB/s",
        "01234567: 40",
    ):
        assert word in text, word
    plot(DONE, tmp_path / "gantt.png")
    assert (tmp_path / "gantt.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 42, "4096.0 GiB")]
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Of a cluster without workers."""

    def do_GET(self) -> None:
        body = json.dumps(
            {"workers": [], "policy": "lpt", "costs": {"transfer_gb_s": 1.5, "message_s": 0.002}, "requests": []}
        )
        self.send_response(200 if self.path == "/workers" else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        return


def test_an_address_without_a_scheme() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for scheme in ("http://", ""):
            result = CliRunner().invoke(app, ["top", f"{scheme}localhost:{server.server_port}", "--once"])
            assert result.exit_code == 0 and "0 of 0 workers alive" in result.output, result.output
    finally:
        server.shutdown()
        server.server_close()


def test_nobody_there() -> None:
    result = CliRunner().invoke(app, ["top", "http://127.0.0.1:9", "--once"])
    assert result.exit_code == 2 and "does not answer" in result.output
