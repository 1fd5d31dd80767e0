"""Models whose layers are all full attention."""

from __future__ import annotations

from typing import Any

from hypic.check.tiny_models.common import COMMON, HEAD_DIM, HEADS, LAYERS, latent, rope


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, head_dim=HEAD_DIM, rope_parameters=rope()))


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=HEAD_DIM, rope_parameters=rope()))


def deepseekv2() -> Any:
    """Latent attention with RoPE, as in DeepSeek-V2-Lite; dense."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    common = COMMON | latent() | {"num_key_value_heads": HEADS}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **common,
            first_k_dense_replace=LAYERS,
            moe_layer_freq=1,
            n_routed_experts=8,
            rope_parameters=rope(),
        )
    )
