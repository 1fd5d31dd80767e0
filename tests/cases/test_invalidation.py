"""Row 28 of CASES: after a flush or new weights, also while requests are held, nothing stale is used again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hypic.check.judge import Judge
from hypic.check.session import Answer
from hypic.engine.named import Look
from tests.cases.driving import PATIENCE, Driver, Writer, assert_equals_oracle

CHUNK = 64
LONG = 2000


@pytest.fixture(scope="module")
def other_weights(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same shape and other weights: two layers change places."""
    source, target = tiny_model("qwen35"), tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(source, target)
    (file,) = target.glob("*.safetensors")
    swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}

    def renamed(name: str) -> str:
        return next((name.replace(a, b) for a, b in swap.items() if a in name and "visual" not in name), name)

    save_file({renamed(k): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def new_judge(other_weights: Path) -> Judge:
    return Judge("other", str(other_weights), 0)


@pytest.fixture
def judge(judge_for: Callable[[str], Judge]) -> Judge:
    return judge_for("qwen35")


@pytest.fixture
def engine(driver_for: Callable[..., Driver], tiny_model: Callable[[str], Path]) -> Iterator[Driver]:
    """An engine in small chunks, so that compiles last; it ends each test with the weights it began with."""
    driver = driver_for("qwen35", flags={"chunked_prefill_size": CHUNK})
    driver.flush()
    yield driver
    driver.run(driver.new_weights(tiny_model("qwen35")))


def test_28_a_flush_drops_artifacts_and_linked_prefixes(engine: Driver, write: Writer) -> None:
    document, head = write.document(100), write.tokens(7)
    first = write.prompt(head, document, 9)
    engine.ask(first)
    longer = write.prompt(head, document, list(first.ids[107:]), 5)
    assert engine.ask(longer).outcomes == ["hit_radix"]
    assert engine.ask(write.prompt(3, document, 9)).outcomes == ["hit_device"]
    engine.flush()
    assert engine.dump() == {}
    for prompt, outcome in ((longer, "compiled"), (write.prompt(3, document, 9), "hit_device")):
        answer = engine.ask(prompt)
        assert answer.outcomes == [outcome] and answer.report.reused_radix == 0


def test_28_a_flush_while_a_request_is_held_is_refused_and_harms_nothing(
    engine: Driver, judge: Judge, write: Writer
) -> None:
    known, long = write.document(100), write.document(LONG)
    engine.ask(write.prompt(3, known, 4))
    prompt = write.prompt(5, known, long, 9)

    async def scene() -> Answer:
        task = asyncio.ensure_future(engine.answer(prompt))
        await engine.until(lambda load: load.num_waiting_reqs == 1, "held")
        assert not (await engine.manager.flush_cache()).success
        return await task

    answer = engine.run(asyncio.wait_for(scene(), PATIENCE))
    assert answer.outcomes == ["hit_device", "compiled"]
    assert_equals_oracle(judge, engine, prompt, answer)


def test_28_new_weights_are_never_joined_with_old_artifacts(
    engine: Driver,
    judge: Judge,
    new_judge: Judge,
    other_weights: Path,
    tiny_model: Callable[[str], Path],
    write: Writer,
) -> None:
    document = write.document(100)
    for weights, oracle in ((None, judge), (other_weights, new_judge), (tiny_model("qwen35"), judge)):
        if weights is not None:
            engine.run(engine.new_weights(weights))
            assert engine.dump() == {}
        for outcome in ("compiled", "hit_device"):
            prompt = write.prompt(6, document, 9)
            answer = engine.ask(prompt)
            assert answer.outcomes == [outcome]
            assert_equals_oracle(oracle, engine, prompt, answer)


def test_28_new_weights_while_a_compile_goes_on_that_nobody_waits_for(
    engine: Driver, new_judge: Judge, other_weights: Path, write: Writer
) -> None:
    """Its client has left: for SGLang the server is idle, and it insists on flushing its cache."""
    document = write.document(LONG)

    async def scene() -> None:
        task = asyncio.ensure_future(engine.answer(write.prompt(5, document, 9), rid="leaves"))
        await engine.until(lambda load: load.num_waiting_reqs == 1 and load.num_used_tokens > CHUNK, "compiling")
        engine.abort("leaves")
        await asyncio.wait([task])
        await engine.new_weights(other_weights)

    engine.run(asyncio.wait_for(scene(), PATIENCE))
    prompt = write.prompt(6, document, 9)
    answer = engine.ask(prompt)
    assert answer.outcomes == ["compiled"]
    assert_equals_oracle(new_judge, engine, prompt, answer)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_28_new_weights_while_requests_are_held(
    engine: Driver, new_judge: Judge, other_weights: Path, write: Writer, mode: str
) -> None:
    """Held with a known artifact and a compile that is half done: both belong to the old weights."""
    known, long = write.document(100), write.document(LONG)
    engine.ask(write.prompt(3, known, 4))
    prompts = [write.prompt(5, known, long, 9), write.prompt(8, long, 7), write.prompt(9, known, 2, known, 3)]

    async def scene() -> list[Answer]:
        tasks = [asyncio.ensure_future(engine.answer(prompt)) for prompt in prompts[:2]]
        await engine.until(lambda load: load.num_waiting_reqs == 2 and load.num_used_tokens > 3 * CHUNK, "compiling")
        await engine.pause(mode)
        await engine.new_weights(other_weights, flush=False)
        await engine.resume()
        return [*await asyncio.gather(*tasks), await engine.answer(prompts[2])]

    for prompt, answer in zip(prompts, engine.run(asyncio.wait_for(scene(), PATIENCE)), strict=True):
        assert_equals_oracle(new_judge, engine, prompt, answer)
    again = write.prompt(3, known, long, 5)
    answer = engine.ask(again)
    assert answer.outcomes == ["hit_device"] * 2
    assert_equals_oracle(new_judge, engine, again, answer)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_28_named_segments_outlive_weights_and_their_artifacts_do_not(
    engine: Driver, new_judge: Judge, other_weights: Path, write: Writer, mode: str
) -> None:
    """One pinned, and one that is being registered while the weights change."""
    known, long = write.document(100), write.document(LONG)
    (pinned,) = engine.run(engine.register(known, pin=True))

    async def scene() -> Any:
        task = asyncio.ensure_future(engine.register(long))
        await engine.until(lambda load: load.num_waiting_reqs == 1 and load.num_used_tokens > 3 * CHUNK, "compiling")
        await engine.pause(mode)
        await engine.new_weights(other_weights, flush=False)
        (absent,) = await engine.named.views([pinned.record])
        assert absent.look == Look("absent", 0, 0, True)
        await engine.resume()
        return (await task)[0]

    registered = engine.run(asyncio.wait_for(scene(), PATIENCE))
    assert (registered.look.state, registered.record.reason) == ("ready", None)
    prompt = write.prompt(6, known, 2, long, 9)
    answer = engine.ask(prompt)
    assert answer.outcomes == ["compiled", "hit_device"]
    assert_equals_oracle(new_judge, engine, prompt, answer)
    views = engine.run(engine.named.views([pinned.record, registered.record]))
    assert [(v.look.state, v.look.pinned, v.look.hits) for v in views] == [("ready", True, 0), ("ready", False, 1)]
    for view in views:
        engine.run(engine.named.delete("", view.record.id))


@pytest.mark.parametrize("compiling", [False, True])
def test_28_a_segment_deleted_while_it_is_registered_leaves_neither_pin_nor_lock(
    engine: Driver, write: Writer, compiling: bool
) -> None:
    """The schedulers hear of its end before they hear of it, or in the middle of its compile."""

    async def scene() -> Any:
        task = asyncio.ensure_future(engine.register(write.document(LONG), pin=True))
        while not len(engine.named.registry):
            await asyncio.sleep(0)
        if compiling:
            await engine.until(lambda load: load.num_used_tokens > 3 * CHUNK, "compiling")
        (record,) = engine.named.registry.of("")
        await engine.named.delete("", record.id)
        (view,) = await task
        return view

    view = engine.run(asyncio.wait_for(scene(), PATIENCE))
    assert not view.look.pinned and len(engine.named.registry) == 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_28_a_paused_link_goes_on(engine: Driver, judge: Judge, write: Writer, mode: str) -> None:
    """Paused while its own tokens are computed; nothing is invalidated."""
    document = write.document(300)
    engine.ask(write.prompt(3, document, 4))
    prompt = write.prompt(5, document, 1500)

    async def scene() -> Answer:
        await engine.until(lambda load: load.num_used_tokens == 0, "idle")
        task = asyncio.ensure_future(engine.answer(prompt))
        await engine.until(lambda load: load.num_used_tokens > len(document) + CHUNK, "linking")
        await engine.pause(mode)
        await engine.resume()
        return await task

    answer = engine.run(asyncio.wait_for(scene(), PATIENCE))
    assert answer.outcomes == ["hit_device"]
    assert_equals_oracle(judge, engine, prompt, answer)
