"""One real worker for all tests of this folder; its router and its only peer are the test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.server.serving", "tests.cases.driving", "tests.worker.lone_router")
from hypic.engine.http.trusted import VARIABLE  # noqa: E402
from hypic.router.transport.security import make_folder  # noqa: E402
from tests.cases.driving import Writer  # noqa: E402
from tests.server.serving import Server, serving  # noqa: E402
from tests.worker.lone_router import SECRET, LoneRouter  # noqa: E402

ARENA_BYTES = 4 << 20
"""Room for some twenty short segments of the tiny model, or for one of 3,000 tokens and a few short ones."""


@contextmanager
def worker(model: Path, *flags: str) -> Iterator[tuple[LoneRouter, Server]]:
    """A worker and its router."""
    folder = make_folder()
    router = LoneRouter(folder)
    member = (
        "--hypic-router",
        router.control,
        "--hypic-worker",
        "w0",
        "--hypic-data",
        f"ipc://{folder}/w0",
        *router.member,
    )
    more = ("--hypic-memory", str(ARENA_BYTES), "--enable-metrics", "--chunked-prefill-size", "512")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = SECRET
    try:
        with serving(model, *member, *more, *flags) as server:
            yield router, server
    finally:
        os.environ.pop(VARIABLE) if before is None else os.environ.update({VARIABLE: before})
        router.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(tiny_model: Callable[[str], Path]) -> Iterator[tuple[LoneRouter, Server]]:
    with worker(tiny_model("qwen35")) as running:
        yield running


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
