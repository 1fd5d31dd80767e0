"""Row 16 of CASES: an artifact of one LoRA adapter never serves another, nor the base model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hypic.check.session import Prompt
from hypic.check.tiny_models.common import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS
from hypic.segment import span_id
from tests.cases.driving import PATIENCE, Driver, Writer, outcomes

RANK = 4
CHUNK = 64
"""Small, so that compiles of a few thousand tokens last."""
OUT = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 5}


def write_adapter(folder: Path, seed: int) -> str:
    """A random adapter of the tiny Llama, strong enough to change every answer."""
    folder.mkdir()
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, width in OUT.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = 0.3 * torch.randn(RANK, HIDDEN, generator=rng)
            weights[f"{module}.lora_B.weight"] = 0.3 * torch.randn(width, RANK, generator=rng)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "target_modules": [*OUT]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(("a", "b", "another a"))}


@pytest.fixture
def engine(driver_for: Callable[..., Driver], adapters: dict[str, str]) -> Driver:
    flags = {
        "enable_lora": True,
        "lora_backend": "torch_native",
        "lora_paths": {name: adapters[name] for name in ("a", "b")},
        "max_lora_rank": RANK,
        "max_loras_per_batch": 3,
        "chunked_prefill_size": CHUNK,
    }
    return driver_for("llama", flags=flags)


async def answer(
    engine: Driver, prompt: Prompt, adapter: str | None, tenant: str | None = None, rid: str | None = None
) -> dict[str, Any]:
    segments = [list(s) for s in prompt.segments]
    params = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    request = {"input_ids": prompt.ids, "segments": segments, "lora_path": adapter, "extra_key": tenant, "rid": rid}
    return await engine.agenerate(**request, sampling_params=params, **LOGPROBS)


def ask(engine: Driver, prompt: Prompt, adapter: str | None, tenant: str | None = None) -> dict[str, Any]:
    return engine.run(answer(engine, prompt, adapter, tenant))


def assert_same_answer(a: dict[str, Any], b: dict[str, Any], bound: float = 1e-4) -> None:
    assert a["output_ids"] == b["output_ids"]
    for x, y in zip(*(out["meta_info"]["output_token_logprobs"] for out in (a, b)), strict=True):
        assert x[0] == pytest.approx(y[0], abs=bound)


def test_16_adapters_and_the_base_model_have_artifacts_of_their_own(engine: Driver, write: Writer) -> None:
    """One segment at the start of a prompt answers as plain text does (P1), under each adapter."""
    document = write.document(100)
    at_start, behind = write.prompt(document, 9), write.prompt(7, document, 9)
    answers = set()
    for adapter in (None, "a", "b"):
        linked = ask(engine, at_start, adapter)
        assert outcomes(linked["meta_info"]["hypic"]) == ["compiled"] and linked["meta_info"]["cached_tokens"] == 0
        assert_same_answer(linked, ask(engine, at_start._replace(segments=()), adapter))
        answers.add(tuple(linked["output_ids"]))
    assert len(answers) == 3
    for adapter in (None, "a", "b"):
        warm = ask(engine, behind, adapter)
        assert outcomes(warm["meta_info"]["hypic"]) == ["hit_device"]
        assert warm["meta_info"]["cached_tokens"] == engine.interior(document)
        assert_same_answer(warm, ask(engine, behind, adapter, tenant="cold"))


def test_16_adapters_do_not_wait_for_each_others_compiles(engine: Driver, write: Writer) -> None:
    document = write.document(150)
    prompts = {adapter: write.prompt(document, 9) for adapter in ("a", "b", None)}

    async def race() -> list[dict[str, Any]]:
        return await asyncio.gather(*(answer(engine, prompt, adapter) for adapter, prompt in prompts.items()))

    for (adapter, prompt), linked in zip(prompts.items(), engine.run(race()), strict=True):
        assert outcomes(linked["meta_info"]["hypic"]) == ["compiled"]
        assert_same_answer(linked, ask(engine, prompt._replace(segments=()), adapter))


def test_16_a_named_segment_is_compiled_under_its_adapter_and_may_be_used_under_others(
    engine: Driver, write: Writer
) -> None:
    document = write.document(120)
    (a,), (base,) = (engine.run(engine.register(document, adapter=adapter)) for adapter in ("a", ""))
    assert a.record.id != base.record.id and [v.look.state for v in (a, base)] == ["ready", "ready"]
    for adapter, outcome in (("a", "hit_device"), (None, "hit_device"), ("b", "compiled")):
        request = {"input_ids": write.tokens(9), "hypic": {"insert": [[4, a.record.id]], "report": True}}
        out = engine.run(engine.raw(**request, lora_path=adapter, sampling_params={"max_new_tokens": 2}))
        assert outcomes(out["meta_info"]["hypic"]) == [outcome]
    assert [v.look.hits for v in engine.run(engine.named.views([a.record, base.record]))] == [1, 1]


def test_28_an_adapter_that_was_unloaded_leaves_nothing_to_its_namesake(
    engine: Driver, adapters: dict[str, str], write: Writer
) -> None:
    documents = {adapter: write.document(100) for adapter in ("a", "b")}
    for adapter, document in documents.items():
        ask(engine, write.prompt(document, 9), adapter)
    names = {adapter: span_id(document.ids) for adapter, document in documents.items()}
    assert set(names.values()) <= engine.dump().keys()
    assert engine.run(engine.unload_adapter("a"))
    left = engine.dump().keys()
    assert names["a"] not in left and names["b"] in left
    assert engine.run(engine.load_adapter("a", adapters["another a"]))
    prompt = write.prompt(documents["a"], 9)
    linked = ask(engine, prompt, "a")
    assert outcomes(linked["meta_info"]["hypic"]) == ["compiled"]
    assert_same_answer(linked, ask(engine, prompt._replace(segments=()), "a"))
    assert outcomes(ask(engine, write.prompt(6, documents["b"], 9), "b")["meta_info"]["hypic"]) == ["hit_device"]


def test_28_an_adapter_is_unloaded_while_a_compile_under_it_goes_on_that_nobody_waits_for(
    engine: Driver, adapters: dict[str, str], write: Writer
) -> None:
    """Its client has left, so for SGLang nothing uses the adapter any more."""
    document = write.document(2500)
    prompt = write.prompt(document, 9)

    async def scene() -> None:
        task = asyncio.ensure_future(answer(engine, prompt, "b", rid="leaves"))
        await engine.until(lambda load: load.num_waiting_reqs == 1 and load.num_used_tokens > CHUNK, "compiling")
        engine.abort("leaves")
        await asyncio.wait([task])
        registry = engine.manager.lora_registry  # SGLang forgets to count down when a queued request is aborted
        await registry.release(registry._registry["b"].lora_id)
        assert await engine.unload_adapter("b")

    engine.run(asyncio.wait_for(scene(), PATIENCE))
    engine.audit()
    assert span_id(document.ids) not in engine.dump()
    assert engine.run(engine.load_adapter("b", adapters["b"]))
    linked = ask(engine, prompt, "b")
    assert outcomes(linked["meta_info"]["hypic"]) == ["compiled"]
    assert_same_answer(linked, ask(engine, prompt._replace(segments=()), "b", tenant="plain"), 1e-3)
