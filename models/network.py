"""The model: its shape, and a forward pass over Hugging Face's parameters that training and the reference share.

Hugging Face's own forward differs from version to version in which kernels it looks for, and falls back to slow ones; the
one here needs torch alone and takes from the module nothing but weights. ``tests/models`` holds the two against each other.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gdn import gated_delta_rule

SHAPE: dict[str, Any] = dict(
    vocab_size=6144,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=1,
    linear_num_value_heads=1,
    full_attention_interval=4,
    max_position_embeddings=16384,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)
"""7.4 million parameters; one key head per linear layer, so that the states cannot hold all facts."""

_ROPE = dict(
    rope_type="default",
    rope_theta=10000.0,
    partial_rotary_factor=0.25,
    mrope_section=[6, 5, 5],
    mrope_interleaved=True,
)
_FORGET = 30.0  # log decay that leaves nothing of a state
_VISION = dict(
    depth=1,
    hidden_size=32,
    intermediate_size=32,
    num_heads=2,
    patch_size=16,
    spatial_merge_size=2,
    temporal_patch_size=2,
    num_position_embeddings=64,
    deepstack_visual_indexes=[],
)


def layer_types(shape: dict[str, Any]) -> list[str]:
    every = shape["full_attention_interval"]
    return [
        "full_attention" if i % every == every - 1 else "linear_attention" for i in range(shape["num_hidden_layers"])
    ]


def build(shape: dict[str, Any] | None = None, *, seed: int = 0, decays: tuple[float, float] = (0.3, 3e-4)) -> Any:
    """A fresh ``Qwen3_5ForCausalLM`` in float32, initialised by our own rules.

    ``decays`` are the log decays per token at which the first and the last linear layer begin, those between in equal
    ratios: the first ones see their neighbourhood, as heads of large models do, and the last ones remember a prompt.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    shape = SHAPE | (shape or {})
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(**shape, layer_types=layer_types(shape), rope_parameters=_ROPE)
    ).float()
    depth = shape["num_hidden_layers"]
    linear = [i for i, kind in enumerate(layer_types(shape)) if kind == "linear_attention"]
    with torch.no_grad():
        for path, p in model.named_parameters():
            leaf = path.removesuffix(".weight").rsplit(".", 1)[-1]
            if leaf == "embed_tokens":  # large beside what layers add, so that deep layers still see which token it is
                p.normal_(std=0.2)
            elif path == "model.norm.weight":  # and so that logits stay of order one, the head being tied to it
                p.fill_(0.25 - 1)
            elif leaf == "A_log":
                p.zero_()
            elif leaf == "dt_bias":
                at = linear.index(int(path.split(".")[2])) / max(len(linear) - 1, 1)
                p.fill_(math.log(math.expm1(decays[0] ** (1 - at) * decays[1] ** at)))
            elif leaf == "conv1d":
                p.uniform_(-0.5, 0.5)
            elif p.dim() == 2:
                residual = leaf in ("o_proj", "out_proj", "down_proj")
                p.normal_(std=(1 / math.sqrt(2 * depth) if residual else 1.0) / math.sqrt(p.shape[-1]))
    return model


def save(model: Any, directory: Path, tokenizer: Path) -> None:
    """Write bfloat16 weights as ``Qwen3_5ForConditionalGeneration`` with the smallest vision tower that loads.

    SGLang 0.5.17 knows Qwen3.5 only so. ``tokenizer`` is the folder with the tokenizer and its chat template.
    """
    import shutil

    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    from hypic.check import tiny_tokenizer
    from hypic.check.tiny_models.delta import write_image_processors

    text = model.config.to_dict()
    ids = {s: i for i, s in enumerate(tiny_tokenizer.SPECIAL)}
    names = ("vision_start", "vision_end", "image", "video")
    tokens = {f"{name}_token_id": ids[s] for name, s in zip(names, tiny_tokenizer.VISION, strict=True)}
    vision = _VISION | {"out_hidden_size": text["hidden_size"]}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.tie_weights()
    directory.mkdir(parents=True, exist_ok=True)
    whole.generation_config.update(
        do_sample=False, eos_token_id=text["eos_token_id"], pad_token_id=text["pad_token_id"]
    )
    whole.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if directory.resolve() != tokenizer.resolve():
            shutil.copy(tokenizer / name, directory / name)
    write_image_processors(directory)


def load(directory: Path) -> Any:
    """The text model that :func:`save` wrote, in float32, in eval mode."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())["text_config"]
    keep = {k: config[k] for k in SHAPE if k in config}
    model = build(keep)
    weights = load_file(directory / "model.safetensors")
    prefix = "model.language_model."
    state = {k.removeprefix(prefix): v.float() for k, v in weights.items() if k.startswith(prefix)}
    model.model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


class KV(NamedTuple):
    """What a full-attention layer keeps of tokens: K before RoPE, V [B, T, G, D]."""

    k: Tensor
    v: Tensor


class Delta(NamedTuple):
    """What a linear layer keeps of tokens: conv inputs [B, T, C]; k, v [B, T, H, .]; log decay g, beta [B, T, H]."""

    raw: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def norm(x: Tensor, module: Any) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), 1 + module.weight, module.eps)


def mlp(layer: Any, x: Tensor) -> Tensor:
    m, y = layer.mlp, norm(x, layer.post_attention_layernorm)
    return m.down_proj(F.silu(m.gate_proj(y)) * m.up_proj(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, heads, D] by angles [T, R]: the leading R channels turn, in half-split order."""
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def attention_inputs(m: Any, y: Tensor) -> tuple[Tensor, Tensor, KV]:
    """Queries before RoPE [B, T, heads, D], output gate [B, T, heads * D], and what is kept."""
    d = m.head_dim
    q, gate = m.q_proj(y).unflatten(-1, (-1, 2 * d)).chunk(2, dim=-1)
    k, v = m.k_proj(y).unflatten(-1, (-1, d)), m.v_proj(y).unflatten(-1, (-1, d))
    return norm(q, m.q_norm), gate.flatten(-2), KV(norm(k, m.k_norm), v)


def attend(
    m: Any, q: Tensor, gate: Tensor, kv: KV, angles: tuple[Tensor, Tensor], mask: Tensor | None = None
) -> Tensor:
    """Causal attention over positions 0, 1, 2, ... of ``angles``; ``mask`` [T, T] (True = seen) replaces causality."""
    repeat = q.shape[2] // kv.k.shape[2]
    q, k = rotate(q, *angles).to(kv.v.dtype), rotate(kv.k, *angles).to(kv.v.dtype)
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(repeat, 2), kv.v.repeat_interleave(repeat, 2)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=m.scaling)
    return m.o_proj(out.transpose(1, 2).flatten(-2) * gate.sigmoid())


def delta_raw(m: Any, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Conv inputs [B, T, C], output gate z [B, T, H * V], log decay and write strength [B, T, H]."""
    a, beta = m.in_proj_a(y).float(), m.in_proj_b(y).float().sigmoid()
    return m.in_proj_qkv(y), m.in_proj_z(y), -m.A_log.float().exp() * F.softplus(a + m.dt_bias), beta


def delta_conv(m: Any, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (unit length, repeated for the value heads) and v of every token, zeros standing before the first."""
    taps = m.conv1d.weight[:, 0].T.to(raw.dtype)
    width = len(taps)
    padded = F.pad(raw, (0, 0, width - 1, 0))
    mixed = F.silu(sum(padded[:, j : j + raw.shape[1]] * tap for j, tap in enumerate(taps)))
    q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
    heads = m.num_v_heads // m.num_k_heads

    def unit(x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, m.head_k_dim)).float()
        return (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(heads, 2)

    return unit(q), unit(k), v.unflatten(-1, (-1, m.head_v_dim))


def delta_out(m: Any, o: Tensor, z: Tensor) -> Tensor:
    eps = m.norm.variance_epsilon if hasattr(m.norm, "variance_epsilon") else m.norm.eps
    o = F.rms_norm(o.float(), (o.shape[-1],), m.norm.weight.float(), eps)
    return m.out_proj(o.flatten(-2) * F.silu(z.float()))


class Network(nn.Module):
    """The forward pass over the parameters of ``hf``, a ``Qwen3_5ForCausalLM``."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf = hf

    @property
    def layers(self) -> Any:
        return self.hf.model.layers

    def angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        """cos and sin for positions 0..tokens-1, [tokens, R] float32."""
        rope = self.hf.model.rotary_emb
        turns = torch.arange(tokens, device=rope.inv_freq.device)[:, None] * rope.inv_freq.float()
        turns = torch.cat([turns, turns], dim=-1)
        return turns.cos(), turns.sin()

    def forward(self, ids: Tensor, restarts: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, d] after the final norm, of token ids [B, T]; linear states are 0 before tokens where
        ``restarts`` [B, T] is 1."""
        x = self.hf.model.embed_tokens(ids)
        angles = self.angles(ids.shape[1])
        for layer in self.layers:
            y = norm(x, layer.input_layernorm)
            if hasattr(layer, "self_attn"):
                q, gate, kv = attention_inputs(layer.self_attn, y)
                x = x + attend(layer.self_attn, q, gate, kv, angles)
            else:
                m = layer.linear_attn
                raw, z, g, beta = delta_raw(m, y)
                if restarts is not None:
                    g = g - _FORGET * restarts[..., None]
                o, _ = gated_delta_rule(*delta_conv(m, raw), g, beta)
                x = x + delta_out(m, o, z)
            x = x + mlp(layer, x)
        return norm(x, self.hf.model.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.hf.lm_head.weight)
