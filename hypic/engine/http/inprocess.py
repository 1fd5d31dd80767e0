"""Requests to an in-process ``sglang.Engine``, which has no argument for our options. For tests and the self-check.

All functions take the arguments of :func:`build`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any


def generate(engine: Any, **request: Any) -> Any:
    """One request, to its end. Returns and raises as :func:`agenerate`. Not from within a running event loop."""
    return engine.loop.run_until_complete(agenerate(engine, **request))


async def agenerate(engine: Any, **request: Any) -> Any:
    """One request, to its end, on ``engine.loop``.

    Returns:
        What ``Engine.generate`` returns: a dict, or a list of them for a batch or ``n`` > 1. The report, if asked for,
        is ``result["meta_info"]["hypic"]``.

    Raises:
        ValueError: what the HTTP server answers with status 400.
    """
    return await engine.tokenizer_manager.generate_request(build(engine, **request), None).__anext__()


async def stream(engine: Any, **request: Any) -> AsyncIterator[dict[str, Any]]:
    """As :func:`agenerate`, but yields SGLang's chunks as they come."""
    async for chunk in engine.tokenizer_manager.generate_request(build(engine, **request, stream=True), None):
        yield chunk


def build(
    engine: Any,
    *,
    input_ids: Sequence[Any] | None = None,
    text: str | list[str] | None = None,
    messages: Sequence[dict[str, Any]] | None = None,
    segments: Sequence[Any] | None = None,
    separator: str | None = None,
    sampling_params: dict[str, Any] | None = None,
    report: bool = True,
    method: str | None = None,
    chat: dict[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """A GenerateReqInput.

    Args:
        engine: a running ``sglang.Engine`` with the plugin enabled.
        input_ids, text, messages: the prompt, in one of these forms; the first two may be batches.
        segments: ``[[start, end], ...]`` in ``input_ids``.
        separator: cut ``text`` or the content of ``messages`` here.
        sampling_params: as SGLang has them; for ``messages`` they go on top of what the chat request says.
        report: ask for the report.
        method: the caching method.
        chat: further fields of a chat request (``tools``, ``chat_template_kwargs``, ``cache_salt``, ...).
        fields: further fields of GenerateReqInput (``return_logprob``, ``rid``, ``extra_key``, ...).
    """
    given = {"separator": separator, "segments": _lists(segments), "report": report, "method": method}
    options = {k: v for k, v in given.items() if v is not None}
    if messages is None:
        from sglang.srt.managers.io_struct import GenerateReqInput

        prompt = {"input_ids": _lists(input_ids), "text": text}
        return GenerateReqInput(**prompt, sampling_params=dict(sampling_params or {}), hypic=options, **fields)
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    handler = OpenAIServingChat(engine.tokenizer_manager, engine.template_manager)
    request = ChatCompletionRequest.model_validate({"messages": list(messages), "hypic": options, **(chat or {})})
    obj, _ = handler._convert_to_internal_request(request)
    obj.sampling_params = {**obj.sampling_params, **(sampling_params or {})}
    for name, value in fields.items():
        setattr(obj, name, value)
    return obj


def _lists(values: Any) -> Any:
    """Tuples, ranges and arrays, at any depth, as the lists that a JSON body would hold."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return [_lists(v) for v in values] if isinstance(values, Sequence) and not isinstance(values, str) else values
