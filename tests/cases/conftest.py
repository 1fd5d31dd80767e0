"""Engines of the cases: one alive at a time, started when a test wants another than the last one had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from hypic.check.judge import Judge
from hypic.config import HypicConfig

pytest.register_assert_rewrite("tests.cases.driving")
from tests.cases.driving import Driver, Writer  # noqa: E402

METHODS = {"qwen35": "seam,seam-24", "llama": "seam,seam-24,legolink-0"}
"""What requests may pick; the first is the default."""
SLOW_CHUNK = 64
"""Prefill chunk that makes a compile of a few thousand tokens last for a second."""


class EngineRoom:
    """Holds the one engine or server that is alive."""

    def __init__(self) -> None:
        self._key: str | None = None
        self._running = ExitStack()
        self._current: Any = None

    def get(self, key: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        """What ``start`` made under ``key``; anything else that runs is ended first."""
        if key != self._key:
            self.close()
            self._current = self._running.enter_context(start())
            self._key = key
        return self._current

    def close(self) -> None:
        self._key = self._current = None
        self._running.close()


@pytest.fixture(scope="session")
def engine_room() -> Iterator[EngineRoom]:
    room = EngineRoom()
    yield room
    room.close()


@pytest.fixture(scope="session")
def driver_for(engine_room: EngineRoom, tiny_model: Callable[[str], Path]) -> Callable[..., Driver]:
    """``driver_for("llama", memory=1 << 20, flags={"page_size": 16})``: a running engine with hypic."""

    def get(
        name: str, *, flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None, **config: Any
    ) -> Driver:
        make = partial(Driver, tiny_model(name), HypicConfig(**config), env=env, **(flags or {}))
        return engine_room.get(f"{name} {flags} {env} {config}", make)

    return get


@pytest.fixture(scope="session")
def judge_for(tiny_model: Callable[[str], Path]) -> Callable[[str], Judge]:
    """``judge_for("llama")``: the oracle of that model."""
    return cache(lambda name: Judge(name, str(tiny_model(name)), 0))


@pytest.fixture(scope="session", params=["qwen35", "llama"])
def model(request: pytest.FixtureRequest) -> str:
    """A hybrid under the overlap scheduler with tracked states, and an attention-only model."""
    return request.param


@pytest.fixture
def engine(model: str, driver_for: Callable[..., Driver]) -> Driver:
    return driver_for(model, methods=METHODS[model])


@pytest.fixture
def judge(model: str, judge_for: Callable[[str], Judge]) -> Judge:
    return judge_for(model)


@pytest.fixture
def write(request: pytest.FixtureRequest) -> Writer:
    return Writer(request.node.nodeid)


@pytest.fixture(autouse=True)
def nothing_left_behind(engine_room: EngineRoom) -> Iterator[None]:
    """After every case: no request, lock or slot is left over (exact sets)."""
    yield
    if isinstance(engine_room._current, Driver):
        engine_room._current.audit()
