"""The report on its way out: from the scheduler's ``customized_info`` into each form of response.

| endpoint | where |
| --- | --- |
| /generate | ``meta_info["hypic"]`` of each prompt and choice; when streaming, of its last chunk |
| OpenAI, whole | ``sglext.hypic``: one report for each choice |
| OpenAI, streaming | the same in the last chunk before ``[DONE]``: the one with usage if that was asked for |
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from sglang.srt.entrypoints.openai import protocol

from hypic.engine.http.models import Handover

KEY = "hypic"
_DATA, _DONE = "data: ", "data: [DONE]"


# Both are set anew for every request, in the task that serves it; what that task starts inherits them.
uses_hypic: ContextVar[bool] = ContextVar("uses_hypic", default=False)
"""The OpenAI request that is being served has segments or options of ours."""
shared_prompts: ContextVar[Delivery | None] = ContextVar("shared_prompts", default=None)
"""The delivery of a planned request with n > 1."""

_COUNTS = ("cached_tokens", "cached_tokens_details", KEY)


class Delivery:
    """The reports of one client request, each under the index of its choice.

    With n > 1 SGLang first computes each prompt in a run of its own, whose output it drops, and every choice then hits what
    that run left behind. The client asked once, so all choices get the counts and the report of that run.

    Attributes:
        wanted: the client asked for reports.
        reports: decoded reports by choice.
    """

    def __init__(self, wanted: bool, prompts: int = 1, samples: int = 1) -> None:
        self.wanted = wanted
        self.reports: dict[int, dict[str, Any]] = {}
        self._prompts, self._samples = prompts, samples
        self._finished: set[int] = set()
        self._runs: list[dict[str, Any]] = []

    @property
    def complete(self) -> bool:
        """Every choice has ended, so what is still to come only closes the response."""
        return len(self._finished) >= self._prompts * self._samples

    @property
    def awaits_prompt_run(self) -> bool:
        """The next output of the tokenizer manager belongs to the run that computes a prompt for its choices."""
        return self._samples > 1 and len(self._runs) < self._prompts

    async def prompt_run(self, outputs: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
        """Pass on the outputs of such a run, and keep its counts."""
        async for out in outputs:
            self._runs.append({k: v for k, v in out["meta_info"].items() if k in _COUNTS})
            yield out

    def publish(self, out: Any) -> Any:
        """Take the scheduler's field out of one output of the tokenizer manager, and put the report in if wanted.

        SGLang fills the field of *every* request of a batch once one of them has it; ordinary responses must not
        show it.
        """
        for i, item in enumerate(out) if isinstance(out, list) else [(out.get("index", 0), out)]:
            meta = item.get("meta_info")
            if meta is not None:
                self._publish(i, meta)
        return out

    def _publish(self, index: int, meta: dict[str, Any]) -> None:
        if self._runs:
            meta.update(self._runs[index // self._samples])
        texts = [t for t in meta.pop(KEY, None) or () if isinstance(t, str)]
        if texts and self.wanted:
            self.reports[index] = json.loads(texts[-1])
        if meta.get("finish_reason") is not None:
            self._finished.add(index)
            if index in self.reports:
                meta[KEY] = self.reports[index]


def prompt_run(original: Any, manager: Any, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
    """Around ``TokenizerManager._wait_one_response``: watch the runs that compute prompts for several choices."""
    outputs = original(manager, obj, request)
    delivery = shared_prompts.get()
    return delivery.prompt_run(outputs) if delivery is not None and delivery.awaits_prompt_run else outputs


def cached_details(original: Any, count: int) -> Any:
    """Around ``UsageProcessor._details_if_cached``, which makes null of 0: not where the client counts on the figure."""
    return protocol.PromptTokensDetails(cached_tokens=count) if uses_hypic.get() else original(count)


def into_response(response: Any, handler: Any, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
    """After ``_build_chat_response`` and ``_build_completion_response``: reports into ``sglext.hypic``."""
    reports = [item["meta_info"].get(KEY) for item in ret]
    if any(reports) and hasattr(response, "sglext"):
        response.sglext = response.sglext or protocol.SglExt()
        response.sglext.hypic = reports
    return response


def into_stream(
    original: Any, handler: Any, adapted_request: Any, request: Any, raw_request: Any
) -> AsyncGenerator[str, None]:
    """Around ``_generate_chat_stream`` and ``_generate_completion_stream``: reports into the last chunk."""
    chunks = original(handler, adapted_request, request, raw_request)
    handover = getattr(adapted_request, "handover", None)
    if not (isinstance(handover, Handover) and handover.options.report):
        return chunks
    return _with_report(chunks, adapted_request)


async def _with_report(chunks: AsyncIterator[str], adapted_request: Any) -> AsyncGenerator[str, None]:
    """Pass chunks on at once, but once generation has ended keep one back, to see which is the last."""
    kept: str | None = None
    async with aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            if kept is not None:
                yield _attach(kept, adapted_request.delivery) if chunk.startswith(_DONE) else kept
                kept = None
            delivery = adapted_request.delivery
            if delivery is not None and delivery.complete and not chunk.startswith(_DONE):
                kept = chunk
            else:
                yield chunk
    if kept is not None:
        yield kept


def _attach(chunk: str, delivery: Delivery) -> str:
    """The chunk with the reports under ``sglext.hypic``; unchanged if it is an error or there are none."""
    body = json.loads(chunk.removeprefix(_DATA))
    if "choices" not in body or not delivery.reports:
        return chunk
    last = max(delivery.reports)
    reports = [delivery.reports.get(i) for i in range(last + 1)]
    body["sglext"] = {**(body.get("sglext") or {}), KEY: reports}
    return _DATA + json.dumps(body, ensure_ascii=False, separators=(",", ":")) + "\n\n"
