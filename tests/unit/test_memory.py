"""The arena's size on a GPU: by what SGLang's own rule leaves for caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hypic.config import HypicConfig
from hypic.engine.memory import Budget, arena_of, estimated, measured, none_fits
from hypic.engine.support import Unsupported

GIB = 1 << 30
WEIGHTS = int(64.6 * GIB)
"""Of Qwen3.5-35B-A3B in bfloat16."""


def test_a_large_gpu_gives_a_quarter_of_what_is_left_for_caches() -> None:
    budget = estimated(SimpleNamespace(mem_fraction_static=0.9), 139 * GIB, WEIGHTS)
    assert budget.caches == pytest.approx((139 * 0.9 - 64.6) * GIB, rel=1e-6)
    assert arena_of(HypicConfig(), budget) == int(budget.caches / 4)
    assert arena_of(HypicConfig(memory=24 * GIB), budget) == 24 * GIB


@pytest.mark.parametrize("fraction", [0.83, 0.84, 0.87, 0.92])
def test_on_80_gb_sglang_keeps_three_quarters_of_what_is_left(fraction: float) -> None:
    """A share of the free memory would take what SGLang's rule does not leave for it: pools would come out empty."""
    free = 79 * GIB
    budget = estimated(SimpleNamespace(mem_fraction_static=fraction), free, WEIGHTS)
    arena = arena_of(HypicConfig(), budget)
    for_pools = free * fraction - WEIGHTS - arena
    assert arena > 0 and for_pools >= 3 * arena - 4


def test_what_leaves_no_pools_is_refused_with_reason_and_remedy() -> None:
    budget = Budget(free=14 * GIB, reserved=12 * GIB)
    with pytest.raises(Unsupported, match=r"no memory .* 14.00 GiB free .* less 12.00 GiB .*512MiB .*--mem-fraction"):
        arena_of(HypicConfig(memory=2 * GIB), budget)
    assert arena_of(HypicConfig(memory=2 * GIB - 1), budget) == 2 * GIB - 1
    assert Budget(free=GIB, reserved=2 * GIB).arena == 0, "SGLang refuses that itself; the arena is none of its reasons"
    assert "64 tokens, which takes 62MiB" in none_fits(10 << 20, 62 << 20, 64)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_the_budget_is_what_sglang_would_have_without_us(
    hybrid: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own function, on the same figures, plans with as many bytes; on a hybrid before it takes those of the states."""
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.mem_cache import kv_cache_configurator as theirs
    from sglang.srt.model_executor.model_runner_components import kv_pool_runtime
    from sglang.srt.utils import common

    world = SimpleNamespace(world_size=1, cpu_group=None)
    for module, name, value in (
        (theirs, "get_available_gpu_memory", lambda *_, **__: 14.5), (common, "get_available_gpu_memory", lambda *_, **__: 14.5),
        (theirs, "get_device_memory_capacity", lambda *_: 81559.0), (common, "get_device_memory_capacity", lambda *_: 81559.0),
        (theirs, "get_world_group", lambda: world), (kv_pool_runtime, "is_post_capture_kv_active", lambda **_: late),
        (theirs, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=0.9)),
        (hybrid_arch, "mambaish_config", lambda _: hybrid or None),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("sglang.srt.distributed.get_world_group", lambda: world)
    args = SimpleNamespace(pre_capture_activation_reserve_mb=lambda mib: mib / 8)
    runner: Any = SimpleNamespace(
        device="cuda",
        gpu_id=0,
        server_args=args,
        pre_model_load_memory=79.0,
        mem_fraction_static=0.9,
        model_config=None,
    )
    configurator: Any = SimpleNamespace(
        device="cuda", gpu_id=0, server_args=args, mambaish_config=hybrid or None, post_capture_kv_active=late,
        _handle_max_mamba_cache=lambda rest: rest,
    )  # fmt: skip
    planned = theirs.KVCacheConfigurator._profile_available_bytes(configurator, 79.0)
    budget = measured(runner)
    assert budget.caches == pytest.approx(planned, abs=2) and torch.tensor(budget.caches) > 0
    assert (budget.reserved > 8 * GIB) == (hybrid and late)
