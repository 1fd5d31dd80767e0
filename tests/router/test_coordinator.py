"""The router's decisions under faults. Workers here are scripts, not engines: what they say is what the protocol allows."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from hypic.router import messages as m
from hypic.router.actions import Action, Broken, Forward, Prompt, Send, Settings
from hypic.router.control import ControlSocket
from hypic.router.coordinator import Coordinator
from hypic.router.costs import Costs

COSTS = Costs(tokens_per_s=1000, forward_tokens=1000, transfer_gb_s=100, link_s=0.1)
SETTINGS = Settings(heartbeat=1, dead_after=3, expect_within=1, compile_within=20, arrive_within=20)


def key(i: int) -> bytes:
    return i.to_bytes(24, "big")


def prompts(n: int, first: int = 0) -> list[Prompt]:
    return [Prompt(key(first + i), "", "", bytes(8000), 1000) for i in range(n)]


def hello(worker: str, epoch: bytes = b"e", identity: bytes = b"model") -> m.Hello:
    places = {"data": f"ipc:///{worker}", "http": f"http://{worker}"}
    return m.Hello(worker=worker, epoch=epoch, identity=identity, capacity=10**9, free=0, **places)


def router(*workers: str) -> Coordinator:
    c = Coordinator(COSTS, settings=SETTINGS)
    for w in workers:
        (send,) = c.receive(w.encode(), hello(w), 0.0)
        assert isinstance(send, Send) and isinstance(send.message, m.Welcome)
    return c


def said(actions: list[Action], kind: type) -> list[tuple[str, Any]]:
    return [(a.peer.decode(), a.message) for a in actions if isinstance(a, Send) and isinstance(a.message, kind)]


def compiled(c: Coordinator, order: tuple[str, m.Compile], now: float = 1.0, ok: bool = True) -> list[Action]:
    worker, compile_ = order
    done = m.Compiled(flight=compile_.flight, key=compile_.key, ok=ok, nbytes=1000, seconds=0.5 if ok else 0.0)
    return c.receive(worker.encode(), done, now)


def is_idle(c: Coordinator) -> None:
    """No trace of a request is left."""
    assert not c._requests and not c.cluster.flights
    assert len(c._deadlines) == 0
    assert all(w.queued_tokens == w.linking == w.running == 0 for w in c.cluster.workers.values())


def test_a_request_from_beginning_to_end() -> None:
    c = router("w0", "w1")
    actions = c.submit("r", prompts(4), 0.0)
    orders, ((combine, expect),) = said(actions, m.Compile), said(actions, m.Expect)
    assert sorted(w for w, _ in orders) == ["w0", "w0", "w1", "w1"] and combine == "w0"
    assert {(s.key, s.source, s.address) for s in expect.segments} == {
        (o.key, "w1", "ipc:///w1") for w, o in orders if w == "w1"
    }
    assert not [a for a in actions if isinstance(a, Forward)], "the combine worker has not answered"
    awaited = tuple(s.key for s in expect.segments)
    assert c.receive(b"w1", m.Expecting(request="r", awaited=awaited), 0.1) == [], "not the combine worker"
    forward = c.receive(b"w0", m.Expecting(request="r", awaited=awaited), 0.1)
    assert forward == [Forward("r", "w0", "http://w0")]
    assert c.receive(b"w0", m.Expecting(request="r", awaited=awaited), 0.1) == [], "once"
    assert c.tick(2.0) == [] and not c.counts
    first = next(o for w, o in orders if w == "w0")
    assert compiled(c, ("w1", first), ok=False) == [] and first.key in c.cluster.flights, "not its compile"
    for order in orders:
        assert compiled(c, order) == []
        assert compiled(c, order) == [], "an echo"
    assert c.cluster.workers["w1"].tokens_per_s == 2000
    for k in awaited:
        assert c.receive(b"w0", m.Arrived(request="r", key=k, ok=True), 1.0) == []
    c.first_token("r")
    c.end("r")
    is_idle(c)


def test_without_an_answer_the_request_goes_to_its_worker_all_the_same() -> None:
    c = router("w0", "w1")
    c.submit("r", prompts(4), 0.0)
    assert c.tick(0.9) == []
    assert [a for a in c.tick(1.1) if isinstance(a, Forward)] == [Forward("r", "w0", "http://w0")]


def test_one_worker_needs_no_scatter() -> None:
    c = router("w0")
    actions = c.submit("r", prompts(2), 0.0)
    assert not said(actions, m.Expect) and actions[-1] == Forward("r", "w0", "http://w0")
    with pytest.raises(ValueError):
        c.submit("r", prompts(2), 0.0)


@pytest.mark.parametrize("how", ["silent", "bye", "failed", "late"])
def test_a_compile_that_does_not_come_is_ordered_elsewhere(how: str) -> None:
    """CASES 23: before and during."""
    c = router("w0", "w1", "w2")
    actions = c.submit("r", prompts(3), 0.0)
    order = next(o for o in said(actions, m.Compile) if o[0] == "w1")
    if how == "silent":
        for w in ("w0", "w2"):
            c.receive(w.encode(), m.Heartbeat(seq=1, queued_tokens=0, running=0, free=0), 3.5)
        actions = c.tick(4.0)
    elif how == "bye":
        actions = c.receive(b"w1", m.Bye(), 1.0)
    elif how == "failed":
        actions = compiled(c, order, ok=False)
    else:
        for w in ("w0", "w1", "w2"):
            c.receive(w.encode(), m.Heartbeat(seq=1, queued_tokens=0, running=0, free=0), 20.0)
        actions = c.tick(20.5)
    again = [o for o in said(actions, m.Compile) if o[1].key == order[1].key]
    assert [w for w, _ in again] == ["w2"] and again[0][1].flight != order[1].flight
    reroutes = [(w, r.source, r.address) for w, r in said(actions, m.Reroute) if r.key == order[1].key]
    assert reroutes == [("w0", "w2", "ipc:///w2")]
    actions = compiled(c, again[0], now=21.0, ok=False)
    assert [(w, r.address) for w, r in said(actions, m.Reroute)] == [("w0", "")], "then the combine worker does it"
    assert not said(actions, m.Compile)


def test_a_worker_that_dies_after_sending_takes_nothing_along() -> None:
    c = router("w0", "w1")
    orders = said(c.submit("r", prompts(2), 0.0), m.Compile)
    for order in orders:
        compiled(c, order)
        c.receive(b"w0", m.Arrived(request="r", key=order[1].key, ok=True), 1.0)
    assert c.receive(b"w1", m.Bye(), 1.1) == []


def test_a_holder_that_dies_is_replaced_by_another_holder() -> None:
    c = router("w0", "w1", "w2")
    for w in ("w1", "w2"):
        c.receive(w.encode(), m.Stored(seq=1, keys=(key(0),), nbytes=(1000,)), 0.0)
    c.cluster.workers["w1"].queued_tokens = c.cluster.workers["w2"].queued_tokens = 9000  # so that w0 combines
    ((_, expect),) = said(c.submit("r", prompts(1), 0.0), m.Expect)
    assert expect.segments[0].source == "w1"
    actions = c.receive(b"w1", m.Bye(), 0.1)
    assert [(w, r.source) for w, r in said(actions, m.Reroute)] == [("w0", "w2")] and not said(actions, m.Compile)
    c.receive(b"w0", m.Arrived(request="r", key=key(0), ok=False, reason="gone"), 0.2)
    assert not c.cluster.directory.holders(key(0)), "a hit that was stale is not tried again"
    assert c.counts["stale_hit"] == 1


def test_a_combine_worker_that_dies_breaks_its_requests_and_no_others() -> None:
    """CASES 24; and what another request waited for, on the dead worker, is ordered anew."""
    c = router("w0", "w1", "w2")
    orders = said(c.submit("a", prompts(3), 0.0), m.Compile)
    on_w0 = next(o for w, o in orders if w == "w0")
    actions = c.submit("b", prompts(3), 0.0)
    ((other, expect),) = said(actions, m.Expect)
    assert other != "w0" and "w0" in {s.source for s in expect.segments} and not said(actions, m.Compile)
    actions = c.receive(b"w0", m.Bye(), 0.5)
    assert [a for a in actions if isinstance(a, Broken)] == [Broken("a", "w0")]
    again = [(w, o) for w, o in said(actions, m.Compile) if o.key == on_w0.key]
    assert len(again) == 1 and again[0][0] not in ("w0", other)
    assert {(w, r.request) for w, r in said(actions, m.Reroute)} == {(other, "b")}


def test_a_client_that_goes_leaves_work_that_others_wait_for() -> None:
    c = router("w0", "w1")
    orders = said(c.submit("a", prompts(2), 0.0), m.Compile)
    c.submit("b", prompts(2), 0.0)
    assert {w for w, _ in said(c.cancel("a"), m.Cancel)} == {"w0", "w1"}
    assert c.cancel("a") == []
    assert all(f.requests == {"b"} for f in c.cluster.flights.values()) and len(c.cluster.flights) == 2
    c.cancel("b")
    for order in orders:
        assert compiled(c, order, ok=False) == [], "nobody waits: not ordered again"
    is_idle(c)


def test_lost_announcements_are_asked_for_again_once() -> None:
    c = router("w0")
    c.receive(b"w0", m.Stored(seq=1, keys=(key(1),), nbytes=(1,)), 0.0)
    lost = [said(c.receive(b"w0", m.Stored(seq=n, keys=(key(n),), nbytes=(1,)), 0.0), m.Resync) for n in (3, 4, 5)]
    assert [len(x) for x in lost] == [1, 0, 0]
    assert not c.cluster.directory.holders(key(1)), "not known any more"
    c.receive(b"w0", m.Stored(seq=1, keys=(key(7),), nbytes=(1,)), 0.0)
    assert c.receive(b"w0", m.Evicted(seq=2, keys=(key(7),)), 0.0) == []
    assert not c.cluster.directory.holders(key(7))


def test_names_belong_to_connections() -> None:
    c = router("w0")
    c.receive(b"w0", m.Stored(seq=1, keys=(key(1),), nbytes=(1,)), 0.0)
    (send,) = c.receive(b"thief", hello("w0", epoch=b"other"), 0.1)
    assert isinstance(send, Send) and isinstance(send.message, m.Refused)
    assert c.cluster.directory.holders(key(1)) == {"w0"}
    (send,) = c.receive(b"thief", m.Evicted(seq=2, keys=(key(1),)), 0.1)
    assert isinstance(send, Send) and isinstance(send.message, m.Welcome), "introduce yourself"
    assert c.cluster.directory.holders(key(1)) == {"w0"} and c.counts["stranger"] == 2
    (send,) = c.receive(b"odd", hello("w9", identity=b"another model"), 0.1)
    assert isinstance(send, Send) and isinstance(send.message, m.Refused) and "w9" not in c.cluster.workers
    c.receive(b"again", hello("w0"), 0.2)  # the same process, connected anew
    assert "w0" in c.cluster.workers and not c.cluster.directory.holders(key(1)), "it announces all again"
    c.receive(b"again", m.Stored(seq=1, keys=(key(1),), nbytes=(1,)), 0.2)
    assert c.cluster.directory.holders(key(1)) == {"w0"}
    c.tick(9.0)
    assert c.cluster.workers == {}
    c.receive(b"new", hello("w0", epoch=b"other"), 9.1)
    assert "w0" in c.cluster.workers


@pytest.mark.parametrize("seed", range(25))
def test_storm(seed: int) -> None:
    """Workers die, restart, fail, repeat and lose messages, clients leave. Every request is forwarded or broken, once, and
    in the end nothing is left of any."""
    rng = random.Random(seed)
    c = Coordinator(COSTS, settings=SETTINGS)
    now, serial, runs = 0.0, 0, 0
    live: dict[str, bytes] = {}
    todo: list[tuple[str, m.Message]] = []
    fate: dict[str, list[str]] = {}

    def take(actions: list[Action]) -> None:
        for a in actions:
            if isinstance(a, Forward):
                assert a.worker in c.cluster.workers
                fate[a.request].append("forward")
            elif isinstance(a, Broken):
                fate[a.request].append("broken")
            else:
                m.decode(m.encode(a.message), m.ToWorker)
                todo.extend((w, a.message) for w, peer in live.items() if peer == a.peer and rng.random() > 0.1)

    def answer(worker: str, message: m.Message) -> None:
        replies: list[m.Message] = []
        if isinstance(message, m.Compile):
            ok = rng.random() < 0.7
            replies = [m.Compiled(flight=message.flight, key=message.key, ok=ok, seconds=rng.random() if ok else 0.0)]
        elif isinstance(message, m.Expect):
            keys = tuple(s.key for s in message.segments)
            replies = [m.Expecting(request=message.request, **{rng.choice(["held", "awaited", "refused"]): keys})]
            replies += [m.Arrived(request=message.request, key=k, ok=rng.random() < 0.7) for k in keys]
        for reply in replies:
            for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
                take(c.receive(live[worker], reply, now))

    for _ in range(400):
        now += rng.random() * 0.3
        dice = rng.random()
        if dice < 0.1 or not live:
            name, runs = f"w{rng.randrange(4)}", runs + 1
            peer = b"%d" % runs
            if name not in c.cluster.workers and name not in live:
                live[name] = peer
                take(c.receive(peer, hello(name, epoch=peer), now))
        elif dice < 0.15:
            del live[rng.choice(sorted(live))]  # without a word
            todo[:] = [(w, x) for w, x in todo if w in live]
        elif dice < 0.3 and c.cluster.workers:
            serial += 1
            fate[f"r{serial}"] = []
            take(c.submit(f"r{serial}", prompts(rng.randint(1, 5), rng.randrange(8)), now))
        elif dice < 0.4 and c._requests:
            request = rng.choice(sorted(c._requests))
            if rng.random() < 0.5:
                fate[request].append("cancelled")
                take(c.cancel(request))
            elif "forward" in fate[request]:
                c.first_token(request)
                c.end(request)
        elif todo:
            answer(*todo.pop(rng.randrange(len(todo))))
        for peer in live.values():
            take(c.receive(peer, m.Heartbeat(seq=1, queued_tokens=0, running=0, free=0), now))
            if rng.random() < 0.05:
                take(c.receive(peer, m.Stored(seq=rng.randint(1, 3), keys=(key(rng.randrange(13)),), nbytes=(1,)), now))
        take(c.tick(now))
    for _ in range(60):  # the dust settles: deadlines are missed, one after the other
        now += 5
        for peer in live.values():
            take(c.receive(peer, m.Heartbeat(seq=1, queued_tokens=0, running=0, free=0), now))
        take(c.tick(now))
    assert serial > 20 and all(any(x in ends for x in ("forward", "broken", "cancelled")) for ends in fate.values())
    assert all(ends.count("forward") <= 1 and ends.count("broken") <= 1 for ends in fate.values())
    for request in sorted(c._requests):
        c.end(request)
    is_idle(c)


def test_over_a_socket(folder: Path) -> None:
    """Real frames: workers join, get work, one goes silent; garbage and strangers in between."""

    async def main() -> None:
        c = Coordinator(COSTS, settings=Settings(heartbeat=0.04, dead_after=1.0, expect_within=0.05))
        done: list[Forward | Broken] = []
        control = ControlSocket(c, f"ipc://{folder}/control", done.append)
        address = await control.start()
        context = zmq.asyncio.Context()
        sockets = {}
        for w in ("w0", "w1", "x"):
            sockets[w] = s = context.socket(zmq.DEALER)
            s.linger = 0
            s.connect(address)
        try:
            async with asyncio.timeout(60):
                await sockets["x"].send(b"garbage")
                await sockets["x"].send_multipart([m.encode(m.Bye()), b"more"])
                await sockets["x"].send(m.encode(m.Resync()))
                await sockets["x"].send(m.encode(m.Bye()))
                assert isinstance(m.decode(await sockets["x"].recv(), m.ToWorker), m.Welcome)
                assert control.inbox.rejected == {"garbage": 1, "frames": 1, "unexpected": 1}
                for w in ("w0", "w1"):
                    await sockets[w].send(m.encode(hello(w)))
                    assert isinstance(m.decode(await sockets[w].recv(), m.ToWorker), m.Welcome)
                control.carry_out(c.submit("r", prompts(2), time.monotonic()))
                assert isinstance(m.decode(await sockets["w0"].recv(), m.ToWorker), m.Expect)
                order = m.decode(await sockets["w1"].recv(), m.ToWorker)
                assert isinstance(order, m.Compile)
                assert isinstance(m.decode(await sockets["w0"].recv(), m.ToWorker), m.Compile)
                while "w1" in c.cluster.workers:  # silent from here on
                    await sockets["w0"].send(m.encode(m.Heartbeat(seq=1, queued_tokens=0, running=0, free=0)))
                    await asyncio.sleep(0.02)
                reroute = m.decode(await sockets["w0"].recv(), m.ToWorker)
                assert isinstance(reroute, m.Reroute) and (reroute.key, reroute.address) == (order.key, "")
                assert done == [Forward("r", "w0", "http://w0")]
        finally:
            for s in sockets.values():
                s.close()
            context.term()
            await control.close()

    asyncio.run(main())
