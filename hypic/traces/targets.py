"""What a replay asks: an engine of this process, or a server with SGLang's endpoints."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from hypic.traces.placement import Placement
from hypic.traces.play import Seen
from hypic.traces.prompts import Prompt

FLUSH_TRIES = 100


class EngineTarget:
    """An ``sglang.Engine``; segments are sent where `hypic` is true."""

    def __init__(self, engine: Any, hypic: bool) -> None:
        self._manager, self._hypic = engine.tokenizer_manager, hypic

    async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncGenerator[Seen, None]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        rid = uuid.uuid4().hex
        request: Any = GenerateReqInput(
            rid=rid, input_ids=prompt.ids, sampling_params=_sampling("max_new_tokens", new_tokens), stream=True
        )
        request.extra_key = prompt.tenant
        if self._hypic and prompt.bounds:
            request.hypic = {"segments": prompt.bounds}
        ended = False
        try:
            async for chunk in self._manager.generate_request(request, None):
                meta = chunk["meta_info"]
                reason = meta.get("finish_reason")
                ended = bool(reason)
                if reason and reason.get("type") == "abort":
                    raise RuntimeError(reason.get("message") or "aborted")
                yield Seen(meta["completion_tokens"], meta["cached_tokens"])
        finally:
            if not ended:
                self._manager.abort_request(rid)

    async def flush(self) -> None:
        """Aborted requests may still run for a moment, and SGLang flushes only when none does."""
        for _ in range(FLUSH_TRIES):
            if (await self._manager.flush_cache()).success:
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("the engine does not flush its cache: requests are still running")


class HttpTarget:
    """``/v1/completions`` of a server. Use as an async context manager; `hypic` as for EngineTarget.

    Args:
        url: such as http://127.0.0.1:30000, with or without /v1. key: of the API, if it wants one.
    """

    def __init__(self, url: str, *, hypic: bool, model: str = "default", key: str | None = None) -> None:
        self._url, self._hypic, self._model = url.rstrip("/").removesuffix("/v1"), hypic, model
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: Any = None

    async def __aenter__(self) -> HttpTarget:
        import aiohttp

        no_limit = aiohttp.ClientTimeout(total=None)  # the replay has its own
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=no_limit, headers=self._headers, read_bufsize=1 << 22
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncGenerator[Seen, None]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt.ids,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **_sampling("max_tokens", new_tokens),
        }
        if prompt.tenant:
            body["cache_salt"] = prompt.tenant
        if self._hypic and prompt.bounds:
            body["hypic"] = {"segments": prompt.bounds}
        tokens = cached = chunks = 0
        async with aclosing(self._events("/v1/completions", body)) as events:
            async for event in events:
                chunks += bool(event.get("choices"))
                usage = event.get("usage") or {}
                tokens = usage.get("completion_tokens", chunks)
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or cached
                yield Seen(tokens, cached)

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """What comes back in a stream. Raises RuntimeError for an error."""
        async with self._session.post(f"{self._url}{path}", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if not line.startswith(b"data:") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(str(event["error"])[:300])
                yield event

    async def flush(self) -> None:
        for _ in range(FLUSH_TRIES):
            async with self._session.post(f"{self._url}/flush_cache") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{self._url}/flush_cache: status {response.status}, so runs cannot begin alike")


class GenerateTarget(HttpTarget):
    """SGLang's ``/generate``, which needs no tokenizer in the server."""

    async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncGenerator[Seen, None]:
        body: dict[str, Any] = {
            "input_ids": prompt.ids,
            "stream": True,
            "sampling_params": _sampling("max_new_tokens", new_tokens),
        }
        if prompt.tenant:
            body["extra_key"] = prompt.tenant
        if self._hypic and prompt.bounds:
            body["hypic"] = {"segments": prompt.bounds}
        async with aclosing(self._events("/generate", body)) as events:
            async for event in events:
                meta = event["meta_info"]
                if (meta.get("finish_reason") or {}).get("type") == "abort":
                    raise RuntimeError(meta["finish_reason"].get("message") or "aborted")
                yield Seen(meta["completion_tokens"], meta["cached_tokens"])


class SpreadTarget:
    """Several servers, each prompt to one of them. Use as an async context manager."""

    def __init__(self, targets: Sequence[HttpTarget], placement: Placement) -> None:
        self._targets, self._placement = targets, placement
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> SpreadTarget:
        for target in self._targets:
            await self._stack.enter_async_context(target)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def ask(self, prompt: Prompt, new_tokens: int) -> AsyncGenerator[Seen, None]:
        sent, waiting = self._placement.choose(prompt), True
        try:
            async with aclosing(self._targets[sent.server].ask(prompt, new_tokens)) as chunks:
                async for seen in chunks:
                    if waiting and seen.tokens:
                        waiting = False
                        self._placement.begun(sent)
                    yield seen
        finally:
            if waiting:
                self._placement.begun(sent)

    async def flush(self) -> None:
        await asyncio.gather(*(target.flush() for target in self._targets))
        self._placement.flushed()


def _sampling(limit: str, new_tokens: int) -> dict[str, Any]:
    return {limit: new_tokens, "temperature": 0.0, "ignore_eos": True}
