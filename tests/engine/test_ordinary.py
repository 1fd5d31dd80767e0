"""Ordinary requests are stock SGLang's to the last bit, whatever hypic serves beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hypic.check.engines import running_engine
from hypic.config import HypicConfig
from hypic.engine.http.inprocess import generate
from tests.engine import ordinary

MODELS = ("qwen35", "llama")
Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stock(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """``stock("llama")``: both phases by engines in a process that never runs the plugin."""
    out = tmp_path_factory.mktemp("stock")
    models = [f"{name}={tiny_model(name)}" for name in MODELS]
    command = [sys.executable, ordinary.__file__, str(out), *models]
    process = subprocess.Popen(command, env={**os.environ, "HYPIC_ENABLED": "0"})

    def answers(name: str) -> tuple[Answers, Answers]:
        deadline = time.monotonic() + 300
        while not (out / f"{name}.json").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        first, second = json.loads((out / f"{name}.json").read_text())
        return first, second

    yield answers
    process.kill()
    process.wait()


def link(engine: Any) -> list[str]:
    """Serve linked requests, cold and warm; what became of their segments."""
    a, b, head, query = ordinary.prompts("links", (100, 80, 20, 9))
    outcomes = []
    for ids, segments in (
        (head + a + b + query, [[20, 120], [120, 200]]),
        (b + a + query, [[0, 80], [80, 180]]),
        (query + b + head, [[9, 89]]),
    ):
        out = generate(engine, input_ids=ids, segments=segments, sampling_params=ordinary.GREEDY)
        outcomes += [s["outcome"] for s in out["meta_info"]["hypic"]["spans"] if s["kind"] == "segment"]
    return outcomes


@pytest.mark.parametrize("model", MODELS)
def test_the_plugin_changes_no_bit_of_an_ordinary_answer(
    model: str, stock: Callable[[str], tuple[Answers, Answers]], tiny_model: Callable[[str], Path]
) -> None:
    config = HypicConfig(enabled=True)
    with running_engine(tiny_model(model), env=config.to_env(), **ordinary.FLAGS) as engine:
        first = ordinary.first_phase(engine)
        assert link(engine) == ["compiled"] * 2 + ["hit_device"] * 3
        second = ordinary.second_phase(engine, first)
    expected = stock(model)
    # The phases did what they are for: logprobs of whole prompts, prefix hits, prompts of several chunks.
    assert [len(a["input_token_logprobs"]) for a in first[:2]] == [5, 150]
    assert [a["cached_tokens"] for a in first] == [0] * len(first)
    hits = [a["cached_tokens"] for a in second]
    assert sum(map(bool, hits[:5])) >= 3 and not any(hits[5:7])  # a hybrid is hit only where it kept a state
    for found, wanted in zip((first, second), expected, strict=True):
        assert found == wanted
