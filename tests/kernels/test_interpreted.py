"""The Triton kernels under Triton's interpreter, and through its compiler for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import INTERPRETED

HERE = Path(__file__).parent
pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="this is the process it would start")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run compiled, on the GPU")
def test_triton_kernels_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


KIMI = {"hk": 32, "hv": 32, "dk": 128, "dv": 128, "channel_gates": True}
QWEN35 = {"hk": 16, "hv": 32, "dk": 128, "dv": 128, "kv_heads": 2, "kv_dim": 256}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-35b-a3b": QWEN35,
    "qwen3.5-35b-a3b, states in bf16": QWEN35 | {"state_dtype": torch.bfloat16},
    "qwen3.5-35b-a3b, T in int8": QWEN35 | {"state_dtype": torch.bfloat16, "operator_dtype": torch.int8},
    "odd": {"hk": 1, "hv": 3, "dk": 48, "dv": 80, "kv_heads": 3, "kv_dim": 24},
}


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_compile_for_hopper(shape: dict[str, Any]) -> None:
    """They fit into shared memory and spill no registers (a spill is a regression in speed)."""
    from hopper import compile_all

    reports = compile_all(**shape)
    assert len(reports) == 15
    for name, report in reports:
        assert report.shared_bytes <= 227 * 1024, f"{name}: {report}"
        assert report.spill_bytes == 0, f"{name}: {report}"


MAMBA2: dict[str, dict[str, Any]] = {
    "nemotron-3-nano-30b-a3b": {"h": 64, "g": 8, "dv": 64, "dk": 128},
    "granite-4-h-small, states in bf16": {"h": 128, "g": 1, "dv": 64, "dk": 128, "state_dtype": torch.bfloat16},
    "odd": {"h": 3, "g": 1, "dv": 80, "dk": 48},
}


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize("shape", MAMBA2.values(), ids=MAMBA2)
def test_mamba2_kernels_compile_for_hopper(shape: dict[str, Any]) -> None:
    from hopper import compile_mamba2

    reports = compile_mamba2(**shape)
    assert [name for name, _ in reports] == [
        "_convolve_kernel", "_chain_kernel", "_log_decay_kernel", "_decay_end_states_kernel",
    ]  # fmt: skip
    for name, report in reports:
        assert report.shared_bytes <= 227 * 1024, f"{name}: {report}"
        assert report.spill_bytes == 0, f"{name}: {report}"


LIGHTNING: dict[str, dict[str, Any]] = {
    "ring-mini-linear-2.0": {"h": 16, "d": 128, "rotary": 64},
    "no rope, states in bf16": {"h": 16, "d": 128, "rotary": 0, "state_dtype": torch.bfloat16},
    "odd": {"h": 3, "d": 80, "rotary": 20},
}


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize("shape", LIGHTNING.values(), ids=LIGHTNING)
def test_lightning_kernels_compile_for_hopper(shape: dict[str, Any]) -> None:
    from hopper import compile_lightning

    reports = compile_lightning(**shape)
    assert [name for name, _ in reports] == ["_lightning_chain_kernel", "_decay_end_states_kernel"]
    for name, report in reports:
        assert report.shared_bytes <= 227 * 1024, f"{name}: {report}"
        assert report.spill_bytes == 0, f"{name}: {report}"


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize("shape", [KIMI, {"hk": 1, "hv": 3, "dk": 48, "dv": 80, "channel_gates": True}])
def test_kda_kernels_compile_for_hopper(shape: dict[str, Any]) -> None:
    from hopper import compile_all

    reports = compile_all(**shape)
    assert len(reports) == 10
    for name, report in reports:
        assert report.shared_bytes <= 227 * 1024, f"{name}: {report}"
        assert report.spill_bytes == 0, f"{name}: {report}"


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
def test_the_start_up_proof_compiles_for_hopper() -> None:
    """It fits, and compiles in seconds: nothing caches it on a machine's first start."""
    from hopper import compile_start_up_proof

    reports = compile_start_up_proof(hk=16, hv=32, dk=128, dv=128)
    assert len(reports) == 7
    for name, report in reports:
        assert report.shared_bytes <= 227 * 1024, f"{name}: {report}"
        assert report.ptx_bytes <= 400_000, f"{name}: {report}"
