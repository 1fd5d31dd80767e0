"""Real sockets for the tests of the router's package."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypic.router.transport.security import make_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for ipc:// sockets (pytest's own are too long for a socket's name)."""
    path = make_folder()
    yield path
    shutil.rmtree(path)
