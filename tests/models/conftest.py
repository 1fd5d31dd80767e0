from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.task import World

ALMANAC = Path(__file__).parents[2] / "models" / "almanac"
SMALL: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
)


@pytest.fixture(scope="session")
def world() -> World:
    return World(ALMANAC)
