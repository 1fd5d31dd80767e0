"""The router as its front uses it: real sockets, scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from hypic.router import messages as m
from hypic.router.actions import Settings
from hypic.router.costs import Costs
from hypic.router.schedule import NoWorkers, Placement, Source
from hypic.router.service import Reachable, Router, WorkerLost
from hypic.router.timeline import Recorder
from tests.router.scripted import ScriptedWorker, control, key, prompts

COSTS = Costs(tokens_per_s=1000, forward_tokens=1000, transfer_gb_s=100, link_s=0.1)
PATIENT = Settings(heartbeat=0.05, dead_after=60, expect_within=60)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(bounded())


@asynccontextmanager
async def cluster(
    folder: Path,
    names: tuple[str, ...] = ("w0", "w1"),
    settings: Settings = PATIENT,
    reachable: Reachable | None = None,
) -> AsyncIterator[tuple[Router, list[ScriptedWorker]]]:
    router = Router(COSTS, control(folder), settings=settings, reachable=reachable)
    address = await router.start()
    context = zmq.asyncio.Context()
    workers = [ScriptedWorker(context, address, name) for name in names]
    try:
        yield router, workers
    finally:
        for w in workers:
            w.socket.close()
        context.term()
        await router.close()


def test_a_request_and_its_timeline(folder: Path) -> None:
    async def main() -> None:
        async with cluster(folder) as (router, (w0, w1)):
            with pytest.raises(NoWorkers):
                await router.submit("rid", prompts(2), 2000)
            await w0.join()
            await w1.join()
            submitting = asyncio.create_task(router.submit("rid", prompts(2), 2000))
            expect = await w0.hear(m.Expect)
            own, other = await w0.hear(m.Compile), await w1.hear(m.Compile)
            assert not submitting.done()
            await asyncio.sleep(0.02)
            await w0.say(m.Expecting(request=expect.request, awaited=(other.key,)))
            ticket = await submitting
            assert (ticket.worker, ticket.http) == ("w0", "http://w0")
            for w, order in ((w0, own), (w1, other)):
                await w.say(m.Compiled(flight=order.flight, key=order.key, ok=True, seconds=0.005))
            while any(line.done is None for line in ticket.timeline.segments):
                await asyncio.sleep(0.01)
            await w0.say(m.Arrived(request=expect.request, key=other.key, ok=True, seconds=0.002))
            while all(line.arrived is None for line in ticket.timeline.segments):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.01)
            router.first_token(ticket)
            router.end(ticket, "answered")
            router.end(ticket, "again")
            t = ticket.timeline
            assert t.scattered and t.combine == "w0" and t.outcome == "answered"
            assert None not in (t.placed, t.expected, t.forwarded, t.first_token, t.ended)
            assert 0 <= t.placed < 20 <= t.expected <= t.forwarded < t.first_token <= t.ended  # type: ignore[operator]
            lines = {line.worker: line for line in t.segments}
            assert {line.role for line in t.segments} == {"compile"} and set(lines) == {"w0", "w1"}
            assert lines["w0"].arrived is None
            far = lines["w1"]
            assert far.done - far.begun == pytest.approx(5, abs=0.01)  # type: ignore[operator]
            assert far.arrived - far.sent == pytest.approx(2, abs=0.01)  # type: ignore[operator]
            assert far.done < far.arrived < t.first_token  # type: ignore[operator]
            assert [x.outcome for x in router.recorder.timelines()] == ["NoWorkers", "answered"]
            assert router.roles == {"compile": 2} and router.placements == {"scattered": 1}
            assert not router._tickets and not router._expected_at and not router.coordinator._requests

    run(main())


def test_costs_follow_what_is_seen(folder: Path) -> None:
    async def main() -> None:
        async with cluster(folder) as (router, (w0, w1)):
            await w0.join()
            await w1.join()
            costs = router.coordinator.cluster.costs
            assert (costs.artifact_nbytes(108), costs.forward_tokens, costs.seam_window) == (1500, 512, 8), (
                "as Hello says"
            )
            submitting = asyncio.create_task(router.submit("rid", prompts(2, nbytes=4_000_000), 2000))
            expect = await w0.hear(m.Expect)
            other = await w1.hear(m.Compile)
            await asyncio.sleep(0.05)
            await w0.say(m.Expecting(request=expect.request, awaited=(other.key,)))
            await submitting
            assert router.coordinator.cluster.costs.message_s >= 0.025, "half the time of an answer"
            await w0.say(m.Arrived(request=expect.request, key=other.key, ok=True, seconds=0.01))
            await w0.say(m.Compiled(flight=0, key=key(9), ok=True))  # of nobody's
            while router.coordinator.cluster.costs.transfer_gb_s != pytest.approx(0.4, rel=0.01):
                await asyncio.sleep(0.01)

    run(main())


def test_a_worker_is_lost(folder: Path) -> None:
    """Before a request may go: WorkerLost. After: its ticket says so. The next one goes elsewhere."""

    async def main() -> None:
        async with cluster(folder) as (router, (w0, w1)):
            await w0.join()
            await w1.join()
            waiting = asyncio.create_task(router.submit("a", prompts(2), 2000))
            await w0.hear(m.Expect)
            plain = await router.submit("b", [], 10, combine="w0")
            assert plain.worker == "w0" and not plain.lost.is_set()
            router.disown(plain.worker)
            assert plain.lost.is_set()
            with pytest.raises(WorkerLost):
                await waiting
            for _ in range(2):
                assert (await router.submit("c", [], 10, combine="w0")).worker == "w1", "w0 is not alive"
            assert router.coordinator.counts["disowned"] == 1
            router.disown(plain.worker)  # known already
            assert router.coordinator.counts["disowned"] == 1
            await w0.hear(m.Compile)
            await w0.join()  # it lives after all
            assert (await router.submit("d", [], 10)).worker == "w0"

    run(main())


def test_a_client_leaves_before_its_request_may_go(folder: Path) -> None:
    async def main() -> None:
        async with cluster(folder) as (router, (w0, w1)):
            await w0.join()
            await w1.join()
            submitting = asyncio.create_task(router.submit("a", prompts(2), 2000))
            expect = await w0.hear(m.Expect)
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
            await w0.hear(m.Compile)
            assert (await w0.hear(m.Cancel)).request == expect.request
            await w1.hear(m.Compile)
            assert (await w1.hear(m.Cancel)).request == expect.request
            assert not router.coordinator._requests and router.recorder.timelines()[-1].outcome == "cancelled"

    run(main())


def test_requests_of_one_kind_spread_over_idle_workers(folder: Path) -> None:
    async def main() -> None:
        async with cluster(folder) as (router, (w0, w1)):
            await w0.join()
            await w1.join()
            tickets = [await router.submit(f"r{i}", [], 10) for i in range(4)]
            for t in tickets:
                router.first_token(t)
            assert sorted(t.worker for t in tickets) == ["w0", "w0", "w1", "w1"]
            for t in tickets:
                if t.worker == "w1":
                    router.end(t, "answered")
            assert (await router.submit("next", [], 10)).worker == "w1", "w0 still answers two"

    run(main())


def test_a_worker_counts_once_its_http_server_answers(folder: Path) -> None:
    up: set[str] = set()

    async def reachable(hello: m.Hello) -> bool:
        return hello.http in up

    async def main() -> None:
        async with cluster(folder, reachable=reachable) as (router, (w0, w1)):
            for _ in range(2):
                await w0.say(w0.hello)
            await w1.say(w1.hello)
            await asyncio.sleep(0.2)
            assert not router.coordinator.hellos()
            up.add("http://w1")
            await w1.hear(m.Welcome)
            assert list(router.coordinator.hellos()) == ["w1"]
            up.add("http://w0")
            await w0.hear(m.Welcome)
            assert list(router.coordinator.hellos()) == ["w0", "w1"] and not router._probes
            up.clear()
            await w0.join()  # the same run over a new connection: it was reached before

    run(main())


def test_new_weights_on_one_worker_after_the_other(folder: Path) -> None:
    """The identity is that of the workers that are there; once none has the old weights, the new ones are it."""

    async def main() -> None:
        async with cluster(folder) as (router, (w0, w1)):
            await w0.join()
            await w1.join()
            new0, new1 = (_with_identity(w.hello, b"new weights") for w in (w0, w1))
            await w0.say(new0)
            await w0.hear(m.Refused)
            assert list(router.coordinator.hellos()) == ["w1"]
            await w1.say(new1)
            await w1.hear(m.Welcome)
            await w0.say(new0)
            await w0.hear(m.Welcome)
            assert list(router.coordinator.hellos()) == ["w0", "w1"] and router.coordinator.identity == b"new weights"

    run(main())


def _with_identity(hello: m.Hello, identity: bytes) -> m.Hello:
    fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
    return m.Hello(**{**fields, "identity": identity})


def test_a_segment_in_two_passes_does_not_begin_before_the_first() -> None:
    """A pass of a second has one segment and half of the next, another half second the rest: its time is in both passes."""
    recorder = Recorder()
    placement = Placement("w0", {key(i): Source("compile", "w0") for i in range(2)}, False, 0.0)
    timeline = recorder.begin("r", "rid", 3000, now=100.0)
    recorder.placed("r", placement, prompts(2), now=100.0)
    recorder.received("w0", m.Compiled(flight=0, key=key(0), ok=True, seconds=0.5), now=101.0)
    recorder.received("w0", m.Compiled(flight=1, key=key(1), ok=True, seconds=1.0), now=101.5)
    assert [(x.begun, x.done) for x in timeline.segments] == [(0.0, 1000.0), (0.0, 1500.0)]


def test_compiles_of_one_pass_are_one_bar() -> None:
    """Three that share a pass of 300 ms, then one alone: each says its share, and the bars are those of the passes."""
    recorder = Recorder()
    placement = Placement("w0", {key(i): Source("compile", "w0") for i in range(4)}, False, 0.0)
    timeline = recorder.begin("r", "rid", 4000, now=100.0)
    recorder.placed("r", placement, prompts(4), now=100.0)
    for i in range(3):
        recorder.received("w0", m.Compiled(flight=i, key=key(i), ok=True, seconds=0.1), now=100.5 + i / 1e4)
    recorder.received("w0", m.Compiled(flight=3, key=key(3), ok=True, seconds=0.2), now=100.71)
    recorder.received("w1", m.Compiled(flight=3, key=key(3), ok=True, seconds=0.2), now=100.71)
    bars = [(x.begun, x.done) for x in timeline.segments]
    assert bars == [(200.2, 500.0), (200.2, 500.1), (200.2, 500.2), (510.0, 710.0)]
