"""Hybrids with Lightning attention."""

from __future__ import annotations

from typing import Any

from hypic.check.tiny_models.common import COMMON


def ringlinear() -> Any:
    """Lightning attention that rotates half of each key, and grouped-query attention; the MLPs are dense."""
    from hypic.check.bailing import BailingLinearConfig, BailingMoeLinearV2ForCausalLM

    config = BailingLinearConfig(
        **COMMON,
        head_dim=32,
        layer_group_size=2,
        group_norm_size=2,
        partial_rotary_factor=0.5,
        rope_theta=10000.0,
        use_qk_norm=True,
        num_experts=1,
        first_k_dense_replace=0,
        architectures=["BailingMoeLinearV2ForCausalLM"],
    )
    return BailingMoeLinearV2ForCausalLM(config)
