"""Hybrids with Mamba2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypic.check.tiny_models.common import COMMON, HEAD_DIM, HIDDEN, rope


def _mamba(groups: int = 2) -> dict[str, Any]:
    return dict(
        mamba_n_groups=groups,
        mamba_d_conv=4,
        mamba_expand=1,
        mamba_chunk_size=64,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
    )


def nemotronh(experts: bool = True) -> Any:
    """Mamba2, MoE, attention without positions, MLP: the four kinds of layers of Nemotron-H and Nemotron-3."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **{k: v for k, v in COMMON.items() if k not in ("num_hidden_layers", "rms_norm_eps")},
        **_mamba(),
        layers_block_type=["mamba", "moe" if experts else "mlp", "attention", "mlp", "mamba", "attention"],
        head_dim=HEAD_DIM,
        ssm_state_size=24,
        mamba_num_heads=4,
        mamba_head_dim=32,
        layer_norm_epsilon=1e-6,
        mamba_dt_min=1e-9,  # transformers' path without kernels clamps the step from below; no other does
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=2.5,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        use_mamba_kernels=False,
        rescale_prenorm_residual=False,
    )
    return NemotronHForCausalLM(config)


def rename_as_published(directory: Path) -> None:
    """Nemotron-H with the names that SGLang reads, where transformers saves others (and reads both)."""
    from safetensors.torch import load_file, save_file

    config, weights = directory / "config.json", directory / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | _mamba(), indent=1))
    renamed = {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})


def granite4h(position_embedding_type: str = "nope") -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **COMMON | {"num_attention_heads": HIDDEN // HEAD_DIM, "num_key_value_heads": 1},
        **_mamba(groups=1),
        mamba_d_state=32,
        mamba_d_head=32,
        mamba_n_heads=4,
        layer_types=["mamba", "mamba", "attention", "mamba"],
        position_embedding_type=position_embedding_type,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        embedding_multiplier=1.0,
        residual_multiplier=0.8,
        attention_multiplier=HEAD_DIM**-0.5,
        logits_scaling=1.0,
        rope_parameters=rope(),
    )
    return GraniteMoeHybridForCausalLM(config)


def falconh1() -> Any:
    """Attention and Mamba2 side by side in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **COMMON,
        **_mamba(),
        head_dim=HEAD_DIM,
        mamba_d_ssm=128,
        mamba_d_state=32,
        mamba_d_head=32,
        mamba_n_heads=4,
        mamba_norm_before_gate=False,
        mamba_rms_norm=True,
        rope_parameters=rope(),
        attention_in_multiplier=0.9,
        attention_out_multiplier=0.8,
        embedding_multiplier=1.2,
        key_multiplier=0.7,
        lm_head_multiplier=1.1,
        mlp_multipliers=[0.9, 0.8],
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.9,
        ssm_multipliers=[0.9, 1.1, 1.2, 0.8, 0.7],
    )
    return FalconH1ForCausalLM(config)
