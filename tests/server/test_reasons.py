"""CASES row 20: a segment that is not reused says why: in the report, and in a metric of its own."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases.driving import Writer
from tests.server import requests
from tests.server.conftest import ARENA_BYTES
from tests.server.requests import CHAT, GENERATE, MARK, native, openai
from tests.server.serving import Server, TextWriter

TOKEN_BYTES = 1024
"""K and V of one token in the one full-attention layer of the model: 2 heads of 64, float32."""
Case = Callable[[Writer, TextWriter], tuple[str, dict[str, Any]]]


def with_ids(write: Writer, length: int = 80, tail: int = 7, **fields: Any) -> tuple[str, dict[str, Any]]:
    prompt = write.prompt(5, write.document(length), tail)
    hypic = {"segments": [list(s) for s in prompt.segments], "report": True}
    return GENERATE, {"input_ids": list(prompt.ids), "hypic": hypic, "sampling_params": native(), **fields}


def with_content(content: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    message = {"role": "user", "content": content}
    return CHAT, {"messages": [message], "hypic": {"report": True}, **openai(), **fields}


def marked(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, **MARK}


def picture() -> dict[str, Any]:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def unseen_tool(text: TextWriter) -> tuple[str, dict[str, Any]]:
    """The template is not given the tools."""
    tool = {"type": "function", "function": {"name": "find", "description": text.document()}, **MARK}
    return with_content(text.words(4), tools=[tool], tool_choice="none")


def nested(text: TextWriter) -> tuple[str, dict[str, Any]]:
    path, body = with_content([marked(text.words(3)), {"type": "text", "text": text.words(3)}])
    body["messages"][0] |= MARK
    return path, body


def beside_ids(write: Writer, text: TextWriter) -> tuple[str, dict[str, Any]]:
    return with_content([marked(text.document())], input_ids=write.tokens(20))


CASES: dict[str, Case] = {
    "too_short": lambda write, text: with_ids(write, 63),
    "prompt_end": lambda write, text: with_ids(write, tail=0),
    "arena_full": lambda write, text: with_ids(write, ARENA_BYTES // TOKEN_BYTES),
    "input_logprobs": lambda write, text: with_ids(write, return_logprob=True, logprob_start_len=0),
    "disaggregation": lambda write, text: with_ids(write, bootstrap_host="x", bootstrap_room=3),
    "template": lambda write, text: unseen_tool(text),
    "empty": lambda write, text: with_content([marked(" \n"), {"type": "text", "text": text.words(4)}]),
    "nested": lambda write, text: nested(text),
    "token_ids": beside_ids,
    "not_text": lambda write, text: with_content([{**picture(), **MARK}, {"type": "text", "text": text.words(4)}]),
    "multimodal": lambda write, text: with_content([picture(), marked(text.document()), marked(text.words(9))]),
}
BESIDE: dict[str, list[tuple[str, str | None]]] = {
    "nested": [("too_short", None)],
    "multimodal": [("declined", "multimodal")],
}
"""What else the reports of some cases hold."""


@pytest.mark.parametrize("reason", CASES)
def test_20_a_segment_that_is_not_reused_says_why(server: Server, write: Writer, text: TextWriter, reason: str) -> None:
    path, body = CASES[reason](write, text)
    requests.know(server, write, write.document(70))  # stays: nothing is evicted for what will not fit
    before = server.metrics()
    answer = server.ask(path, body)
    (report,) = requests.reports(path, answer)
    expected = [("too_short", None) if reason == "too_short" else ("declined", reason), *BESIDE.get(reason, [])]
    found = [(s["outcome"], s["reason"]) for s in requests.segments(report)]
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert report["reused_artifacts"] == report["compiled"] == 0
    counted: dict[str, float] = {}
    for outcome, why in expected:
        name = f"segments_total{{outcome={outcome}" + (f",reason={why}}}" if why else "}")
        counted[name] = counted.get(name, 0) + 1
        if outcome == "declined":
            counted[f"fallbacks_total{{reason={why}}}"] = counted.get(f"fallbacks_total{{reason={why}}}", 0) + 1
    assert server.metrics().since(before) == counted


def test_20_sessions(server: Server, write: Writer) -> None:
    session = server.ask("/open_session", {"capacity_of_str_len": 1000})
    path, body = with_ids(write, session_params={"id": session})
    before = server.metrics()
    (report,) = requests.reports(path, server.ask(path, body))
    assert [(s["outcome"], s["reason"]) for s in requests.segments(report)] == [("declined", "session")]
    assert server.metrics().since(before)["segments_total{outcome=declined,reason=session}"] == 1
    server.ask("/close_session", {"session_id": session})


def test_20_each_segment_has_its_own_reason(server: Server, write: Writer) -> None:
    """A hit, a miss, one that is too short and one at the end of a prompt, in one report and in the metrics."""
    known, new, short, last = write.document(80), write.document(90), write.document(20), write.document(70)
    requests.know(server, write, known)
    prompt = write.prompt(3, known, 2, new, 1, short, 4, last)
    before = server.metrics()
    body = {
        "input_ids": list(prompt.ids),
        "hypic": {"segments": [list(s) for s in prompt.segments], "report": True},
        "sampling_params": native(),
    }
    (report,) = requests.reports(GENERATE, server.ask(GENERATE, body))
    assert [(s["outcome"], s["reason"]) for s in requests.segments(report)] == [
        ("hit_device", None),
        ("compiled", None),
        ("too_short", None),
        ("declined", "prompt_end"),
    ]
    counted = {k: v for k, v in server.metrics().since(before).items() if k.startswith(("segments", "fallbacks"))}
    assert counted == {
        "segments_total{outcome=hit_device}": 1,
        "segments_total{outcome=compiled}": 1,
        "segments_total{outcome=too_short}": 1,
        "segments_total{outcome=declined,reason=prompt_end}": 1,
        "fallbacks_total{reason=prompt_end}": 1,
    }
