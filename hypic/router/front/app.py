"""SGLang's FastAPI app as the router serves it: a few routes of ours in front, and what the router cannot do refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hypic.router.coordinator import Coordinator
from hypic.router.schedule import Policy

if TYPE_CHECKING:
    from hypic.router.front.manager import RouterManager

_SERVED = (
    "/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models",
    "/v1/segments", "/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize", "/api/", "/invocations", "/vertex_generate",
    "/model_info", "/get_model_info", "/weight_version", "/get_weight_version", "/server_info", "/get_server_info",
    "/abort_request", "/parse_function_call", "/separate_reasoning", "/flush_cache", "/load_lora_adapter",
    "/unload_lora_adapter", "/update_weights_from_disk", "/start_profile", "/stop_profile", "/health",
    "/health_generate", "/ping", "/metrics", "/workers", "/docs", "/openapi.json",
)  # fmt: skip
"""Paths that work behind the router; those below them do, too."""
_BY_PATH = ("/load_lora_adapter_from_tensors",)
"""Exceptions from that."""
_WATCH_EVERY = 0.2
_SELF = "router"


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """What `POST /workers` may ask for.

    Attributes:
        drain, resume: names of workers that get nothing new from now on, and of those that do again.
        policy: how segments are spread from now on.
    """

    drain: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    policy: Policy | None = None

    def apply(self, coordinator: Coordinator) -> None:
        """All of it, or nothing. Raises ValueError: a worker is not alive, or named for both."""
        if both := sorted({*self.drain} & {*self.resume}):
            raise ValueError(f"drain and resume both name {', '.join(both)}; name a worker once")
        known = coordinator.cluster.workers
        if missing := sorted({*self.drain, *self.resume} - known.keys()):
            raise ValueError(f"no worker {', '.join(missing)} is alive; there are {', '.join(sorted(known)) or 'none'}")
        for names, drained in ((self.drain, True), (self.resume, False)):
            for name in names:
                known[name].drained = drained
        coordinator.policy = self.policy or coordinator.policy


class Refuse:
    """ASGI middleware: what needs one scheduler, and not a cluster, is answered with 501."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "lifespan" and not _served(path):
            text = f"{path}: the router does not pass this on; ask a worker directly (GET /workers lists them)"
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1011, "reason": text[:120]})
                return
            await JSONResponse({"error": {"message": text, "code": 501}}, 501)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _served(path: str) -> bool:
    def below(base: str) -> bool:
        return path == base or path.startswith(base if base.endswith("/") else f"{base}/")

    return any(map(below, _SERVED)) and path not in _BY_PATH


def extend(app: Any, manager: RouterManager, status_file: Path | None) -> None:
    """Put our routes before SGLang's, and the router's life into the app's.

    Args:
        app: SGLang's.
        status_file: where the launcher writes what it knows of the processes.
    """

    async def health(_: Request) -> Response:
        able = manager.router.coordinator.cluster.available()
        return JSONResponse({"workers": len(able)}, 200 if able else 503)

    async def metrics(_: Request) -> Response:
        return Response(manager.metrics.text(), media_type="text/plain; version=0.0.4")

    async def workers(_: Request) -> Response:
        return Response(msgspec.json.encode(snapshot(manager, _processes(status_file))), media_type="application/json")

    async def change(request: Request) -> Response:
        """Drain workers, have them back, or change the policy."""
        try:
            wanted = msgspec.json.decode(await request.body(), type=Change)
            wanted.apply(manager.router.coordinator)
        except (msgspec.MsgspecError, ValueError) as e:
            return JSONResponse({"error": {"message": str(e), "code": 400}}, 400)
        return await workers(request)

    routes = {"/health": health, "/health_generate": health, "/ping": health, "/metrics": metrics, "/workers": workers}
    app.router.routes[:0] = [Route(path, endpoint, methods=["GET"]) for path, endpoint in routes.items()]
    app.router.routes.insert(0, Route("/workers", change, methods=["POST"]))
    app.add_middleware(Refuse)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> Any:
        async with inner(app) as state:
            await manager.router.start()
            watching = asyncio.create_task(_watch(manager, status_file))
            try:
                yield state
            finally:
                watching.cancel()
                await manager.close()

    app.router.lifespan_context = lifespan


async def _watch(manager: RouterManager, status_file: Path | None) -> None:
    """A worker whose process has ended is lost at once."""
    while status_file is not None:
        await asyncio.sleep(_WATCH_EVERY)
        for name, process in _processes(status_file).items():
            if not process["pid"] and name in manager.alive():
                manager.router.disown(name)


def snapshot(manager: RouterManager, processes: Mapping[str, Any]) -> dict[str, Any]:
    """What `/workers` shows."""
    router, cluster = manager.router, manager.router.coordinator.cluster
    hellos, costs = router.coordinator.hellos(), router.measured.costs
    workers = []
    for name in sorted({*hellos, *processes} - {_SELF}):
        entry: dict[str, Any] = {
            "name": name,
            "state": "absent",
            **processes.get(name, {}),
        }
        if (hello := hellos.get(name)) is not None:
            worker, beat = cluster.workers[name], router.heartbeats.get(name)
            entry |= {
                "state": "drained" if worker.drained else "alive",
                "http": hello.http,
                "running": worker.running,
                "linking": worker.linking,
                "queued_tokens": worker.queued_tokens,
                "tokens_per_s": round(worker.tokens_per_s, 1),
                "arena_bytes": hello.capacity,
                "arena_free": beat.free if beat is not None else hello.free,
                "artifacts": cluster.directory.count(name),
                "compiling": sum(f.worker == name for f in cluster.flights.values()),
            }
        workers.append(entry)
    return {
        "router": processes.get(_SELF, {}),
        "workers": workers,
        "policy": router.coordinator.policy,
        "costs": msgspec.to_builtins(costs),
        "requests": router.recorder.timelines(),
    }


def _processes(status_file: Path | None) -> dict[str, Any]:
    """The launcher's view, by worker name; nothing where there is no launcher."""
    if status_file is None:
        return {}
    try:
        return dict(json.loads(status_file.read_text()))
    except (OSError, ValueError):
        return {}
