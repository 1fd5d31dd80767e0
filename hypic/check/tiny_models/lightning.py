"""Hybrids with Lightning attention."""

from __future__ import annotations

from typing import Any

from hypic.check.tiny_models.common import COMMON, HEADS, latent, rope

HEAD_DIM = 128
"""SGLang's kernel cuts keys of a decode into blocks of 128 channels: with fewer there is no block and no output."""


def ringlinear() -> Any:
    """Lightning attention that rotates half of each key, and grouped-query attention; the MLPs are dense."""
    from hypic.check.bailing import BailingLinearConfig, BailingMoeLinearV2ForCausalLM

    config = BailingLinearConfig(
        **COMMON,
        head_dim=HEAD_DIM,
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


def ring25() -> Any:
    """Ring-2.5: the same linear layers, latent attention with low-rank queries, and mixtures of experts chosen by groups."""
    from hypic.check.bailing import BailingHybridConfig, BailingMoeV2_5ForCausalLM

    config = BailingHybridConfig(
        **COMMON | {"num_key_value_heads": HEADS},
        **latent() | {"q_lora_rank": 40},
        head_dim=HEAD_DIM,
        layer_group_size=2,
        group_norm_size=2,
        partial_rotary_factor=0.5,
        rope_theta=10000.0,
        rope_interleave=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=1,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        router_dtype="fp32",
        architectures=["BailingMoeV2_5ForCausalLM"],
    )
    return BailingMoeV2_5ForCausalLM(config)


def minimax() -> Any:
    """MiniMax-Text-01: Lightning layers without positions, RoPE in the others, mixtures of experts, weighed residuals."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    config = MiniMaxConfig(
        **COMMON | {"num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=HEAD_DIM,
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters=rope(),
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=64,
        linear_attn_alpha_factor=1.2,
        linear_attn_beta_factor=0.9,
        full_attn_alpha_factor=1.1,
        full_attn_beta_factor=0.8,
        mlp_alpha_factor=0.9,
        mlp_beta_factor=1.3,
    )
    return MiniMaxForCausalLM(config)
