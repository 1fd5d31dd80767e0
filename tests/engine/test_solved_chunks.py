"""What SGLang's pass solves is taken from it, and only believed if T comes out as our own kernels make it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hypic.artifact.layout import LinearShape
from hypic.engine import solved_chunks
from hypic.engine.batch import NativeRow, Stage
from hypic.engine.linear import _places
from hypic.platform_cpu import torch_ops

SHAPE = LinearShape((0,), 4, 16, 24, 2 * 2 * 16 + 4 * 24, 3, "float32", "float32")


@pytest.fixture
def sglang_pass(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module with CPU mode's functions, and a wrapper as the hook makes it: set(change) puts it in."""
    from sglang.kernels.ops.attention.fla import chunk

    monkeypatch.setattr(chunk, "chunk_gated_delta_rule", torch_ops.chunk_gated_delta_rule)

    def put(change: Any = lambda result: result, hooked: bool = True) -> None:
        def solve(*args: Any, **kwargs: Any) -> Any:
            result = change(torch_ops.solve_chunks(*args, **kwargs))
            if hooked:
                solved_chunks.keep(result, *args, **kwargs)
            return result

        monkeypatch.setattr(chunk, "chunk_gated_delta_rule_fwd_intra", solve)

    return put


def agrees() -> bool:
    return solved_chunks.agrees(SHAPE, 2, torch.float32, torch.device("cpu"))


def test_it_is_believed(sglang_pass: Any) -> None:
    sglang_pass()
    assert agrees()


@pytest.mark.parametrize("wrong", [0, 2], ids=["W", "inverse"])
def test_wrong_terms_are_not(wrong: int, sglang_pass: Any, caplog: pytest.LogCaptureFixture) -> None:
    """W is that of all chunks but the seam's, the inverse that of the seam's."""
    sglang_pass(lambda result: tuple(x * (2.0 if i == wrong else 1.0) for i, x in enumerate(result)))
    with caplog.at_level(logging.WARNING):
        assert not agrees()
    assert "off by" in caplog.text and "kernels of our own" in caplog.text


def test_nothing_is_taken_where_sglang_goes_another_way(sglang_pass: Any, caplog: pytest.LogCaptureFixture) -> None:
    sglang_pass(hooked=False)
    with caplog.at_level(logging.WARNING):
        assert not agrees()
    assert "elsewhere" in caplog.text


def test_nothing_is_kept_unless_wanted(sglang_pass: Any) -> None:
    sglang_pass()
    with solved_chunks.kept(wanted=False) as found:
        solved_chunks.keep((torch.zeros(1, 3),) * 3, *[torch.zeros(1, 3)] * 4)
    solved_chunks.keep((torch.zeros(1, 3),) * 3, *[torch.zeros(1, 3)] * 4)
    assert found == []


@pytest.mark.parametrize(("kernel", "expected"), [("TritonGDNKernel", True), ("FlashInferGDNKernel", False)])
def test_only_sglangs_triton_kernels_are_known(kernel: str, expected: bool) -> None:
    dispatcher = SimpleNamespace(extend_kernel=type(kernel, (), {})())
    assert solved_chunks.usable(SimpleNamespace(kernel_dispatcher=dispatcher)) is expected
    assert not solved_chunks.usable(SimpleNamespace())


def test_places_of_compiling_rows() -> None:
    """Among native tokens alone: row 1 links, and only its long run of 40 tokens is native."""
    stage = Stage(
        natives=[NativeRow(0, 0, 30, 0), NativeRow(1, 8, 40, 38), NativeRow(2, 0, 20, 90), NativeRow(3, 0, 5, 110)]
    )
    assert _places(stage, [0, 2, 3]) == [0, 70, 90]
