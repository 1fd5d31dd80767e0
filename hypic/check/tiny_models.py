"""Tiny random-weight models of every supported architecture, built on the spot for tests and the self-check.

Weights preserve variance from layer to layer and decays span three orders of magnitude, so that each logit depends on
the recurrent state, the convolution, the rotation of the keys and on tokens hundreds of positions back: an error in
any of them is far above float noise.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tiny_tokenizer
from .tiny_tokenizer import SPECIAL, VOCAB_SIZE, training_text, write_tokenizer

if TYPE_CHECKING:
    import torch

STAMP = "recipe.sha256"
_HIDDEN, _HEADS, _KV_HEADS, _LAYERS = 128, 4, 2, 4
_ID = {text: i for i, text in enumerate(SPECIAL)}
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=_HIDDEN,
    intermediate_size=256,
    num_hidden_layers=_LAYERS,
    num_attention_heads=_HEADS,
    num_key_value_heads=_KV_HEADS,
    max_position_embeddings=16384,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=_ID[tiny_tokenizer.TURN_END],
    pad_token_id=_ID[tiny_tokenizer.END_OF_TEXT],
)
_MOE: dict[str, Any] = dict(
    moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=2
)


def _linear(interval: int, d_k: int = 32, d_v: int = 32) -> dict[str, Any]:
    """Gated-delta-net settings; every ``interval``-th layer is full attention."""
    kinds = ["full_attention" if i % interval == interval - 1 else "linear_attention" for i in range(_LAYERS)]
    return dict(
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=d_k,
        linear_value_head_dim=d_v,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=kinds,
        full_attention_interval=interval,
    )


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_COMMON, head_dim=32, rope_parameters=_rope()))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=32, rope_parameters=_rope()))


def _qwen3next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    rope = _rope(partial_rotary_factor=0.25)
    config = Qwen3NextConfig(**_COMMON, **_linear(2), **_MOE, decoder_sparse_step=1, rope_parameters=rope)
    config.full_attention_interval = 2
    return Qwen3NextForCausalLM(config)


def _qwen35(moe: bool, **linear: Any) -> Any:
    """Qwen3.5 comes only as a vision model: the vision tower is the smallest that loads."""
    import transformers as hf

    rope = _rope(partial_rotary_factor=0.25, mrope_section=[3, 3, 2], mrope_interleaved=True)
    text = _COMMON | _linear(**linear) | {"rope_parameters": rope} | (_MOE if moe else {})
    vision = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=32,
        num_heads=2,
        out_hidden_size=_HIDDEN,
        patch_size=16,
        spatial_merge_size=2,
        temporal_patch_size=2,
        num_position_embeddings=64,
        deepstack_visual_indexes=[],
    )
    tokens = {
        f"{field}_token_id": _ID[text]
        for field, text in zip(("vision_start", "vision_end", "image", "video"), tiny_tokenizer.VISION, strict=True)
    }
    family = "Qwen3_5Moe" if moe else "Qwen3_5"
    config = getattr(hf, f"{family}Config")(text_config=text, vision_config=vision, **tokens)
    return getattr(hf, f"{family}ForConditionalGeneration")(config)


def _mamba(groups: int = 2) -> dict[str, Any]:
    return dict(
        mamba_n_groups=groups,
        mamba_d_conv=4,
        mamba_expand=1,
        mamba_chunk_size=64,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
    )


def _nemotronh() -> Any:
    """Mamba2, MoE, attention without positions, MLP: the four kinds of layers of Nemotron-H and Nemotron-3."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        **{k: v for k, v in _COMMON.items() if k not in ("num_hidden_layers", "rms_norm_eps")},
        **_mamba(),
        layers_block_type=["mamba", "moe", "attention", "mlp", "mamba", "attention"],
        head_dim=32,
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


def _granite4h(position_embedding_type: str = "nope") -> Any:
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        **_COMMON,
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
        attention_multiplier=32**-0.5,
        logits_scaling=1.0,
        rope_parameters=_rope(),
    )
    return GraniteMoeHybridForCausalLM(config)


def _falconh1() -> Any:
    """Attention and Mamba2 side by side in every layer."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = FalconH1Config(
        **_COMMON,
        **_mamba(),
        head_dim=32,
        mamba_d_ssm=128,
        mamba_d_state=32,
        mamba_d_head=32,
        mamba_n_heads=4,
        mamba_norm_before_gate=False,
        mamba_rms_norm=True,
        rope_parameters=_rope(),
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


def _latent() -> dict[str, Any]:
    """Multi-head latent attention."""
    return dict(kv_lora_rank=48, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, q_lora_rank=None)


def _kimi() -> Any:
    """Kimi-Linear-48B-A3B: three KDA layers, then latent attention without positions; and one of it to end with."""
    from hypic.check.kimi_linear import KimiLinear

    return KimiLinear(
        _COMMON
        | _latent()
        | dict(
            architectures=["KimiLinearForCausalLM"],
            model_type="kimi_linear",
            dtype="float32",
            hidden_act="silu",
            num_hidden_layers=5,
            num_key_value_heads=_HEADS,
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
    )


def _deepseekv2() -> Any:
    """Latent attention with RoPE, as in DeepSeek-V2-Lite; dense."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    common = _COMMON | _latent() | {"num_key_value_heads": _HEADS}
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **common,
            first_k_dense_replace=_LAYERS,
            moe_layer_freq=1,
            n_routed_experts=8,
            rope_parameters=_rope(),
        )
    )


def _ringlinear() -> Any:
    """Lightning attention that rotates half of each key, and grouped-query attention; the MLPs are dense."""
    from .bailing import BailingLinearConfig, BailingMoeLinearV2ForCausalLM

    config = BailingLinearConfig(
        **_COMMON,
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


def _rope(**extra: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **extra}


_RECIPES: dict[str, Callable[[], Any]] = {
    "qwen3next": _qwen3next,
    "qwen35": lambda: _qwen35(moe=False, interval=4),
    "qwen35moe": lambda: _qwen35(moe=True, interval=2),
    "qwen35_dk": lambda: _qwen35(moe=False, interval=2, d_k=32, d_v=16),
    "llama": _llama,
    "qwen3": _qwen3,
    "nemotronh": _nemotronh,
    "granite4h": _granite4h,
    "falconh1": _falconh1,
    "kimi": _kimi,
    "deepseekv2": _deepseekv2,
    "ringlinear": _ringlinear,
}
NAMES = tuple(_RECIPES)
"""Models that :func:`build` knows."""


def default_root() -> Path:
    """``models/tiny`` of a source checkout, else a directory in the user's cache."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "models" / "tiny"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hypic" / "tiny"


def build(name: str, root: Path | None = None) -> Path:
    """Path of a ready-to-serve float32 checkpoint of model ``name``; built once, and again when its recipe changes.

    Safe against concurrent builders: each writes its own directory and renames it into place.
    """
    if name not in _RECIPES:
        raise ValueError(f"no tiny model {name!r}; there are: {', '.join(NAMES)}")
    root = default_root() if root is None else root
    target, recipe = root / name, _recipe_hash()
    if _stamp(target) == recipe:
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        new, old = scratch / "new", scratch / "old"
        new.mkdir()
        _write(name, new)
        (new / STAMP).write_text(recipe)
        if target.exists() and _stamp(target) != recipe:
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            if _stamp(target) != recipe:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write(name: str, directory: Path) -> None:
    import torch

    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(NAMES.index(name))
        model = _RECIPES[name]().float()
        _randomise(model)
    model.save_pretrained(directory)
    if name == "nemotronh":
        _name_as_published(directory)
    write_tokenizer(directory)
    if name.startswith("qwen35"):
        _write_image_processors(directory)


def _name_as_published(directory: Path) -> None:
    """Nemotron-H with the names that SGLang reads, where transformers saves others (and reads both)."""
    from safetensors.torch import load_file, save_file

    config, weights = directory / "config.json", directory / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | _mamba(), indent=1))
    renamed = {name.replace("backbone.embedding.", "backbone.embeddings."): t for name, t in load_file(weights).items()}
    save_file(renamed, weights, metadata={"format": "pt"})


def _randomise(model: torch.nn.Module) -> None:
    """Draw all weights anew; see the module's docstring for what they must achieve."""
    import torch

    wide = {"q_proj": 1.5, "k_proj": 1.5, "lm_head": 3.0, "gate": 2.0, "in_proj_ba": 1.5, "in_proj_a": 1.5}
    with torch.no_grad():
        for path, p in model.named_parameters():
            leaf = path.removesuffix(".weight").rsplit(".", 1)[-1]
            if leaf == "A_log":
                p.uniform_(math.log(0.003), math.log(1.0))
            elif leaf == "dt_bias":
                p.uniform_(-1.0, 1.0)
            elif leaf in ("embed_tokens", "word_embeddings"):
                p.normal_()
            elif p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(std=wide.get(leaf, 1.0) / math.sqrt(p.shape[-1]))


def _write_image_processors(directory: Path) -> None:
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


def _stamp(directory: Path) -> str | None:
    try:
        return (directory / STAMP).read_text()
    except OSError:
        return None


def _recipe_hash() -> str:
    """Over everything a checkpoint depends on: the recipes' source, the training text, the library that saves it."""
    import transformers

    from hypic.check import kimi_linear

    digest = hashlib.sha256(transformers.__version__.encode())
    for module in (__file__, tiny_tokenizer.__file__, kimi_linear.__file__):
        digest.update(Path(module).read_bytes())
    for paragraph in training_text():
        digest.update(paragraph.encode())
    return digest.hexdigest()
