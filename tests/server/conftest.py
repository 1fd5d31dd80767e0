"""One real server for all tests of this folder, and writers of prompts that no other test has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.server.serving", "tests.cases.driving")
from tests.cases.driving import Writer  # noqa: E402
from tests.server.serving import Server, TextWriter, serving  # noqa: E402

ARENA_BYTES = 4 << 20
"""Room for some twenty short segments of the tiny model, or for one of 3,000 tokens and a few short ones."""
NAMED_BYTES = 100_000
"""Host memory for some thirty short segments with an id."""
FLAGS = (
    "--enable-metrics",
    "--enable-cache-report",
    "--chunked-prefill-size",
    "512",
    "--hypic-segment-memory",
    str(NAMED_BYTES),
    "--hypic-methods",
    "seam,seam-24",
)


@pytest.fixture(scope="session")
def server_of_session(tiny_model: Callable[[str], Path]) -> Iterator[Server]:
    with serving(tiny_model("qwen35"), "--hypic-memory", str(ARENA_BYTES), *FLAGS) as server:
        yield server


@pytest.fixture
def server(server_of_session: Server) -> Iterator[Server]:
    """The server; after every test no request, lock or slot is left over (exact sets)."""
    yield server_of_session
    server_of_session.audit()


@pytest.fixture
def write(request: pytest.FixtureRequest) -> Writer:
    return Writer(request.node.nodeid)


@pytest.fixture
def text(request: pytest.FixtureRequest) -> TextWriter:
    return TextWriter(request.node.nodeid)
