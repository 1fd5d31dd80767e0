"""The order in which pytest-xdist hands out tests (tests/schedule.py)."""

from __future__ import annotations

from pathlib import Path

from tests.schedule import SECONDS, SHARED, in_order, unit

ROOT = Path(__file__).parents[2]


def test_what_is_named_is_there() -> None:
    for name in (*SECONDS, *SHARED):
        assert (ROOT / name).exists(), f"tests/schedule.py names {name}"
    assert set(SECONDS) == {unit(f"{name}::x") if name.endswith(".py") else name for name in SECONDS}, (
        "a file of a folder"
    )
    assert set(SHARED) <= set(SECONDS)


def test_long_ones_first_then_those_of_many_tests_and_none_is_torn() -> None:
    ids = [
        "a.py::one",
        "tests/http/b.py::z",
        "tests/engine/test_soak.py::s",
        "c.py::1",
        "tests/http/a.py::y",
        "c.py::2",
    ]
    assert [ids[i] for i in in_order(ids)] == [
        "tests/engine/test_soak.py::s", "tests/http/b.py::z", "tests/http/a.py::y", "c.py::1", "c.py::2", "a.py::one",
    ]  # fmt: skip
