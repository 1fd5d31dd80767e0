"""Requests to the server over HTTP, with nothing but the standard library: chat as clients send it, and token ids."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from hypic.demo import DemoError
from hypic.report import Report

TOP_LOGPROBS = 20
"""Alternatives per step that an OpenAI client may ask for."""

_TIMEOUT = 300.0


class RequestError(DemoError):
    """A request failed; the text holds what the server said."""


class Step(NamedTuple):
    """One generated token and the most likely ones at its place, each with its logprob; none where they are not known.

    SGLang 0.5.17 repeats those of a chunk's first token for the others, so of a chunk only the first has any.
    """

    token: str
    top: dict[str, float]


class ChatAnswer(NamedTuple):
    """A streamed chat answer.

    Attributes:
        ttft: seconds from sending the request to the first token.
        text: the answer.
        steps: the generated tokens, the one that ends the answer included.
        cached_tokens: as ``usage`` has it.
        report: hypic's report.
    """

    ttft: float
    text: str
    steps: list[Step]
    cached_tokens: int
    report: Report


class TokenAnswer(NamedTuple):
    """An answer in token ids.

    Attributes:
        prompt: ids of the prompt, empty where they were sent.
        ids: the generated ids.
        steps: for each of them logprobs by token id.
        report: hypic's report.
    """

    prompt: list[int]
    ids: list[int]
    steps: list[dict[int, float]]
    report: Report


class Client:
    """One server. All methods raise RequestError."""

    def __init__(self, url: str) -> None:
        self.url = url

    def answers(self) -> bool:
        """Whether there is a server that serves a model."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                return True
        except (OSError, http.client.HTTPException):
            return False

    def flush_cache(self) -> None:
        """Empty the radix tree and the artifact store."""
        with self._post("/flush_cache?timeout=30", {}):
            pass

    def chat(self, messages: list[dict[str, Any]], max_tokens: int) -> ChatAnswer:
        """Stream a greedy answer, its time to first token, and the report."""
        body = _chat(messages, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
        text = ""
        steps: list[Step] = []
        usage: dict[str, Any] = {}
        ttft, report = 0.0, None
        began = time.perf_counter()
        with self._post("/v1/chat/completions", body) as response:
            for chunk in _events(response):
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    for i, entry in enumerate((choice.get("logprobs") or {}).get("content") or ()):
                        ttft = ttft or time.perf_counter() - began
                        steps.append(Step(entry["token"], {} if i else _by_token(entry["top_logprobs"])))
                usage = chunk.get("usage") or usage
                report = (chunk.get("sglext") or {}).get("hypic", report)
        if not steps or len(steps) != usage.get("completion_tokens"):
            generated = usage.get("completion_tokens")
            raise RequestError(f"the stream holds {len(steps)} of {generated} tokens with their logprobs")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return ChatAnswer(ttft, text, steps, cached, _report(report))

    def chat_tokens(self, messages: list[dict[str, Any]], max_tokens: int) -> TokenAnswer:
        """The same request, not streamed, in token ids: what the server made of the messages, and its answer."""
        fields = ("return_prompt_token_ids", "return_token_ids", "return_meta_info")
        with self._post("/v1/chat/completions", _chat(messages, max_tokens) | dict.fromkeys(fields, True)) as response:
            body = json.load(response)
        choice = body["choices"][0]
        top = choice["meta_info"]["output_top_logprobs"]
        steps = [{token: logprob for logprob, token, *_ in step} for step in top]
        report = _report((body.get("sglext") or {}).get("hypic"))
        return TokenAnswer(choice["prompt_token_ids"], choice["token_ids"], steps, report)

    def generate(
        self, ids: list[int], segments: Sequence[tuple[int, int]], tenant: str, new_tokens: int, watched: int
    ) -> TokenAnswer:
        """A greedy answer to token ids.

        Args:
            ids: the prompt.
            segments: [start, end) of each segment; () is an ordinary request.
            tenant: requests of different tenants share nothing cached.
            watched: logprobs of the first so many token ids are wanted at every step.
        """
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            "token_ids_logprob": list(range(watched)),
            "extra_key": tenant,
            "hypic": {"report": True, "segments": [list(s) for s in segments] or None},
        }
        with self._post("/generate", body) as response:
            answer = json.load(response)
        meta = answer["meta_info"]
        steps = [{token: logprob for logprob, token, *_ in step} for step in meta["output_token_ids_logprobs"]]
        return TokenAnswer([], answer["output_ids"], steps, _report([meta.get("hypic")]))

    def text(self, ids: list[int]) -> str:
        """What token ids read."""
        with self._post("/detokenize", {"tokens": ids}) as response:
            text: str = json.load(response)["text"]
        return text

    @contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise RequestError(f"{path}: status {error.code}: {error.read().decode(errors='replace')}") from error
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"{path}: {error or type(error).__name__}") from error


def _chat(messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "default",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
        "hypic": {"report": True},
    }


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "choices" not in event:
            raise RequestError(f"the stream broke off: {data}")
        yield event


def _by_token(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Logprobs by token, the likeliest where several decode to the same text (parts of a character)."""
    return {e["token"]: e["logprob"] for e in reversed(entries)}


def _report(found: Any) -> Report:
    if not found or not found[0]:
        raise RequestError("the response holds no report of hypic: is the plugin on?")
    return msgspec.convert(found[0], Report)
