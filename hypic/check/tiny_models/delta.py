"""Hybrids with gated delta networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypic.check import tiny_tokenizer
from hypic.check.tiny_models.common import COMMON, HEAD_DIM, HIDDEN, LAYERS, MOE, TOKEN_ID, rope


def _linear(interval: int, d_k: int = 32, d_v: int = 32) -> dict[str, Any]:
    """Gated-delta-net settings; every ``interval``-th layer is full attention."""
    kinds = ["full_attention" if i % interval == interval - 1 else "linear_attention" for i in range(LAYERS)]
    return dict(
        head_dim=HEAD_DIM,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=d_k,
        linear_value_head_dim=d_v,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=kinds,
        full_attention_interval=interval,
    )


def qwen3next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    turns = rope(partial_rotary_factor=0.25)
    config = Qwen3NextConfig(**COMMON, **_linear(2), **MOE, decoder_sparse_step=1, rope_parameters=turns)
    config.full_attention_interval = 2
    return Qwen3NextForCausalLM(config)


def qwen35(moe: bool, **linear: Any) -> Any:
    """Qwen3.5 comes only as a vision model: the vision tower is the smallest that loads."""
    import transformers as hf

    turns = rope(partial_rotary_factor=0.25, mrope_section=[3, 3, 2], mrope_interleaved=True)
    text = COMMON | _linear(**linear) | {"rope_parameters": turns} | (MOE if moe else {})
    vision = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=HIDDEN,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        num_position_embeddings=64,
        deepstack_visual_indexes=[],
    )
    tokens = {
        f"{field}_token_id": TOKEN_ID[text]
        for field, text in zip(("vision_start", "vision_end", "image", "video"), tiny_tokenizer.VISION, strict=True)
    }
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    config = getattr(hf, f"{family}Config")(text_config=text, vision_config=vision, **tokens)
    return getattr(hf, f"{family}ForConditionalGeneration")(config)


def write_image_processors(directory: Path) -> None:
    shared = dict(
        processor_class="Qwen3VLProcessor",
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    size = {"shortest_edge": 4096, "longest_edge": 65536}
    image = shared | {"image_processor_type": "Qwen2VLImageProcessorFast", "size": size}
    video = shared | {"video_processor_type": "Qwen3VLVideoProcessor", "size": size}
    (directory / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))
