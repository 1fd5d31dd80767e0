"""What the recipes share: sizes, special tokens, RoPE."""

from __future__ import annotations

from typing import Any

from hypic.check import tiny_tokenizer
from hypic.check.tiny_tokenizer import SPECIAL, VOCAB_SIZE

HIDDEN, HEADS, KV_HEADS, LAYERS = 128, 4, 2, 4
HEAD_DIM = 64
"""Of full attention. Not HIDDEN / HEADS: FlashInfer has no kernels for heads of 32."""
TOKEN_ID = {text: i for i, text in enumerate(SPECIAL)}
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=HIDDEN,
    intermediate_size=256,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=16384,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=TOKEN_ID[tiny_tokenizer.TURN_END],
    pad_token_id=TOKEN_ID[tiny_tokenizer.END_OF_TEXT],
)
MOE: dict[str, Any] = dict(
    moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2
)


def rope(**extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **extra}


def latent() -> dict[str, Any]:
    """Multi-head latent attention."""
    return dict(kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, q_lora_rank=None)
