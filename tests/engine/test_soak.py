"""P5 over 140 requests, in both ways in which SGLang keeps the states of a hybrid."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypic.check.selfcheck import Plan, check_model

NO_BUFFER = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
EXTRA_BUFFER = {"mamba_radix_cache_strategy": "extra_buffer"}


@pytest.mark.parametrize(
    ("name", "flags", "seed"),
    [("qwen3next", NO_BUFFER, 2), ("qwen35", EXTRA_BUFFER, 12)],
    ids=["states at ends", "states tracked, overlap"],
)
def test_nothing_is_left_behind(name: str, flags: dict[str, Any], seed: int, tiny_model: Callable[[str], Path]) -> None:
    plan = Plan(checks=("P5",), soak=140, seed=seed, flags=flags)
    (result,) = check_model(name, tiny_model(name), plan, lambda *_: None)
    assert result.status == "passed", result.detail
    assert result.n > 100
    # It was a soak: what it is there for did happen.
    for event in ("(\\d+) aborted", "(\\d+) retracted", "compiled (\\d+)", "waited (\\d+)", "hit_device (\\d+)"):
        found = re.search(event, result.detail)
        assert found and int(found[1]) > 0, f"{event} not in {result.detail}"
