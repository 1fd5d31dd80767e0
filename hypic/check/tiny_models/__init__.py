"""Tiny random-weight models of every supported architecture, built on the spot for tests and the self-check.

Weights preserve variance from layer to layer and decays span three orders of magnitude, so that each logit depends on
the recurrent state, the convolution, the rotation of the keys and on tokens hundreds of positions back: an error in
any of them is far above float noise.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypic.check import tiny_tokenizer
from hypic.check.tiny_models import attention, delta, kda, lightning, mamba2
from hypic.check.tiny_models.weights import randomise
from hypic.check.tiny_tokenizer import training_text, write_tokenizer

STAMP = "recipe.sha256"

_RECIPES: dict[str, Callable[[], Any]] = {
    "qwen3next": delta.qwen3next,
    "qwen35": lambda: delta.qwen35(moe=False, interval=4),
    "qwen35moe": lambda: delta.qwen35(moe=True, interval=2),
    "qwen35_dk": lambda: delta.qwen35(moe=False, interval=2, d_k=32, d_v=16),
    "llama": attention.llama,
    "qwen3": attention.qwen3,
    "nemotronh": mamba2.nemotronh,
    "granite4h": mamba2.granite4h,
    "falconh1": mamba2.falconh1,
    "kimi": kda.kimi,
    "deepseekv2": attention.deepseekv2,
    "ringlinear": lightning.ringlinear,
    "ring25": lightning.ring25,
    "minimax": lightning.minimax,
    "kimi_dense": lambda: kda.kimi(first_k_dense_replace=5),
    "nemotronh_dense": lambda: mamba2.nemotronh(experts=False),
}
NAMES = tuple(_RECIPES)
"""Models that :func:`build` knows."""
IN_16_BITS = {"kimi": "kimi_dense", "nemotronh": "nemotronh_dense"}
"""What to check these as in 16-bit types: where a router's choice flips, stock SGLang's own logprobs are off by ten."""


def default_root() -> Path:
    """``models/tiny`` of a source checkout, else a directory in the user's cache."""
    checkout = Path(__file__).resolve().parents[3]
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
        randomise(model)
    model.save_pretrained(directory)
    if name.startswith("nemotronh"):
        mamba2.rename_as_published(directory)
    write_tokenizer(directory)
    if name.startswith("qwen35"):
        delta.write_image_processors(directory)


def _stamp(directory: Path) -> str | None:
    try:
        return (directory / STAMP).read_text()
    except OSError:
        return None


def _recipe_hash() -> str:
    """Over everything a checkpoint depends on: the recipes' source, the training text, the library that saves it."""
    import transformers

    from hypic.check import bailing, kimi_linear

    digest = hashlib.sha256(transformers.__version__.encode())
    recipes = sorted(Path(__file__).parent.glob("*.py"))
    ours = (inspect.getfile(m) for m in (tiny_tokenizer, kimi_linear, bailing))
    for source in (*recipes, *map(Path, ours)):
        digest.update(source.read_bytes())
    for paragraph in training_text():
        digest.update(paragraph.encode())
    return digest.hexdigest()
