"""The tiny checkpoints: cached, reproducible, with a tokenizer and template like those of real chat models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hypic.check import tiny_models
from hypic.check.coverage import COVERAGE, Covered
from hypic.check.tiny_tokenizer import END_OF_TEXT, SPECIAL, TURN_END, VOCAB_SIZE, write_tokenizer

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[[str], Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model("llama"))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="qwen3next"):
        tiny_models.build("gpt")


def test_built_once_and_again_when_the_recipe_changes(tmp_path: Path) -> None:
    path = tiny_models.build("llama", tmp_path)
    weights = path / "model.safetensors"
    first, built = weights.read_bytes(), weights.stat().st_mtime_ns
    assert tiny_models.build("llama", tmp_path) == path and weights.stat().st_mtime_ns == built
    (path / tiny_models.STAMP).write_text("an older recipe")
    tiny_models.build("llama", tmp_path)
    assert weights.stat().st_mtime_ns != built and weights.read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize("row", COVERAGE, ids=lambda row: row.model)
def test_rows_of_the_support_table_are_these_models(row: Covered, tiny_model: Callable[[str], Path]) -> None:
    config = json.loads((tiny_model(row.model) / "config.json").read_text())
    assert config["architectures"] == [row.architecture]


def test_every_model_but_variants_has_a_row() -> None:
    assert {row.model for row in COVERAGE} == set(tiny_models.NAMES) - {"qwen35_dk", *tiny_models.IN_16_BITS.values()}


def test_tokenizer_is_reproducible_and_merges(tmp_path: Path, tokenizer: Any) -> None:
    write_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == Path(tokenizer.name_or_path, "tokenizer.json").read_bytes()
    assert len(tokenizer) == VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == list(range(len(SPECIAL)))
    text = "The following statement returns a value; naïve 例\n\n  x = 1"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("The following statement")) < 8
    assert (tokenizer.eos_token, tokenizer.pad_token) == (TURN_END, END_OF_TEXT)


def test_chat_template(tokenizer: Any) -> None:
    render = tokenizer.apply_chat_template
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert render(TURNS, tokenize=False) == text
    assert render(TURNS, tokenize=False, add_generation_prompt=True) == text + "<|im_start|>assistant\n"
    assert render(PARTS, tokenize=False) == "<|im_start|>user\nHello<|im_end|>\n"
    with_tools = render(TURNS, tools=[TOOL], tokenize=False)
    assert with_tools.count("<|im_start|>system") == 1 and '"look_up"' in with_tools


@pytest.mark.parametrize("name", ["qwen3next", "llama"])
def test_logits_depend_on_tokens_far_back_and_on_order(name: str, tiny_model: Callable[[str], Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32).eval()
    torch.manual_seed(0)
    ids = torch.randint(10, VOCAB_SIZE, (1, 256))
    changed, swapped = ids.clone(), ids.clone()
    changed[0, 20] += 1 if changed[0, 20] < VOCAB_SIZE - 1 else -1
    swapped[0, 20], swapped[0, 60] = ids[0, 60], ids[0, 20]
    with torch.no_grad():
        base, *others = (model(x).logits[0, -1].log_softmax(-1) for x in (ids, changed, swapped))
    assert all((other - base).abs().max() > 1e-2 for other in others)
