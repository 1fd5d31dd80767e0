"""CASES row 29: what belongs to the plugin is refused from clients, wherever they put it, with a message that says so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.requests import CHAT, COMPLETIONS, GENERATE, native, openai
from tests.server.serving import Server

PLAN = {"hypic_cached": [0, 2]}
CUSTOM = {"custom_params": PLAN}
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
RID = "hypic-internal-1"
TEXT = {"text": "a", "sampling_params": native()}
ENDPOINTS: dict[str, dict[str, Any]] = {
    GENERATE: TEXT,
    "/vertex_generate": {"instances": [{"text": "a"}], "parameters": {"sampling_params": native()}},
    COMPLETIONS: {"prompt": "a", **openai()},
    CHAT: {**MESSAGES, **openai()},
    "/invocations": {**MESSAGES, **openai()},
    "/v1/responses": {"input": "a", "model": "m", "max_output_tokens": 3},
    "/v1/messages": {**MESSAGES, "model": "m", "max_tokens": 3},
    "/api/generate": {"model": "m", "prompt": "a", "stream": False, "options": {"num_predict": 3}},
}
NATIVE_PARAMS = [
    {"sampling_params": {**native(), **PLAN}},
    {"sampling_params": {**native(), **CUSTOM}},
    {"text": ["a", "b"], "sampling_params": [native(), {**native(), **CUSTOM}]},
    {"text": ["a", "b"], "sampling_params": [native(), {**native(), **PLAN}]},
]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "where", [PLAN, CUSTOM, {"extra_body": PLAN}, {"extra_body": CUSTOM}, {"sampling_params": PLAN}]
)
def test_29_plan_fields(server: Server, path: str, where: dict[str, Any]) -> None:
    """At the top (where an OpenAI client's extra_body ends up) and in every object that holds parameters."""
    refused(server, path, {**ENDPOINTS[path], **where}, r"the keys \['hypic_cached'\] are reserved.*'hypic' object")


@pytest.mark.parametrize("fields", NATIVE_PARAMS)
def test_29_sampling_parameters(server: Server, fields: dict[str, Any]) -> None:
    refused(server, GENERATE, {**TEXT, **fields}, r"(sampling|custom)_params: the keys \['hypic_cached'\] are reserved")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/vertex_generate", {"parameters": {"sampling_params": {**native(), **CUSTOM}}}),
        ("/api/generate", {"options": CUSTOM}),
        ("/api/generate", {"options": PLAN}),
    ],
)
def test_29_inside_the_parameters_of_other_apis(server: Server, path: str, fields: dict[str, Any]) -> None:
    refused(server, path, {**ENDPOINTS[path], **fields}, r"the keys \['hypic_cached'\] are reserved")


@pytest.mark.parametrize("key", ["hypic_declined", "hypic_reasons", "hypic_salt", "hypic_report", "hypic_anything"])
def test_29_every_reserved_key(server: Server, key: str) -> None:
    refused(server, COMPLETIONS, {**ENDPOINTS[COMPLETIONS], "custom_params": {key: 1, "mine": 2}}, rf"\['{key}'\]")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (GENERATE, {"rid": RID}),
        (GENERATE, {"text": ["a", "b"], "rid": ["x", RID]}),
        (COMPLETIONS, {"rid": RID}),
        (CHAT, {"rid": RID}),
        ("/v1/responses", {"request_id": RID}),
        ("/vertex_generate", {"parameters": {"sampling_params": native(), "rid": RID}}),
    ],
)
def test_29_internal_request_ids(server: Server, path: str, fields: dict[str, Any]) -> None:
    refused(server, path, {**ENDPOINTS[path], **fields}, "the prefix 'hypic-internal-' is reserved")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields", [PLAN, CUSTOM, {"rid": RID}])
def test_29_streams_are_refused_before_they_begin(server: Server, path: str, fields: dict[str, Any]) -> None:
    refused(server, path, {**ENDPOINTS[path], **fields, "stream": True}, "reserved")


def test_29_a_native_stream_says_so_in_its_only_event(server: Server) -> None:
    """`/generate` has answered 200 before it looks, as for SGLang's own errors."""
    (event,) = server.ask(GENERATE, {**TEXT, "stream": True, "sampling_params": CUSTOM})
    assert event["error"]["code"] == 400 and "reserved" in event["error"]["message"]


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
def test_29_what_is_the_clients_own_passes(server: Server, path: str) -> None:
    """Custom parameters of others, metadata, and schemas and texts that spell reserved names."""
    schema = {"type": "object", "properties": {"hypic_cached": {"type": "string"}}}
    body = {**ENDPOINTS[path], "metadata": {"hypic_run": "7"}}
    if path == GENERATE:
        body["sampling_params"] = {**native(), "custom_params": {"mine": 1}}
    elif path == CHAT:
        tool = {
            "type": "function",
            "function": {"name": "hypic_cached", "description": "hypic_salt", "parameters": schema},
        }
        body |= {"tools": [tool], "custom_params": {"mine": 1}, "rid": "my-hypic-internal-1"}
    assert server.post(path, body).status == 200


def refused(server: Server, path: str, body: dict[str, Any], says: str) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.body is not None) == (400, True), reply
    message = str(reply.body).replace('\\"', "'").replace("\\'", "'")
    assert re.search(says, message), message
