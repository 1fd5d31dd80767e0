"""A real `hypic serve` process, and how tests talk to it: sockets only."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from hypic.ports import free_ports

FLUSH = "/flush_cache?timeout=60"
"""Once the scheduler is idle: it may still be at work on the last token when the client has it."""
PATIENCE = 60.0
"""Seconds to wait for something that takes a moment on an idle machine."""
START_PATIENCE = 240.0
PLUGIN = Path(__file__).parent / "plugin"

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
MARK = {"cache_control": {"type": "segment"}}
_SAMPLE = re.compile(r"^(?P<name>[a-z_:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Reply(NamedTuple):
    """What the server answered; a stream's chunks are in ``chunks``."""

    status: int
    body: Any = None
    chunks: tuple[Any, ...] = ()


class Metrics(dict[tuple[str, frozenset[tuple[str, str]]], float]):
    """Samples of `/metrics` by name and labels, those that are the same for all left out."""

    def read(self, name: str, **labels: str) -> float:
        return self.get((name, frozenset(labels.items())), 0.0)

    def since(self, before: Metrics) -> dict[str, float]:
        """What has changed, as {"name{label=value}": difference}, without the prefix `hypic:`."""
        out = {}
        for (name, labels), value in self.items():
            if change := value - before.get((name, labels), 0.0):
                shown = ",".join(f"{k}={v}" for k, v in sorted(labels) if v)
                out[name.removeprefix("hypic:") + (f"{{{shown}}}" if shown else "")] = change
        return out


class Server:
    """A running server.

    Attributes:
        url: where it listens.
        seconds: from its start to its first answer.
        cpu_seconds: of the launcher, the fork server and the scheduler until then.
    """

    def __init__(self, url: str, process: subprocess.Popen[bytes], seconds: float) -> None:
        self.url, self.seconds = url, seconds
        top = psutil.Process(process.pid)
        (fork_server,) = (p for p in top.children() if p.children())
        scheduler = max(
            sum(p.cpu_times()[:2]) for p in fork_server.children()
        )  # the others: detokenizer, further ranks
        self.cpu_seconds = *(sum(p.cpu_times()[:2]) for p in (top, fork_server)), scheduler
        self.http = httpx.Client(base_url=url, timeout=2 * PATIENCE)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def post(self, path: str, body: Mapping[str, Any]) -> Reply:
        response = self.http.post(path, json=dict(body))
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            return Reply(response.status_code, decoded(response.text))
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]", response.text[-500:]
        return Reply(response.status_code, chunks=tuple(json.loads(line) for line in lines[:-1]))

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The body of a reply that must be a success; the chunks of a stream."""
        reply = self.post(path, body)
        assert reply.status == 200, reply.body
        return reply.body if reply.body is not None else list(reply.chunks)

    def token_count(self, text: str) -> int:
        """Tokens of a text that is tokenised by itself."""
        return int(self.ask("/v1/tokenize", {"model": "m", "prompt": text})["count"])

    def metrics(self) -> Metrics:
        samples = Metrics()
        for line in self.http.get("/metrics").text.splitlines():
            if (m := _SAMPLE.match(line)) and m["name"].startswith("hypic:"):
                labels = {k: v for k, v in _LABEL.findall(m["labels"] or "") if k not in ("model_name", "tp_rank")}
                samples[m["name"], frozenset(labels.items())] = float(m["value"])
        return samples

    def load(self) -> dict[str, Any]:
        """What `/v1/loads` says of the one scheduler."""
        (load,) = self.http.get("/v1/loads").json()["loads"]
        return dict(load)

    def until(self, holds: Callable[[dict[str, Any]], bool], what: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until the load is as wanted; the load. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        while not holds(load := self.load()):
            assert time.monotonic() < deadline, f"never {what}: {load}"
            time.sleep(0.002)
        return load

    def audit(self) -> None:
        """Exact accounting, once the scheduler is idle (`hypic.engine.audit`). Raises AssertionError."""
        deadline = time.monotonic() + PATIENCE
        while (verdict := self._verdict()) != "ok":
            assert verdict.startswith("NotIdle") and time.monotonic() < deadline, verdict
            time.sleep(0.05)

    def _verdict(self) -> str:
        (state,) = self.http.get("/server_info").json()["internal_states"]
        return str(state["hypic_audit"])


def decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[Server]:
    """`hypic serve MODEL FLAGS` until the block ends, ready to answer at its start."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "hypic", "serve", str(model), "--port", str(port), "--log-level", "error", *flags]
    paths = [str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    began = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True, env=env)
    try:
        yield Server(f"http://127.0.0.1:{port}", process, _ready(port, process, began))
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # a graceful end takes seconds; tests/platform has one
        process.wait()


def _ready(port: int, process: subprocess.Popen[bytes], began: float) -> float:
    """Seconds until the first answer."""
    while True:
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        assert time.monotonic() - began < START_PATIENCE, "the server does not come up"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200:
                return time.monotonic() - began
        except httpx.HTTPError:
            pass
        time.sleep(0.1)


class TextWriter:
    """Documents as text, different for every seed, the same in every run."""

    def __init__(self, seed: str) -> None:
        from hypic.check.tiny_tokenizer import training_text

        self._rng = random.Random(seed)
        self._words = sorted({w for paragraph in training_text()[:20] for w in re.findall(r"[a-z]{3,9}", paragraph)})

    def words(self, n: int) -> str:
        return " ".join(self._rng.choice(self._words) for _ in range(n))

    def document(self) -> str:
        """More than the 64 tokens that a segment must have."""
        return f"{self.words(50)}."
