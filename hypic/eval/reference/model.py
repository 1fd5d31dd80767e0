"""A checkpoint for the reference: Hugging Face's modules for the weights, mixers of ours over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hypic.check.oracle import DELTA_AND_ATTENTION as ARCHITECTURES
from hypic.eval.reference.mixers import Attention, Delta, Rope, mixer_of
from hypic.method import dummy_token


class ModelError(ValueError):
    """A model that the reference cannot run; the text says which and why."""


class Model:
    """Layers, embeddings and logits of a checkpoint.

    Args:
        path: a folder as ``save_pretrained`` writes it, or a GGUF file of a Llama or Qwen3 model (dequantised on loading).
    Raises:
        ModelError: it cannot be read, or has layers of a kind that is not known.
    """

    def __init__(self, path: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        whole = _load(path, dtype).to(device)
        text: Any = getattr(whole.model, "language_model", whole.model)
        rope_type = text.rotary_emb.rope_type
        if rope_type in ("dynamic", "longrope"):
            raise ModelError(
                f"{path}: rope_type {rope_type!r}: K at a position also depends on the length of the prompt"
            )
        self.device, self._text, self._head = device, text, whole.lm_head
        rope = Rope(text.rotary_emb, device)
        try:
            self.layers: list[tuple[Any, Attention | Delta]] = [(layer, mixer_of(layer, rope)) for layer in text.layers]
        except NotImplementedError as e:
            raise ModelError(f"{path}: {e}") from None
        self.hybrid = any(isinstance(mixer, Delta) for _, mixer in self.layers)
        self.dummy: int = dummy_token(text.config)
        """The token that LegoLink-0's dummies are."""

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self._text.embed_tokens(torch.tensor(ids, dtype=torch.long, device=self.device))

    def logprobs(self, x: Tensor) -> Tensor:
        """Log-softmax [n, vocab] float32 behind the last layer's outputs [n, d]."""
        return self._head(self._text.norm(x)).float().log_softmax(-1)


def feed_forward(layer: Any, x: Tensor) -> Tensor:
    """A decoder layer's second half."""
    return x + layer.mlp(layer.post_attention_layernorm(x)[None])[0]


def _load(path: Path, dtype: torch.dtype) -> Any:
    import transformers

    try:
        if path.suffix == ".gguf":
            model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
            name = type(model).__name__
        else:
            names = json.loads((path / "config.json").read_text()).get("architectures") or []
            name = next((n for n in names if n in ARCHITECTURES), str(names))
            if name in ARCHITECTURES:
                cls = getattr(transformers, name)
                model, info = cls.from_pretrained(path, dtype=dtype, local_files_only=True, output_loading_info=True)
                if missing := sorted(info["missing_keys"]):
                    raise ModelError(
                        f"{path}: its files lack the weights {', '.join(missing[:5])}: fetch or export it anew"
                    )
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        if isinstance(e, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read as a model: {e}; fetch or export it anew") from None
    if name not in ARCHITECTURES:
        raise ModelError(f"{path}: architecture {name} is unknown to the reference, which has {list(ARCHITECTURES)}")
    return model.eval()
