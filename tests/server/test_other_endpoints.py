"""Endpoints that know nothing of segments serve natively, whatever marks and options they are sent (docs/API.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.requests import MARK, REPORT
from tests.server.serving import Reply, Server, TextWriter

TOKENS = 4
NATIVE = ["/v1/messages", "/v1/responses", "/api/generate"]


def body(path: str, text: TextWriter) -> dict[str, Any]:
    document, question = text.document(), text.words(5)
    if path == "/v1/messages":
        content = [{"type": "text", "text": document}, {"type": "text", "text": question}]
        return {
            "model": "m",
            "max_tokens": TOKENS,
            "temperature": 0,
            "messages": [{"role": "user", "content": content}],
        }
    if path == "/v1/responses":
        content = [{"type": "input_text", "text": document}, {"type": "input_text", "text": question}]
        asked = [{"type": "message", "role": "user", "content": content}]
        return {"model": "m", "max_output_tokens": TOKENS, "temperature": 0, "store": False, "input": asked}
    options = {"num_predict": TOKENS, "temperature": 0}
    return {"model": "m", "prompt": f"{document}|{question}", "stream": False, "options": options}


def marked(path: str, plain: dict[str, Any], mark: Any) -> dict[str, Any]:
    sent = json.loads(json.dumps(plain)) | {"hypic": {"separator": "|", **REPORT}}
    for message in [*sent.get("messages", ()), *(sent["input"] if path == "/v1/responses" else ())]:
        message["content"][0].update(mark)
    return dict(sent)


def answer(path: str, reply: Reply) -> str:
    assert reply.status == 200, reply.body
    if path == "/v1/messages":
        return str(reply.body["content"][0]["text"])
    if path == "/v1/responses":
        return str(reply.body["output"][0]["content"][0]["text"])
    return str(reply.body["response"])


@pytest.mark.parametrize("mark", [MARK, {"cache_control": {"type": "ephemeral"}}])
@pytest.mark.parametrize("path", NATIVE)
def test_marks_are_served_natively(server: Server, text: TextWriter, path: str, mark: Any) -> None:
    plain = body(path, text)
    before = server.metrics()
    found = answer(path, server.post(path, marked(path, plain, mark)))
    assert found and found == answer(path, server.post(path, plain))
    assert server.metrics().since(before) == {}


@pytest.mark.parametrize("path", NATIVE[:2])
def test_streams(server: Server, text: TextWriter, path: str) -> None:
    sent = marked(path, body(path, text), MARK) | {"stream": True}
    with server.http.stream("POST", path, json=sent) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    kinds = [e["type"] for e in events]
    first, last = (
        ("message_start", "message_stop") if path == "/v1/messages" else ("response.created", "response.completed")
    )
    assert response.status_code == 200 and (kinds[0], kinds[-1]) == (first, last) and "error" not in kinds


def test_tokens_are_counted_without_marks(server: Server, text: TextWriter) -> None:
    plain = body("/v1/messages", text)
    counts = [
        server.ask("/v1/messages/count_tokens", {k: v for k, v in sent.items() if k in ("model", "messages")})
        for sent in (plain, marked("/v1/messages", plain, MARK))
    ]
    assert counts[0] == counts[1] and counts[0]["input_tokens"] > 64


def test_profiles(server: Server, text: TextWriter, tmp_path: Path) -> None:
    for path in ("/start_profile", "/stop_profile"):
        done = server.http.post(path, json={"output_dir": str(tmp_path), "activities": ["CPU"]})
        assert done.status_code == 200, done.text
        server.ask("/v1/completions", {"model": "m", "prompt": text.words(5), "max_tokens": 1})
    assert any(f.stat().st_size for f in tmp_path.rglob("*.trace.json.gz"))
