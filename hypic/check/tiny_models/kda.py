"""Hybrids with Kimi delta attention."""

from __future__ import annotations

from typing import Any

from hypic.check.tiny_models.common import COMMON, HEADS, latent


def kimi(**changes: Any) -> Any:
    """Kimi-Linear-48B-A3B: three KDA layers, then latent attention without positions; and one of it to end with.

    The config names no dtype: SGLang makes two projections of every KDA layer in that type, whatever it serves in.

    ``changes``: fields of the config that are to be otherwise.
    """
    from hypic.check.kimi_linear import KimiLinear

    return KimiLinear(
        COMMON
        | latent()
        | dict(
            architectures=["KimiLinearForCausalLM"],
            model_type="kimi_linear",
            hidden_act="silu",
            num_hidden_layers=5,
            num_key_value_heads=HEADS,
            head_dim=32,
            rms_norm_eps=1e-5,  # what SGLang takes for the norm of KDA's outputs, whatever stands here
            mla_use_nope=True,
            linear_attn_config=dict(
                kda_layers=[1, 2, 3], full_attn_layers=[4, 5], num_heads=4, head_dim=32, short_conv_kernel_size=4
            ),
            first_k_dense_replace=1,
            moe_layer_freq=1,
            moe_intermediate_size=64,
            moe_renormalize=True,
            moe_router_activation_func="sigmoid",
            num_experts=8,
            num_experts_per_token=2,
            num_shared_experts=1,
            num_expert_group=1,
            topk_group=1,
            use_grouped_topk=True,
            routed_scaling_factor=2.446,
        )
        | changes
    )
