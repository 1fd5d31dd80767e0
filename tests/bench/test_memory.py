"""`python -m hypic.bench.memory`: a smaller GPU by pretence, and what is made of plans and servers. Its servers run by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hypic.bench.memory import H100_MIB, Case, arena_bytes, cases, front_nvidia_smi, table
from hypic.bench.workload import Workload


def test_sglang_reads_the_smaller_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.utils.common import get_nvgpu_memory_capacity

    real = tmp_path / "real"
    real.mkdir()
    (real / "nvidia-smi").write_text("#!/bin/sh\necho 143771\n")
    (real / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{real}:{os.environ['PATH']}")
    assert get_nvgpu_memory_capacity() == 143771
    (tmp_path / "front").mkdir()
    front_nvidia_smi(tmp_path / "front", H100_MIB)
    monkeypatch.setenv("PATH", f"{tmp_path / 'front'}:{os.environ['PATH']}")
    assert get_nvgpu_memory_capacity() == H100_MIB
    assert os.popen("nvidia-smi --query-gpu=name").read() == "143771\n", "all else is the real one's to answer"


def test_the_arena_is_what_the_server_says() -> None:
    assert arena_bytes("x\n[2026-11-30 17:29:45] hypic: artifact arena of 1024.5 MiB on cuda\n") == 2049 << 19
    assert arena_bytes("nothing") == 0


def test_plan_and_server_stand_side_by_side() -> None:
    assert [c.total_mib for c in cases(cpu=False).values()] == [None, H100_MIB, H100_MIB] and list(cases(cpu=True)) == [
        "whole"
    ]
    plan = {
        "arena_bytes": 15 << 30,
        "arena_source": "an estimate",
        "segments": [{"tokens": 2048, "bytes": 1, "fit": 149}],
    }
    well = Case(
        name="whole GPU",
        total_mib=None,
        flags=[],
        plan=plan,
        arena_bytes=16 << 30,
        kv_tokens=10,
        fit=159,
        cold=0,
        warm=3,
    )
    small = Case(
        name="80 GB",
        total_mib=H100_MIB,
        flags=[],
        plan={"problems": ["too small"]},
        failed="no server: too small",
    )
    lines = list(table([well, small], Workload()))
    assert (
        "| whole GPU | 15,360 | 16,384 | 149 | 159 | 10 | 0 | 3 |" in lines
        and "| 80 GB |  |  |  |  |  |  |  |" in lines
    )
    assert "* 80 GB, hypic doctor: too small" in lines
    assert lines[-1] == "* 80 GB: no server: too small"
