"""Why a model cannot be linked, as far as its config tells: for the server before it loads anything, and for `hypic doctor`.

The rules are those of ``engine.model`` and ``engine.relocation``, which read the loaded model and have the last word.
SGLang's model classes are read as text: to import them takes seconds, which the launching process does not need.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hypic.config import HypicConfig
from hypic.engine.families import family_of_config, known_families
from hypic.engine.latent import backend_problem
from hypic.engine.support import SLIDING_WINDOWS, cannot_serve, check_methods

_ROPE_BY_LENGTH = ("longrope", "dynamic", "su")
"""Kinds of RoPE whose angles depend on the length of the sequence."""


def check_model(server_args: Any, config: HypicConfig) -> None:
    """Raise Unsupported if the server would be refused once the model is loaded."""
    model = getattr(server_args, "model_config", None)
    if model is None:  # SGLang resolves every argument by it, but for the paths "none" and "dummy"
        return
    if found := refusals(model, server_args):
        raise cannot_serve(server_args.model_path, model.hf_config.architectures[0], found)
    check_methods(config, hybrid=family_of_config(model) is not None)


def refusals(model: Any, server_args: Any) -> list[str]:
    """Why hypic's server does not start with the model, SGLang's ModelConfig."""
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    found = []
    if backend := _foreign_linear_attention(model):
        found.append(f"linear attention of {backend}: {known_families()}")
    if model.attention_arch == AttentionArch.MLA:
        if is_deepseek_dsa(model.hf_config):
            found.append("sparse attention (DSA): its pool also keeps an index of keys")
        if problem := backend_problem(server_args):
            found.append(problem)
    if model.is_hybrid_swa or model.attention_chunk_size is not None or _windowed(model):
        found.append(SLIDING_WINDOWS)
    return found


def doubts(model: Any) -> list[str]:
    """Why the start-up proof on the loaded model would switch hypic off, or find nothing to link. Imports SGLang's models."""
    from sglang.srt.models.registry import ModelRegistry

    found = []
    architecture = model.hf_config.architectures[0]
    _, name = ModelRegistry.resolve_model_cls(model.hf_config.architectures)
    if name != architecture:
        found.append(f"SGLang has no model class {architecture} and would fall back to {name}")
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind in _ROPE_BY_LENGTH:
        found.append(f"RoPE of type {kind!r}: its angles depend on the sequence length, not on the position alone")
    if getattr(text, "dual_chunk_attention_config", None):
        found.append("dual chunk attention: its rotation depends on the chunk, not on the position alone")
    if not model.is_generation:
        found.append("not a generative model: there is no prefill to link")
    return found


def _windowed(model: Any) -> bool:
    """Whether layers attend to a window: the config has one and SGLang's code of the model reads it. That of Qwen2 and Mistral
    does not; hypic serves them as SGLang does."""
    if not model.sliding_window_size:
        return False
    source = _source(model.hf_config.architectures[0])
    if "def get_attention_sliding_window_size(self" in source:  # SGLang goes by it, whatever the layers are
        return True
    kinds = getattr(model.hf_text_config, "layer_types", None)
    return "sliding_window_size" in source and (not kinds or set(kinds) != {"full_attention"})


def _source(architecture: str) -> str:
    """SGLang's module that has the model class, or the user's who gives it another one; empty if there is none."""
    for package in (os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"), "sglang.srt.models"):
        spec = find_spec(package) if package else None
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).glob("*.py")):
                if f"\nclass {architecture}(" in (text := file.read_text("utf-8", "replace")):
                    return text
    return ""


def _foreign_linear_attention(model: Any) -> str | None:
    """Name of the backend that SGLang takes for the model's linear layers, if it is none of our families'."""
    from sglang.srt.configs import hybrid_arch

    if family_of_config(model) is not None:
        return None
    if hybrid_arch.mamba2_config(model) is not None:
        return "Mamba2AttnBackend of another mixer, or a short convolution"
    if hybrid_arch.hybrid_lightning_config(model) is not None:
        return "LightningAttentionBackend"
    if (spec := hybrid_arch.linear_attn_model_spec(model)) is not None:
        return str(spec.backend_class_name).rpartition(".")[2]
    return None
