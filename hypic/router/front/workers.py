"""HTTP from the front to its workers: one client, prompts, aborts, and what goes to all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson

from hypic.engine.http.trusted import HEADER
from hypic.router.front.wire import WorkerError, error_of, events

_CONNECT_SECONDS = 5.0
_CONTROL_SECONDS = 300.0
"""For what goes to all workers: loading an adapter takes a while."""


class Workers:
    """A client without a limit of connections: what queues, queues in a worker, where its scheduler sees it.

    Args:
        token: the secret that workers know their router by.
        api_key: SGLang's ``--api-key``, which the workers have too; "" if none.
    """

    def __init__(self, token: str, api_key: str = ""):
        self._headers = {HEADER: token, "content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A kept connection may be closed by the worker in the moment it is used, which cannot be told from its death.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(self, http: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a worker's answer.

        Raises:
            WorkerError: it answered with an error.
            aiohttp.ClientError, OSError: it is gone, or went away before its last chunk.
        """
        async with self._client.post(f"{http}/generate", data=orjson.dumps(body)) as response:
            if response.content_type != "text/event-stream":
                chunk = _json(await response.read())
                if response.status != 200 or error_of(chunk):
                    error = error_of(chunk) or WorkerError(response.status, str(chunk))
                    raise WorkerError(response.status if response.status != 200 else error.status, str(error))
                yield chunk
                return
            finished = False
            async for chunk in events(response.content.iter_any()):
                if (broken := error_of(chunk)) is not None:
                    raise broken
                finished = chunk["meta_info"].get("finish_reason") is not None
                yield chunk
            if not finished:
                raise aiohttp.ServerDisconnectedError("the answer ended in the middle")

    async def answers(self, http: str) -> bool:
        """Whether a worker's HTTP server is up."""
        try:
            async with self._client.get(f"{http}/model_info", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    async def abort(self, http: str, rid: str) -> None:
        """Best effort: a worker that does not hear it has other troubles."""
        try:
            timeout = aiohttp.ClientTimeout(total=10)
            async with self._client.post(f"{http}/abort_request", data=orjson.dumps({"rid": rid}), timeout=timeout):
                pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass

    async def ask_all(
        self, workers: Mapping[str, str], method: str, path: str, body: Any = None
    ) -> dict[str, tuple[int, Any]]:
        """The same request to all `workers` (name: address), its body JSON, or bytes as they are. Status and body of each;
        status 0 where none came."""
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)

        async def one(http: str) -> tuple[int, Any]:
            timeout = aiohttp.ClientTimeout(total=_CONTROL_SECONDS)
            try:
                async with self._client.request(method, http + path, data=data, timeout=timeout) as response:
                    return response.status, _json(await response.read())
            except (TimeoutError, aiohttp.ClientError, OSError) as e:
                return 0, f"{type(e).__name__}: {e}"

        answers = await asyncio.gather(*map(one, workers.values()))
        return dict(zip(workers, answers, strict=True))


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
