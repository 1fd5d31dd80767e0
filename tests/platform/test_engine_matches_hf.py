"""SGLang in CPU mode generates what Hugging Face transformers generate, token for token.

Its Triton attention backend, interpreted, does so in tests/engine/test_pages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hypic.check.coverage import COVERAGE
from hypic.check.hf_mamba import one_chunk_scans

PROMPT_LENGTHS = (1, 5, 70, 301)
NEW_TOKENS = 12
GREEDY = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
NO_OVERLAP = {"disable_overlap_schedule": True}
PAGED = {"page_size": 16}
TWO_RANKS = {"tp_size": 2}


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(10, 1500, (length,), generator=generator).tolist()


def hf_greedy(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Continuations by transformers, which run this without any kernel of their own."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    vision = hasattr(AutoConfig.from_pretrained(path), "vision_config")
    loader = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = one_chunk_scans(loader.from_pretrained(path, dtype=torch.float32)).eval()
    model.generation_config.eos_token_id = None
    out = []
    for ids in prompts:
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
        out.append(tokens[0, len(ids) :].tolist())
    return out


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3next", {}),
    ("qwen3next", NO_OVERLAP),
    ("qwen3next", TWO_RANKS),
    ("qwen35", {}),
    ("qwen35moe", PAGED),
    ("qwen35_dk", {}),
    ("llama", {}),
    ("llama", PAGED),
    ("qwen3", NO_OVERLAP),
    ("nemotronh", {}),
    ("deepseekv2", {}),
]


@pytest.mark.parametrize(
    ("name", "server_args"),
    CASES,
    ids=lambda value: "-".join(value) or "default" if isinstance(value, dict) else value,
)
def test_greedy_equals_transformers(
    name: str, server_args: dict[str, Any], tiny_model: Callable[[str], Path], engine_for: Callable[..., Any]
) -> None:
    """Alone, in a batch, in 64-token prefill chunks, and once more from the radix tree."""
    prompts = [prompt(length) for length in PROMPT_LENGTHS]
    expected = hf_greedy(tiny_model(name), prompts)
    engine = engine_for(name, chunked_prefill_size=64, **server_args)

    longest = engine.generate(input_ids=prompts[-1], sampling_params=GREEDY)
    assert longest["output_ids"] == expected[-1]
    batch = engine.generate(input_ids=prompts, sampling_params=GREEDY)
    assert [one["output_ids"] for one in batch] == expected
    assert batch[-1]["meta_info"]["cached_tokens"] > 0


def test_the_table_of_coverage_says_what_is_compared_here() -> None:
    variants = {"qwen35_dk"}
    assert {name for name, _ in CASES} - variants == {c.model for c in COVERAGE if c.transformers}


def test_prefill_speed(engine_for: Callable[..., Any]) -> None:
    """512 tokens of the tiny hybrid model take about 0.1 s; 0.3 s is promised. Of CPU time: other tests run beside this one."""
    engine = engine_for("qwen3next", chunked_prefill_size=2048)
    one_token = GREEDY | {"max_new_tokens": 1}
    processes = [psutil.Process(p.pid) for p in engine.tokenizer_manager._subprocess_watchdog._processes]

    def used() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

    seconds = []
    for seed in range(4):
        start = used()
        engine.generate(input_ids=prompt(512, seed), sampling_params=one_token)
        seconds.append(used() - start)
    assert 0.02 < min(seconds) < 0.3, seconds


@pytest.mark.parametrize("name", ["qwen3next", "llama"])
def test_grammar_requests_work(name: str, engine_for: Callable[..., Any]) -> None:
    engine = engine_for(name, chunked_prefill_size=2048)
    params = {"max_new_tokens": 8, "temperature": 0.0}
    digits = engine.generate(prompt="A number:", sampling_params=params | {"regex": "[0-9]{4}"})
    assert digits["text"].isdigit() and len(digits["text"]) == 4
    free = engine.generate(prompt="A number:", sampling_params=params)
    assert free["meta_info"]["completion_tokens"] > 0
