"""What runs where under pytest-xdist: whole files, and folders that share a server; the longest first, the shortest last.

xdist itself begins with the files of the most tests. Here the few that start engines are the long ones: one of them that
comes last keeps one core busy and leaves the others idle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

SHARED = ("tests/cases", "tests/cluster", "tests/http", "tests/server")
"""Folders whose fixtures start engines for a whole session: on two workers they would start twice."""

SECONDS = {
    "tests/platform/test_engine_matches_hf.py": 150,
    "tests/cases": 250,
    "tests/engine/test_selfcheck.py": 240,
    "tests/server": 150,
    "tests/kernels/test_interpreted.py": 100,
    "tests/engine/test_soak.py": 87,
    "tests/cluster": 100,
    "tests/engine/test_mutations.py": 90,
    "tests/eval/test_served.py": 80,
    "tests/worker/test_worker.py": 60,
    "tests/worker/test_ranks.py": 60,
    "tests/bench/test_bench.py": 55,
    "tests/check/test_oracle.py": 40,
    "tests/http": 40,
    "tests/demo/test_demo.py": 40,
    "tests/engine/test_refusals.py": 50,
    "tests/engine/test_ordinary.py": 65,
    "tests/commands/test_doctor.py": 45,
    "tests/engine/test_pages.py": 45,
    "tests/platform/test_serve.py": 40,
    "tests/engine/test_refused_models.py": 30,
    "tests/traces/test_replay.py": 25,
}
"""CPU seconds of the longest files and of the shared folders, measured now and then: only their order matters."""


def unit(nodeid: str) -> str:
    """What the test is scheduled with: its folder or its file."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in SHARED if file.startswith(f"{folder}/")), file)


def in_order(nodeids: list[str]) -> list[int]:
    """Indices of the tests in the order in which they are to be handed out; within a unit they stay as they are."""
    units = [unit(nodeid) for nodeid in nodeids]
    tests, first = Counter(units), {u: i for i, u in reversed(list(enumerate(units)))}
    return sorted(range(len(units)), key=lambda i: (-SECONDS.get(units[i], 0), -tests[units[i]], first[units[i]], i))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # a worker of xdist: all of them hand the same order to the scheduler
        items[:] = [items[i] for i in in_order([item.nodeid for item in items])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Units(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # the order of collection is the one we want
    return Units(config, log)
