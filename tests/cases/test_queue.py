"""Held requests are requests: queue limits, timeouts, priorities and load reports see them; compiles are nobody's."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from fastapi import HTTPException

from hypic.check.session import Prompt
from hypic.segment import INTERNAL_RID_PREFIX
from tests.cases.driving import PATIENCE, Driver, Writer, outcomes, spans

LIMIT = 3
TIMEOUT = 2.0
GREEDY = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
LONG = 12000
"""Tokens whose prefill, in chunks of 32, takes longer than TIMEOUT on any machine that runs this."""


@pytest.fixture
def engine(driver_for: Callable[..., Driver]) -> Driver:
    flags = {"chunked_prefill_size": 32, "max_queued_requests": LIMIT, "enable_priority_scheduling": True}
    return driver_for("llama", flags=flags, env={"SGLANG_REQ_WAITING_TIMEOUT": str(TIMEOUT)})


class Requests:
    """Requests in flight; a request's name is its request id."""

    def __init__(self, engine: Driver) -> None:
        self.engine = engine
        self._tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def send(self, name: str, prompt: Prompt, *, waiting: int | None = None, **fields: Any) -> None:
        """Send a request and wait until so many of the clients' requests are queued."""
        self._tasks[name] = asyncio.ensure_future(
            self.engine.agenerate(
                input_ids=list(prompt.ids),
                segments=[list(s) for s in prompt.segments],
                sampling_params=GREEDY,
                rid=name,
                **fields,
            )
        )
        if waiting is not None:
            await self.engine.until(lambda load: load.num_waiting_reqs == waiting, f"{waiting} requests queued")

    async def report(self, name: str) -> dict[str, Any]:
        """The report of a request that is answered."""
        report: dict[str, Any] = (await self._tasks[name])["meta_info"]["hypic"]
        return report

    async def report_in_the_end(self, name: str, prompt: Prompt) -> dict[str, Any]:
        """The report of the first of several requests that does not time out, named `name` 0, 1, ...: each finds the compile a
        little further."""
        for attempt in itertools.count():  # until the scene's own time is over
            with suppress(HTTPException):
                await self.send(f"{name} {attempt}", prompt)
                return await self.report(f"{name} {attempt}")
        raise AssertionError

    async def error(self, name: str) -> str:
        """What the client is told of a request that is not answered."""
        with pytest.raises(HTTPException) as refused:
            await self._tasks[name]
        return refused.value.detail

    async def abort(self, *names: str) -> None:
        for name in names:
            self.engine.abort(name)
        await asyncio.wait([self._tasks[n] for n in names])


@pytest.fixture
def play(engine: Driver) -> Callable[[Callable[[Requests], Coroutine[Any, Any, None]]], None]:
    """Run a scene on the engine's event loop, and wait until the engine is idle."""

    def run(scene: Callable[[Requests], Coroutine[Any, Any, None]]) -> None:
        engine.audit()
        try:
            engine.run(asyncio.wait_for(scene(Requests(engine)), 2 * PATIENCE))
        finally:
            engine.abort_all()
        engine.audit()

    return run


def test_load_reports_count_held_requests_and_no_compiles(play: Any, write: Writer) -> None:
    """A compile is in the queue, then chunked, and in the running batch until its result is processed."""
    parts = [part for document in write.documents(5, 70) for part in (document, 1)]
    first, second = write.prompt(*parts, write.document(LONG), 9), write.prompt(6, write.document(LONG), 8)

    async def scene(requests: Requests) -> None:
        ends = time.monotonic() + 0.7 * TIMEOUT  # they leave the queue then, however little is compiled
        await requests.send("first", first, waiting=1)
        await requests.send("second", second, waiting=2)
        compiled = 0
        while compiled < 1000 and (not compiled or time.monotonic() < ends):
            load = await requests.engine.load()
            compiled = load.num_used_tokens
            assert (load.num_running_reqs, load.num_waiting_reqs) == (0, 2)
            assert load.num_waiting_uncached_tokens == len(first.ids) + len(second.ids)
            await asyncio.sleep(0.001)
        await requests.abort("first", "second")

    play(scene)


def test_the_queue_limit_counts_held_requests_and_no_compiles(play: Any, write: Writer) -> None:
    prompts = [write.prompt(5, write.document(LONG), 9) for _ in range(LIMIT)]

    async def scene(requests: Requests) -> None:
        for i, prompt in enumerate(prompts):
            await requests.send(f"held {i}", prompt, waiting=i + 1)
        for name, prompt in (("linked", write.prompt(5, write.document(70), 9)), ("plain", write.prompt(9))):
            await requests.send(name, prompt)
            assert "queue is full" in await requests.error(name)
        await requests.abort(*(f"held {i}" for i in range(LIMIT)))

    play(scene)


def test_registrations_are_requests(play: Any, engine: Driver, write: Writer) -> None:
    """They count against the queue limit, and time out; what they had compiled so far goes on, and is found again."""
    documents = [write.document(LONG) for _ in range(LIMIT)]

    async def scene(requests: Requests) -> None:
        tasks = [asyncio.ensure_future(engine.register(d)) for d in documents]
        await engine.until(lambda load: load.num_waiting_reqs == LIMIT, "registrations queued")
        with pytest.raises(HTTPException, match="queue is full"):
            await engine.register(write.document(70))
        await requests.send("plain", write.prompt(9))
        assert "queue is full" in await requests.error("plain")
        for task in tasks:
            with pytest.raises(HTTPException, match="waiting timeout"):
                await task
        views = await engine.named.views(engine.named.registry.of(""))
        first, *others, refused = [v.look.state for v in views]
        assert (first, refused) == ("compiling", "absent")
        assert set(others) <= {"compiling", "absent"}  # queued behind the first, their compiles time out a moment later
        for view in views:
            await engine.named.delete("", view.record.id)

    play(scene)


def test_a_held_request_times_out_and_its_compile_stays_useful(play: Any, write: Writer) -> None:
    document = write.document(LONG)

    async def scene(requests: Requests) -> None:
        prompt = write.prompt(5, document, 9)
        await requests.send("held", prompt)
        assert "waiting timeout" in await requests.error("held")
        assert outcomes(await requests.report_in_the_end("next", prompt)) in (["waited"], ["hit_device"])

    play(scene)


def test_a_failed_compile_makes_its_segment_plain(play: Any, write: Writer) -> None:
    """Its compile times out in the queue, with the request that brought it; another has waited less long."""
    document, other = write.document(200), write.document(100)

    async def scene(requests: Requests) -> None:
        await requests.send("known", write.prompt(3, other, 4))
        await requests.report("known")
        await requests.send("busy", write.prompt(LONG))
        await requests.send("first", write.prompt(5, document, 9), waiting=1)
        await asyncio.sleep(0.5 * TIMEOUT)
        await requests.send("second", write.prompt(7, other, document, 8))
        assert "waiting timeout" in await requests.error("first")
        await requests.abort("busy")
        report = await requests.report("second")
        assert outcomes(report) == ["hit_device", "declined"]
        failed = spans(report)[1]
        assert (failed["reason"], failed["reused"], failed["recomputed"]) == ("compile_failed", 0, len(document))
        await requests.send("third", write.prompt(4, document, 8))
        assert outcomes(await requests.report("third")) == ["compiled"]

    play(scene)


def test_priorities_push_out_requests_not_compiles(play: Any, write: Writer) -> None:
    documents = write.documents(LIMIT, LONG)

    async def scene(requests: Requests) -> None:
        for i, document in enumerate(documents):
            await requests.send(f"held {i}", write.prompt(5, document, 9), waiting=i + 1, priority=1)
        await requests.send("urgent", write.prompt(20), priority=9)
        assert "higher priority" in await requests.error(f"held {LIMIT - 1}")
        await requests.engine.until(lambda load: load.num_waiting_reqs == LIMIT, "full again")
        await requests.abort("urgent", *(f"held {i}" for i in range(LIMIT - 1)))

    play(scene)


def test_clients_cannot_abort_compiles(play: Any, write: Writer) -> None:
    document = write.document(2000)

    async def scene(requests: Requests) -> None:
        prompt = write.prompt(5, document, 9)
        await requests.send("held", prompt, waiting=1)
        for rid in (INTERNAL_RID_PREFIX, "hypic", "h"):
            requests.engine.abort(rid)
        try:
            assert outcomes(await requests.report("held")) == ["compiled"]
        except (
            HTTPException
        ):  # a busy machine: it timed out, but its compile goes on, or the next one would have to begin anew
            assert outcomes(await requests.report_in_the_end("next", prompt)) in (["waited"], ["hit_device"])

    play(scene)
