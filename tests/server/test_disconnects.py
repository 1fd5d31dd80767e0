"""CASES row 10: real clients that go away. Nothing stays behind, and what they had compiled is of use."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.cases.driving import PATIENCE, Document, Writer
from tests.server import requests
from tests.server.requests import CHAT, COMPLETIONS, GENERATE
from tests.server.serving import Server

LONG = 3000
"""Tokens of a document whose compile, chunk by chunk, takes long enough to leave in the middle."""
TRIES = 8
NEVER_ENDS = 8000
"""Output tokens that take far longer than this:"""
LONG_BEFORE_THE_END = 20.0
"""Seconds. SGLang looks every four seconds whether a client that waits for its first byte is still there."""


class RawClient:
    """A connection that has sent one request, and closes without a word."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self._socket = socket.create_connection(server.address, timeout=PATIENCE)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._socket.sendall(head.encode() + payload)

    def wait_for_output(self) -> None:
        """Until a chunk of the stream is there."""
        seen = b""
        while b"data: " not in seen:
            received = self._socket.recv(4096)
            assert received, seen
            seen += received

    def close(self) -> None:
        self._socket.close()


class HttpxClient:
    """A client library whose call is cancelled, as an application does when its own user goes."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self._output, self._leave = threading.Event(), threading.Event()
        self._ended_alone = False
        self._thread = threading.Thread(target=asyncio.run, args=[self._run(server.url, path, body)])
        self._thread.start()

    async def _run(self, url: str, path: str, body: dict[str, Any]) -> None:
        call = asyncio.create_task(self._stream(url, path, body))
        await asyncio.to_thread(self._leave.wait)
        self._ended_alone = not call.cancel()
        await asyncio.wait([call])

    async def _stream(self, url: str, path: str, body: dict[str, Any]) -> None:
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client,
            client.stream("POST", path, json=body) as response,
        ):
            async for _ in response.aiter_lines():
                self._output.set()

    def wait_for_output(self) -> None:
        assert self._output.wait(PATIENCE)

    def close(self) -> None:
        self._leave.set()
        self._thread.join()
        assert not self._ended_alone


@contextmanager
def leaving(server: Server, client: RawClient | HttpxClient) -> Iterator[None]:
    """The block waits for the moment; then the client goes, and the server must notice and drop its request."""
    try:
        yield
    finally:
        client.close()
    server.until(idle, "idle", LONG_BEFORE_THE_END)
    server.audit()
    assert server.metrics().read("hypic:held_requests") == 0


def body(write: Writer, document: Document, tail: int, **fields: Any) -> dict[str, Any]:
    prompt = write.prompt(5, document, tail)
    hypic = {"segments": [list(s) for s in prompt.segments]}
    params = requests.native(max_new_tokens=NEVER_ENDS)
    return {"input_ids": list(prompt.ids), "hypic": hypic, "sampling_params": params, **fields}


def openai_body(write: Writer, document: Document, tail: int, **fields: Any) -> dict[str, Any]:
    sent = body(write, document, tail)
    return {**requests.openai(max_tokens=NEVER_ENDS), "prompt": sent["input_ids"], "hypic": sent["hypic"], **fields}


def assert_hit(server: Server, write: Writer, document: Document) -> None:
    """The document is in the store: what was compiled for the client that left has stayed useful."""
    answer = server.ask(GENERATE, requests.generate_body(write, [[document]]))["meta_info"]
    assert requests.outcomes(answer["hypic"]) == ["hit_device"]
    assert answer["cached_tokens"] == requests.interior(document)


def idle(load: dict[str, Any]) -> bool:
    return not load["num_running_reqs"] + load["num_waiting_reqs"] + load["num_used_tokens"]


def held(load: dict[str, Any]) -> bool:
    return load["num_waiting_reqs"] == 1


def linking(load: dict[str, Any]) -> bool:
    """Its slots are reserved, its prefill goes on chunk by chunk."""
    return load["num_waiting_reqs"] == 0 and load["num_used_tokens"] >= LONG


def leave_held(server: Server, write: Writer, send: Callable[[Document], RawClient | HttpxClient]) -> Document:
    """A client that goes while its document is being compiled; the document.

    The moment is a fraction of a second, and on a busy machine the look at the load may come after it: then once more.
    """
    for _ in range(TRIES):
        document = write.document(LONG)
        with leaving(server, send(document)):
            load = server.until(lambda load: held(load) or linking(load), "held or beyond")
        if held(load):
            return document
    raise AssertionError(f"{TRIES} times the compile was over before it was seen")


@pytest.mark.parametrize("fields", [{"stream": True}, {}])
def test_10_a_socket_closes_while_a_compile_is_pending(server: Server, write: Writer, fields: dict[str, Any]) -> None:
    sent = leave_held(server, write, lambda d: RawClient(server, GENERATE, body(write, d, 9, **fields)))
    assert_hit(server, write, sent)


@pytest.mark.parametrize("fields", [{"stream": True}, {}])
def test_10_a_socket_closes_while_it_links(server: Server, write: Writer, fields: dict[str, Any]) -> None:
    document = write.document(LONG)
    requests.know(server, write, document)
    with leaving(server, RawClient(server, COMPLETIONS, openai_body(write, document, 4000, **fields))):
        server.until(linking, "linking")
    assert_hit(server, write, document)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_10_a_socket_closes_while_it_decodes(server: Server, write: Writer, path: str, n: int) -> None:
    document = write.document(100)
    if path == GENERATE:
        sent = body(write, document, 9, stream=True)
        sent["sampling_params"]["n"] = n
    else:
        sent = openai_body(write, document, 9, stream=True, n=n)
    client = RawClient(server, path, sent)
    with leaving(server, client):
        client.wait_for_output()
        server.until(lambda load: load["num_running_reqs"] == n, "decoding")
    assert_hit(server, write, document)


def chat_client(server: Server, write: Writer, document: Document, tail: int = 9) -> HttpxClient:
    """A library's streaming chat, with token ids so that the moments last."""
    ids = body(write, document, tail)
    messages = [{"role": "user", "content": "not rendered"}]
    chat = {**requests.openai(max_tokens=NEVER_ENDS), "messages": messages, "stream": True}
    return HttpxClient(server, CHAT, {**chat, "input_ids": ids["input_ids"], "hypic": ids["hypic"]})


def test_10_a_client_library_leaves_a_chat_before_it_begins(server: Server, write: Writer) -> None:
    assert_hit(server, write, leave_held(server, write, lambda d: chat_client(server, write, d)))


@pytest.mark.parametrize("moment", [linking, None])
def test_10_a_client_library_leaves_a_chat(
    server: Server, write: Writer, moment: Callable[[dict[str, Any]], bool] | None
) -> None:
    """The library hangs up in the middle of a stream, or in its prefill."""
    document = write.document(LONG)
    if moment is not None:
        requests.know(server, write, document)
    client = chat_client(server, write, document, 9 if moment is None else 4000)
    with leaving(server, client):
        if moment is None:
            client.wait_for_output()
        else:
            server.until(moment, "at the moment")
    assert_hit(server, write, document)
