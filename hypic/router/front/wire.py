"""The request as the front sends it to a worker's ``/generate``, and the chunks that come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import orjson

from hypic.segment import RequestSpans

_PASSED = (
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_sampling_mask",
    "return_text_in_logprobs", "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "log_metrics",
    "return_hidden_states", "return_routed_experts", "routed_experts_start_len", "return_indexer_topk", "lora_path",
    "custom_logit_processor", "session_id", "routing_key", "conversation_id", "require_reasoning",
    "max_thinking_tokens", "priority", "extra_key", "no_logs", "custom_labels", "return_entropy",
    "external_trace_header", "multi_item_delimiter_indices",
)  # fmt: skip
"""Fields of GenerateReqInput that a worker gets as the client sent them, where they are set."""

_REFUSED: Mapping[str, str] = {
    "input_embeds": "embeddings as input",
    "session_params": "sessions",
    "positional_embed_overrides": "embedding overrides",
    "bootstrap_host": "disaggregated prefill",
    "bootstrap_room": "disaggregated prefill",
}

_INCREMENTAL = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
"""Lists of a chunk's ``meta_info`` that hold what is new; the whole is their concatenation."""


class WorkerError(RuntimeError):
    """A worker answered with an error: what its client is told, with the same status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


def refusal(obj: Any) -> str | None:
    """What of SGLang's request `obj` the router cannot pass on, or None."""
    if not hasattr(obj, "return_logprob"):
        return "embedding models"
    if obj.contains_mm_input():
        return "images, audio and video"
    return next((what for field, what in _REFUSED.items() if getattr(obj, field, None) is not None), None)


def body(obj: Any, tokenized: Any, request: str) -> dict[str, Any]:
    """The JSON of one prompt.

    Args:
        obj: SGLang's GenerateReqInput of that prompt.
        tokenized: what SGLang would send to its scheduler.
        request: the router's name of it, by which its worker knows what was made for it.
    """
    given = {name: getattr(obj, name, None) for name in _PASSED}
    out = {name: value for name, value in given.items() if value is not None and value is not False}  # 0 counts
    params = {**(obj.sampling_params or {}), "n": 1}
    params["max_new_tokens"] = tokenized.sampling_params.max_new_tokens  # 0 in the run that computes a prompt for n > 1
    custom = params.get("custom_params") or {}
    if (plan := RequestSpans.from_params(custom)) is not None:
        params["custom_params"] = {**custom, **msgspec.structs.replace(plan, request=request).to_params()}
    first = obj.logprob_start_len
    inputs = obj.return_logprob and first is not None and first >= 0  # each chunk would repeat these
    return out | {
        "rid": tokenized.rid,
        "input_ids": tokenized.input_ids.tolist(),
        "sampling_params": params,
        "stream": bool(obj.stream) or not inputs,
    }


async def events(content: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events as SGLang writes them, up to ``[DONE]``."""
    kept: list[bytes] = []
    async for block in content:
        if kept and kept[-1].endswith(b"\n"):  # half of the blank line
            block = kept.pop() + block
        *complete, rest = block.split(b"\n\n")
        for part in complete:
            event = b"".join([*kept, part])
            kept = []
            if event == b"data: [DONE]":
                return
            if event.startswith(b"data: "):
                yield orjson.loads(event[6:])
        if rest:
            kept.append(rest)


def error_of(chunk: Mapping[str, Any]) -> WorkerError | None:
    """The error in a chunk or in an answer that is no success."""
    error = chunk.get("error")
    if error is None:
        return None
    if not isinstance(error, Mapping):
        return WorkerError(500, str(error))
    code = error.get("code")
    return WorkerError(code if isinstance(code, int) else 500, str(error.get("message", error)))


class Assembly:
    """One response, put together from a worker's incremental chunks as SGLang's tokenizer manager does it.

    Args:
        state: SGLang's ReqState of the request; its text and output ids grow.
        stream: the client streams.
        incremental: and wants in each chunk what is new, not all so far.
    """

    def __init__(self, state: Any, stream: bool, incremental: bool):
        self._state, self._stream, self._incremental = state, stream, stream and incremental
        self._lists: dict[str, list[Any]] = {}

    def add(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Take a chunk in. Returns what SGLang would give out for it, None for nothing."""
        state, meta = self._state, chunk["meta_info"]
        state.append_text(chunk.get("text") or "")
        state.output_ids.extend(chunk.get("output_ids") or ())
        state.finished = meta.get("finish_reason") is not None
        if self._incremental:
            return chunk
        for name in _INCREMENTAL:
            if (new := meta.get(name)) is not None:
                meta[name] = self._lists.setdefault(name, [])
                meta[name].extend(new)
        if state.finished:
            ids, text = state.output_ids.copy(), state.get_text()
        elif self._stream:
            ids, text = state.output_ids, None  # SGLang fills the text in once the chunk goes out
        else:
            return None
        return {**chunk, "output_ids": ids} | ({"text": text} if "text" in chunk else {})

    def start_over(self) -> None:
        """Nothing of it was given out, and another worker begins anew."""
        self._lists.clear()
        self._state.output_ids.clear()
        self._state.text_chunks.clear()
        self._state.text, self._state.finished = "", False
