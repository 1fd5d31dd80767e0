"""One real cluster of three workers for all tests of this folder: its start takes most of the time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.server.serving", "tests.cases.driving", "tests.cluster.launched")
from hypic.router.transport.security import make_folder  # noqa: E402
from tests.cases.driving import Writer  # noqa: E402
from tests.cluster.launched import Cluster, launched  # noqa: E402
from tests.server.naming import Names  # noqa: E402
from tests.server.serving import TextWriter  # noqa: E402

ARENA_BYTES = 16 << 20
FLAGS = (
    "--hypic-memory",
    str(ARENA_BYTES),
    "--hypic-methods",
    "seam,seam-24",
    "--log-level",
    "error",
    "--enable-cache-report",
    "--enable-metrics",
)


@pytest.fixture(scope="session")
def cluster_of_session(tiny_model: Callable[[str], Path]) -> Iterator[Cluster]:
    folder = make_folder()
    try:
        with launched(tiny_model("qwen35"), folder, *FLAGS) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cluster(cluster_of_session: Cluster) -> Iterator[Cluster]:
    """The cluster; after every test all workers are alive, and none has a request, lock or slot left over (exact sets)."""
    yield cluster_of_session
    cluster_of_session.audit()


@pytest.fixture
def names(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Names]:
    made = Names(cluster, f"tenant of {request.node.nodeid}")
    yield made
    made.clear()


@pytest.fixture
def write(request: pytest.FixtureRequest) -> Writer:
    return Writer(request.node.nodeid)


@pytest.fixture
def text(request: pytest.FixtureRequest) -> TextWriter:
    return TextWriter(request.node.nodeid)
