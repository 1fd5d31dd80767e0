"""One real worker for all tests of this folder; its router and its only peer are the test."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.server.serving", "tests.cases.driving", "tests.worker.lone_router")
from hypic.router.transport.security import make_folder  # noqa: E402
from tests.cases.driving import Writer  # noqa: E402
from tests.server.serving import Server, serving  # noqa: E402
from tests.worker.lone_router import LoneRouter  # noqa: E402

ARENA_BYTES = 4 << 20
"""Room for some twenty short segments of the tiny model, or for one of 3,000 tokens and a few short ones."""


@pytest.fixture(scope="session")
def cluster(tiny_model: Callable[[str], Path]) -> Iterator[tuple[LoneRouter, Server]]:
    folder = make_folder()
    router = LoneRouter(folder)
    flags = ("--hypic-router", router.control, "--hypic-worker", "w0", "--hypic-data", f"ipc://{folder}/w0")
    more = ("--hypic-memory", str(ARENA_BYTES), "--enable-metrics", "--chunked-prefill-size", "512")
    try:
        with serving(tiny_model("qwen35"), *flags, *more) as server:
            yield router, server
    finally:
        router.close()
        shutil.rmtree(folder)


@pytest.fixture
def server(cluster: tuple[LoneRouter, Server]) -> Iterator[Server]:
    """The worker, its store empty; after every test nothing is in flight, locked or lost (exact sets)."""
    _, server = cluster
    server.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    yield server
    server.audit()


@pytest.fixture
def router(cluster: tuple[LoneRouter, Server], server: Server) -> LoneRouter:
    """The router, which has heard nothing yet."""
    router, _ = cluster
    router.forget()
    return router


@pytest.fixture
def write(request: pytest.FixtureRequest) -> Writer:
    return Writer(request.node.nodeid)
