"""The config of Ring-mini-linear-2.0 and Ring-flash-linear-2.0, as SGLang's config of their successors reads it; registration."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.bailing_hybrid import BailingHybridConfig

ARCHITECTURE = "BailingMoeLinearV2ForCausalLM"


class BailingMoeLinearConfig(BailingHybridConfig):
    """Full-attention layers are grouped-query attention, where Ring-2.5 has MLA."""

    model_type = "bailing_moe_linear"

    def __init__(self, **kwargs: Any):
        kwargs["full_attention_type"] = "gqa"
        super().__init__(**kwargs)
        self.v_head_dim = self.head_dim  # the base's is that of MLA, and SGLang would size its pools by it


def register() -> None:
    """With transformers, in SGLang's own table of configs and list of models without piecewise CUDA graphs (where Ring-2.5
    is), and as models whose states the radix tree may keep.

    Ring-2.5, which SGLang has, is registered once more: SGLang's Triton attention backend asks only registered hybrids for
    the first layer that has K and V, and layer 0 of the others.
    """
    from sglang.srt.configs.linear_attn_model_registry import (
        LinearAttnModelSpec,
        get_linear_attn_spec_by_arch,
        register_linear_attn_model,
    )
    from sglang.srt.configs.model_config import piecewise_cuda_graph_disabled_model_archs
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers import AutoConfig

    from hypic.engine.model_classes.minimax_config import MiniMaxHybridConfig, MiniMaxM1Config, MiniMaxText01Config

    ours: dict[str, Any] = {
        ARCHITECTURE: BailingMoeLinearConfig,
        "MiniMaxForCausalLM": MiniMaxHybridConfig,
        "MiniMaxM1ForCausalLM": MiniMaxM1Config,
        "MiniMaxText01ForCausalLM": MiniMaxText01Config,
        "BailingMoeV2_5ForCausalLM": BailingHybridConfig,  # last: the first is a subclass, and the first match counts
    }
    for architecture, config in ours.items():
        AutoConfig.register(config.model_type, config, exist_ok=True)
        _CONFIG_REGISTRY[config.model_type] = config
        if get_linear_attn_spec_by_arch(architecture) is None:
            if architecture not in piecewise_cuda_graph_disabled_model_archs:
                piecewise_cuda_graph_disabled_model_archs.append(architecture)
            register_linear_attn_model(
                LinearAttnModelSpec(
                    config_class=config,
                    backend_class_name="sglang.srt.layers.attention.linear.lightning_backend.LightningAttentionBackend",
                    arch_names=[architecture],
                    support_mamba_cache_extra_buffer=True,
                )
            )
