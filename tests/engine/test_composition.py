"""The start-up proof that composing by (T, S) equals running the tokens: it holds, and each wrong part turns it red."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hypic.artifact.layout import LinearShape
from hypic.engine.composition import ComposeError, check_composition
from hypic.engine.families import gdn
from hypic.kernels._common import blob_view

SHAPE = LinearShape((3, 5), 4, 16, 24, 2 * 2 * 16 + 4 * 24, 3, "bfloat16", "bfloat16")


class RadixLinearAttention(torch.nn.Module):
    """What the proof reads of SGLang's module, with gates under which T stays of order 1."""

    activation, bias = "silu", None
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = 2, 4, 16, 24

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(layer_id)
        self.layer_id = layer_id
        self.conv_weights = torch.randn(SHAPE.conv_channels, SHAPE.conv_width + 1, generator=rng)
        self.A_log = torch.randn(SHAPE.heads, generator=rng) - 6.0
        self.dt_bias = torch.randn(SHAPE.heads, generator=rng)


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.ModuleList([RadixLinearAttention(i) for i in SHAPE.layer_ids])


def test_it_holds(model: torch.nn.Module) -> None:
    assert 0 < check_composition(model, SHAPE) < 1e-5


@pytest.mark.parametrize("part", ["T", "S", "side"])
def test_a_wrong_part_is_found(part: str, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """T that is the identity, S that keeps the seam, and T on the wrong side."""
    transition, end_states = gdn.gdn_transition, gdn.gdn_end_states

    def wrong_transition(k: Any, g: Any, beta: Any, *, arena: Any, t_off: int, **rest: Any) -> None:
        transition(k, g, beta, arena=arena, t_off=t_off, **rest)
        t = blob_view(arena, t_off, (4, 16, 16), torch.float32)
        t.copy_(torch.eye(16) if part == "T" else t.mT.clone())

    def wrong_end_states(ssm_pool: Any, seam_states: Any, **rest: Any) -> None:
        end_states(ssm_pool, torch.zeros_like(seam_states), **rest)

    if part == "S":
        monkeypatch.setattr(gdn, "gdn_end_states", wrong_end_states)
    else:
        monkeypatch.setattr(gdn, "gdn_transition", wrong_transition)
    with pytest.raises(ComposeError, match="off by"):
        check_composition(model, SHAPE)


def test_a_missing_layer_is_named(model: torch.nn.Module) -> None:
    with pytest.raises(ComposeError, match=r"layers \[5\]"):
        check_composition(model[:1], SHAPE)
