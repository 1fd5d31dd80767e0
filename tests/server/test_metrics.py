"""`hypic:*` after a known sequence of requests: every counter, histogram and gauge has exactly the value it must have."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cases.driving import PATIENCE, Document, Writer
from tests.server import requests
from tests.server.conftest import ARENA_BYTES
from tests.server.requests import GENERATE, SEAM, native
from tests.server.serving import FLUSH, Metrics, Server

FIXED_BYTES = 3 * (2 * 4 * 32 * 32 * 4 + 256 * 3 * 4)
"""T and S of 4 heads of 32 x 32 and the conv window of 256 channels, in the 3 linear layers of the model."""
TOKEN_BYTES = 2 * (64 + 64) * 4
"""K and V of 2 heads in its one full-attention layer."""
HEADER_BYTES = range(256, 1280)
"""An artifact's header, beside 8 bytes for each token, and what aligning adds."""
LONG = 3000


@pytest.fixture
def empty(server: Server) -> Server:
    """The server without artifacts."""
    server.ask(FLUSH, {})
    return server


def send(server: Server, write: Writer, *parts: int | Document, **fields: Any) -> Any:
    prompt = write.prompt(*parts)
    hypic = {"segments": [list(s) for s in prompt.segments], "report": True}
    body = {"input_ids": list(prompt.ids), "hypic": hypic, "sampling_params": native(max_new_tokens=1), **fields}
    return server.ask(GENERATE, body)["meta_info"]


def counted(before: Metrics, after: Metrics) -> dict[str, float]:
    """What the counters and the histograms' counts have gained."""
    skip = ("_bucket", "_sum", "_created")
    gauges = ("arena_bytes", "artifacts", "held_requests")
    changes = after.since(before)
    return {k: v for k, v in changes.items() if not k.split("{")[0].endswith(skip) and not k.startswith(gauges)}


def assert_arena(metrics: Metrics, documents: Sequence[Document]) -> None:
    used, free = (metrics.read("hypic:arena_bytes", state=state) for state in ("used", "free"))
    payload = sum(FIXED_BYTES + TOKEN_BYTES * (len(d) - SEAM) for d in documents)
    headers = used - payload - sum(8 * len(d) for d in documents)
    assert used + free == ARENA_BYTES
    assert len(documents) * HEADER_BYTES.start <= headers <= len(documents) * HEADER_BYTES.stop
    assert metrics.read("hypic:artifacts") == len(documents)


def test_counters_follow_the_requests(empty: Server, write: Writer) -> None:
    server = empty
    a, b, c = write.document(100), write.document(120), write.document(90)
    start = before = server.metrics()

    def gained(**expected: float) -> None:
        """Since the last call. Keywords are short for the labels, which would fill the page."""
        nonlocal before
        names = {
            "radix": "tokens_total{kind=radix}",
            "artifact": "tokens_total{kind=artifact}",
            "recomputed": "tokens_total{kind=recomputed}",
            "compiled": "tokens_total{kind=compiled}",
            "compiles": "compile_seconds_count",
            "links": "link_seconds_count",
            "waits": "held_seconds_count",
            "prompt_end": "fallbacks_total{reason=prompt_end}",
            "declined": "segments_total{outcome=declined,reason=prompt_end}",
        }
        after = server.metrics()
        wanted = {names.get(k, f"segments_total{{outcome={k.removeprefix('as_')}}}"): v for k, v in expected.items()}
        assert counted(before, after) == wanted
        before = after

    send(server, write, 5, a, 7)
    gained(as_compiled=1, compiled=100, recomputed=5 + SEAM + 7, compiles=1, links=1, waits=1)

    send(server, write, 3, a, 2, b, 4)
    gained(
        as_hit_device=1, as_compiled=1, artifact=100 - SEAM, compiled=120, recomputed=3 + SEAM + 2 + SEAM + 4, compiles=1,
        links=1, waits=1,
    )  # fmt: skip

    send(server, write, 6, a, 1, write.document(20), 5)
    gained(as_hit_device=1, as_too_short=1, artifact=100 - SEAM, recomputed=6 + SEAM + 1 + 20 + 5, links=1, waits=1)

    server.ask(GENERATE, requests.generate_body(write, [[c], [c]]))
    gained(as_compiled=1, as_waited=1, compiled=90, recomputed=2 * (5 + SEAM + 7), compiles=1, links=2, waits=2)

    send(server, write, 4, a)
    gained(declined=1, prompt_end=1)

    server.ask(GENERATE, {"input_ids": write.tokens(50), "sampling_params": native()})
    gained()

    prompt = write.prompt(9, a, 300)
    hypic = {"segments": [list(s) for s in prompt.segments], "report": True}
    body = {"input_ids": list(prompt.ids), "hypic": hypic, "sampling_params": native()}
    server.ask(GENERATE, body)
    gained(as_hit_device=1, artifact=100 - SEAM, recomputed=9 + SEAM + 300, links=1, waits=1)
    again = server.ask(GENERATE, {**body, "input_ids": [*prompt.ids, 50]})["meta_info"]["hypic"]
    hit = again["reused_radix"]
    gained(as_hit_radix=1, radix=hit, recomputed=9 + 100 + 300 + 1 - hit, links=1, waits=1)
    assert hit > 9 + 100

    assert "evictions_total" not in before.since(start)
    assert_arena(before, [a, b, c])
    assert before.read("hypic:held_requests") == 0


def test_evictions_and_a_flush_show_in_the_arena(empty: Server, write: Writer) -> None:
    server = empty
    assert_arena(server.metrics(), [])
    first, second, third = write.document(LONG), write.document(LONG), write.document(70)
    before = server.metrics()
    send(server, write, 5, first, 7)
    assert_arena(server.metrics(), [first])
    send(server, write, 5, second, 7)
    send(server, write, 5, third, 7)
    after = server.metrics()
    assert_arena(after, [second, third])
    assert after.since(before)["evictions_total"] == 1
    send(server, write, 5, second, 7)
    assert server.metrics().since(after)["segments_total{outcome=hit_device}"] == 1
    server.ask(FLUSH, {})
    send(server, write, 3)
    assert_arena(server.metrics(), [])


def test_seconds_are_those_that_the_client_waits(empty: Server, write: Writer) -> None:
    """Held: until the compile is done. Link: from then until the first token, all chunks of the prefill included."""
    server, document = empty, write.document(LONG)

    def seconds(*parts: int | Document) -> tuple[float, float, float]:
        before, began = server.metrics(), time.perf_counter()
        send(server, write, *parts)
        waited = time.perf_counter() - began
        changes = server.metrics().since(before)
        return changes["held_seconds_sum"], changes["link_seconds_sum"], waited

    held, link, waited = seconds(5, document, 9)
    assert 0.5 * waited < held < held + link < waited
    held, link, waited = seconds(5, document, LONG)
    assert held < 0.1 * waited and 0.5 * waited < link < held + link < waited


def test_a_held_request_shows(empty: Server, write: Writer) -> None:
    server, document = empty, write.document(LONG)
    client = threading.Thread(target=send, args=(server, write, 5, document, 9))
    client.start()
    deadline = time.monotonic() + PATIENCE
    while not server.metrics().read("hypic:held_requests"):
        assert time.monotonic() < deadline and client.is_alive(), "never held"
    metrics = server.metrics()
    assert metrics.read("hypic:artifacts") == 1
    client.join()
    server.audit()
    assert server.metrics().read("hypic:held_requests") == 0
