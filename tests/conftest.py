"""Fixtures shared by all tests. CPU mode and one OpenMP thread are set before anything imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment
from tests.schedule import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401

os.environ.setdefault(CPU_MODE, "1")
# SGLang loads plugins once a process, at the first import that asks for them: hypic's have to be among them.
os.environ.setdefault("HYPIC_ENABLED", "1")
set_environment()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Path]:
    """``tiny_model("llama")``: path of that tiny checkpoint, built on first use."""
    from hypic.check.tiny_models import build

    return build


@pytest.fixture(scope="module")
def engine_for(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Any]]:
    """``engine_for("llama", page_size=16)``: a running engine; the one before it, if different, is shut down."""
    from hypic.check.engines import running_engine

    with ExitStack() as running:
        current: dict[str, Any] = {}

        def start(name: str, **kwargs: Any) -> Any:
            wanted = repr((name, sorted(kwargs.items())))
            if current.get("wanted") != wanted:
                running.close()
                current["engine"] = running.enter_context(running_engine(tiny_model(name), **kwargs))
                current["wanted"] = wanted
            return current["engine"]

        yield start


@pytest.fixture
def nan_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised floating-point tensors with NaN, so that reading what nobody wrote turns a test red."""
    import torch

    def poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = original(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return make

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
