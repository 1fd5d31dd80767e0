"""A worker of a cluster: what it says, compiles, lends and receives, and what it does when the others fail it."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from hypic.artifact.layout import decode_header, token_bytes
from hypic.engine.http.trusted import HEADER
from hypic.router import messages as m
from hypic.router.transport import TransferError
from hypic.segment import Bounds, RequestSpans
from tests.cases.driving import Document, Writer
from tests.server import requests
from tests.server.requests import GENERATE
from tests.server.serving import Server
from tests.worker.lone_router import SECRET, LoneRouter

N = 200
"""Tokens of a document."""


def ask(server: Server, body: dict[str, Any], name: str = "") -> dict[str, Any]:
    """`/generate`, from a client or, with the plan that a router makes, under the name that it gave."""
    headers = {}
    if name:
        bounds = tuple(Bounds(*b) for b in body["hypic"]["segments"])
        plan = RequestSpans(cached=bounds, report=True, request=name).to_params()
        params = {**body["sampling_params"], "custom_params": plan}
        body, headers = {"input_ids": body["input_ids"], "sampling_params": params}, {HEADER: SECRET}
    response = server.http.post(GENERATE, json=body, headers=headers)
    response.raise_for_status()
    return dict(response.json())


def flush(server: Server) -> None:
    """Empty the store, as soon as nothing runs."""
    server.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()


def outcomes(answer: dict[str, Any]) -> list[tuple[str, str | None]]:
    spans = answer["meta_info"]["hypic"]["spans"]
    return [(s["outcome"], s["worker"]) for s in spans if s["kind"] == "segment"]


def compiled(router: LoneRouter, document: Document, flight: int = 1) -> m.Compiled:
    router.tell(router.compile(flight, "r", document.ids))
    return router.hear(m.Compiled, lambda c: c.flight == flight)


def artifact(router: LoneRouter, server: Server, document: Document) -> bytes:
    """The document's artifact, from the worker itself, which then forgets it."""
    done = compiled(router, document, 1000)
    assert done.ok
    blob, _ = router.fetch(done.key, done.nbytes)
    flush(server)
    router.hear(m.Evicted, lambda e: done.key in e.keys)
    router.forget()
    return blob


def expect(router: LoneRouter, name: str, *segments: m.Wanted, deadline: float = 10.0) -> m.Expecting:
    router.tell(m.Expect(request=name, segments=segments, deadline=deadline))
    return router.hear(m.Expecting, lambda e: e.request == name)


# ---------------------------------------------------------------------- control


def test_it_says_who_it_is(router: LoneRouter, server: Server) -> None:
    hello = router.hello
    assert (hello.worker, hello.http) == ("w0", server.url)
    assert hello.capacity == 4 << 20
    shape = hello.shape
    assert (shape.seam_window, shape.min_segment, shape.forward_tokens) == (8, 64, 512)
    assert shape.artifact_bytes > 0 and shape.artifact_token_bytes > 0
    beat = router.hear(m.Heartbeat)
    assert 0 < beat.free <= hello.capacity and beat.running == 0


def test_it_announces_what_it_stores_and_what_it_drops(router: LoneRouter, server: Server, write: Writer) -> None:
    document = write.document(N)
    requests.know(server, write, document)
    key = router.key(document.ids)
    stored = router.hear(m.Stored, lambda s: key in s.keys)
    shape = router.hello.shape
    reckoned = shape.artifact_bytes + shape.artifact_token_bytes * (N - shape.seam_window)
    assert abs(stored.nbytes[stored.keys.index(key)] - reckoned) <= 8 * N + 1024  # its header holds the tokens
    flush(server)
    evicted = router.hear(m.Evicted, lambda e: key in e.keys)
    assert evicted.seq == stored.seq + 1


@pytest.mark.parametrize("gap", [0.0, 0.4])
def test_after_the_routers_restart_it_joins_again(
    router: LoneRouter, server: Server, write: Writer, gap: float
) -> None:
    document = write.document(N)
    requests.know(server, write, document)
    before = router.hello
    router.restart(f"after {gap}".encode(), gap)
    stored = router.hear(m.Stored)
    assert router.hello.epoch == before.epoch
    assert stored.seq == 1 and stored.keys == (router.key(document.ids),)
    assert compiled(router, write.document(N)).ok


def test_resync_announces_all_again(router: LoneRouter, server: Server, write: Writer) -> None:
    documents = write.documents(3, N)
    requests.know(server, write, *documents)
    missing = {router.key(d.ids) for d in documents}
    while missing:
        missing -= set(router.hear(m.Stored).keys)
    router.tell(m.Resync())
    stored = router.hear(m.Stored, lambda s: s.seq == 1)
    assert set(stored.keys) == {router.key(d.ids) for d in documents}


def test_garbage_from_the_router_is_dropped(router: LoneRouter, write: Writer) -> None:
    for frame in (b"", b"hyp", b"\0" * 100, m.encode(m.Bye()), m.encode(m.Resync())[:-1] + b"\xff\xff"):
        router.send_raw(frame)
    assert compiled(router, write.document(N)).ok


# ---------------------------------------------------------------------- compile for others


def test_an_ordered_compile_is_served_to_peers_and_used_here(router: LoneRouter, server: Server, write: Writer) -> None:
    document = write.document(N)
    done = compiled(router, document)
    assert done.ok and done.key == router.key(document.ids)
    assert 0 < done.seconds < 10
    blob, receipt = router.fetch(done.key, done.nbytes)
    assert decode_header(blob).tokens == token_bytes(document.ids)
    assert receipt.again == 0
    answer = ask(server, requests.generate_body(write, [[document]]))
    assert outcomes(answer) == [("hit_device", None)]
    assert router.hear(m.Heartbeat, lambda b: b.tokens_per_s > 0).tokens_per_s < 1e7


def test_peers_may_ask_before_it_is_done(router: LoneRouter, write: Writer) -> None:
    document = write.document(1500)
    nbytes = compiled(router, write.document(1500), 1).nbytes
    router.tell(router.compile(2, "r", document.ids))
    blob, receipt = router.fetch(router.key(document.ids), nbytes)
    assert decode_header(blob).tokens == token_bytes(document.ids)
    assert receipt.waited > 0


def test_peers_may_ask_before_the_order(router: LoneRouter, write: Writer) -> None:
    """Control and data are different sockets: a peer's wish may be there first."""
    document = write.document(N)
    nbytes = compiled(router, write.document(N), 1).nbytes
    key = router.key(document.ids)
    order = threading.Timer(0.2, lambda: router.tell(router.compile(2, "r", document.ids)))
    order.start()
    blob, _ = router.fetch(key, nbytes)
    assert decode_header(blob).tokens == token_bytes(document.ids)


def test_what_is_unknown_is_gone_after_a_while_and_what_was_dropped_at_once(
    router: LoneRouter, server: Server, write: Writer
) -> None:
    document = write.document(N)
    done = compiled(router, document)
    flush(server)
    router.hear(m.Evicted, lambda e: done.key in e.keys)
    for key, least, most in ((done.key, 0.0, 0.3), (router.key(write.document(N).ids), 0.4, 3.0)):
        began = time.monotonic()
        with pytest.raises(TransferError) as error:
            router.fetch(key, done.nbytes)
        assert error.value.reason == "gone"
        assert least <= time.monotonic() - began < most


def test_an_order_for_what_is_there_or_under_way_compiles_nothing(
    router: LoneRouter, server: Server, write: Writer
) -> None:
    document = write.document(1500)
    for flight in (1, 2):
        router.tell(router.compile(flight, "r", document.ids))
    first, second = (router.hear(m.Compiled, lambda c, f=f: c.flight == f) for f in (1, 2))  # type: ignore[misc]
    before = server.metrics()
    third = compiled(router, document, 3)
    assert first.ok and second.ok and third.ok
    assert {c.nbytes for c in (first, second, third)} == {first.nbytes}
    assert "tokens_total{kind=compiled}" not in server.metrics().since(before)


def _realtime_tokens(server: Server) -> dict[str, float]:
    """Tokens that went through SGLang's forward passes, by mode."""
    lines = server.http.get("/metrics").text.splitlines()
    found = (re.match(r'sglang:realtime_tokens_total\{.*mode="(\w+)".*\} (\S+)', line) for line in lines)
    return {"decode": 0.0, **{m[1]: float(m[2]) for m in found if m}}


@pytest.mark.parametrize("lost", [False, True])
def test_orders_that_follow_each_other_share_a_pass(
    router: LoneRouter, server: Server, write: Writer, lost: bool
) -> None:
    """Their shares of it are those of their tokens. If the last is lost, the others do not wait for it. Nothing is decoded."""
    before = _realtime_tokens(server)
    for _ in range(6):  # on a busy machine they may not follow each other closely enough
        documents = write.documents(3, 70)
        for i, d in enumerate(documents):
            router.tell(router.compile(i, "r", d.ids, more=len(documents) - 1 - i + lost))
            time.sleep(0.004)
        done = [router.hear(m.Compiled, lambda c, i=i: c.flight == i) for i in range(3)]  # type: ignore[misc]
        assert all(c.ok for c in done)
        after = _realtime_tokens(server)
        assert after["decode"] == before["decode"] and after["prefill_compute"] > before["prefill_compute"]
        if [c.seconds for c in done] == pytest.approx([done[0].seconds] * 3, rel=0.01):
            return
    raise AssertionError(f"never in one pass: {[c.seconds for c in done]}")


@pytest.mark.parametrize("fault", ["key", "token", "negative"])
def test_an_order_that_cannot_be_is_refused(router: LoneRouter, write: Writer, fault: str) -> None:
    ids = write.tokens(N)
    key = router.key(ids) if fault == "key" else None
    ids[3] = {"key": ids[3] ^ 1, "token": 10**6, "negative": -1}[fault]
    router.tell(router.compile(7, "r", ids, key=key))
    done = router.hear(m.Compiled)
    assert not done.ok and done.flight == 7
    assert ("do not agree" if fault == "key" else "out of range") in done.reason
    assert compiled(router, write.document(N), 8).ok


def test_an_order_that_does_not_fit_fails(router: LoneRouter, write: Writer) -> None:
    done = compiled(router, write.document(20_000))
    assert not done.ok and "arena full" in done.reason


def test_cancelled_before_it_begins(router: LoneRouter, server: Server, write: Writer) -> None:
    first, *rest = write.documents(4, 3000), write.document(N)
    for i, document in enumerate(first[:1]):
        router.tell(router.compile(i, "kept", document.ids))
    router.tell(router.compile(9, "gone", rest[0].ids))
    router.tell(m.Cancel(request="gone"))
    assert router.hear(m.Compiled, lambda c: c.flight == 0).ok
    assert router.silent(m.Compiled, lambda c: c.flight == 9 and c.ok, 0.3)
    assert router.silent(m.Stored, lambda s: router.key(rest[0].ids) in s.keys, 0.1)


# ---------------------------------------------------------------------- receive


@pytest.mark.parametrize("cold", [True, False])
def test_what_a_peer_has_is_received_and_linked(router: LoneRouter, server: Server, write: Writer, cold: bool) -> None:
    document = write.document(N)
    body = requests.generate_body(write, [[document]])
    alone = ask(server, body)
    blob, key = artifact(router, server, document), router.key(document.ids)
    router.offer(key, blob)
    before = server.metrics()
    assert expect(router, "r1", router.wanted(document.ids, cold=cold)).awaited == (key,)
    arrived = router.hear(m.Arrived)
    assert arrived.ok and arrived.key == key and arrived.seconds >= 0
    answer = ask(server, body, "r1")
    assert answer["output_ids"] == alone["output_ids"]
    assert outcomes(answer) == [("received" if cold else "hit_remote", "peer")]
    assert answer["meta_info"]["cached_tokens"] == (0 if cold else N - requests.SEAM)
    since = server.metrics().since(before)
    assert "tokens_total{kind=compiled}" not in since
    assert since["shared_artifacts_total{outcome=ok,way=in}"] == 1 and since["shared_bytes_total"] == len(blob)
    assert outcomes(ask(server, requests.generate_body(write, [[document]]))) == [("hit_device", None)]
    router.withdraw(key)


def test_a_request_waits_for_what_is_on_its_way(router: LoneRouter, server: Server, write: Writer) -> None:
    document = write.document(N)
    blob, key = artifact(router, server, document), router.key(document.ids)
    router.expect(key)
    assert expect(router, "r1", router.wanted(document.ids)).awaited == (key,)
    offer = threading.Timer(0.5, lambda: router.offer(key, blob))
    offer.start()
    began = time.monotonic()
    answer = ask(server, requests.generate_body(write, [[document]]), "r1")
    assert time.monotonic() - began > 0.4
    assert outcomes(answer) == [("received", "peer")]
    router.withdraw(key)


@pytest.mark.parametrize("fault", ["gone", "header", "size", "silent", "no such peer"])
def test_what_does_not_come_is_compiled_here(router: LoneRouter, server: Server, write: Writer, fault: str) -> None:
    document = write.document(N)
    body = requests.generate_body(write, [[document]])
    alone = ask(server, body)
    blob, key = bytearray(artifact(router, server, document)), router.key(document.ids)
    if fault == "header":
        blob[40] ^= 1
    if fault == "size":
        blob += bytes(256)
    if fault in ("header", "size"):
        router.offer(key, bytes(blob))
    if fault == "silent":
        router.expect(key)
    address = None if fault != "no such peer" else router.peer + "x"
    before = server.metrics()
    assert expect(router, "r1", router.wanted(document.ids, address), deadline=1.0).awaited == (key,)
    answer = ask(server, body, "r1")
    assert answer["output_ids"] == alone["output_ids"]
    assert outcomes(answer) == [("compiled", None)]
    arrived = router.hear(m.Arrived)
    assert not arrived.ok and arrived.key == key
    assert server.metrics().since(before)[f"shared_artifacts_total{{outcome={arrived.reason},way=in}}"] == 1
    assert (arrived.reason == "timeout") == (fault in ("silent", "no such peer"))
    if fault in ("header", "size", "silent"):
        router.withdraw(key)


def test_rerouted_to_another_peer_and_to_none(router: LoneRouter, server: Server, write: Writer) -> None:
    documents = write.documents(2, N)
    blobs = [artifact(router, server, d) for d in documents]
    keys = [router.key(d.ids) for d in documents]
    nowhere = router.peer + "x"
    assert set(expect(router, "r1", *(router.wanted(d.ids, nowhere) for d in documents)).awaited) == set(keys)
    router.offer(keys[0], blobs[0])
    router.tell(m.Reroute(request="r1", key=keys[0], source="other", address=router.peer))
    router.tell(m.Reroute(request="r1", key=keys[1], source="w0", address=""))
    assert router.hear(m.Arrived, lambda a: a.key == keys[0]).ok
    assert not router.hear(m.Arrived, lambda a: a.key == keys[1]).ok
    answer = ask(server, requests.generate_body(write, [documents]), "r1")
    assert outcomes(answer) == [("received", "other"), ("compiled", None)]
    router.withdraw(keys[0])


def test_all_or_nothing_is_reserved(router: LoneRouter, server: Server, write: Writer) -> None:
    """More than the arena holds: nothing is taken, nothing fetched, and what is there stays."""
    small = write.document(N)
    requests.know(server, write, small)
    documents = write.documents(4, 3000)
    answer = expect(router, "r1", router.wanted(small.ids), *(router.wanted(d.ids) for d in documents))
    assert answer.held == (router.key(small.ids),)
    assert set(answer.refused) == {router.key(d.ids) for d in documents} and not answer.awaited
    assert outcomes(ask(server, requests.generate_body(write, [[small]]))) == [("hit_device", None)]


@pytest.mark.parametrize("comes", [True, False])
def test_ordered_while_it_is_on_its_way(router: LoneRouter, server: Server, write: Writer, comes: bool) -> None:
    """Another request wants compiled here what comes from a peer: the order is answered either way, and peers get it."""
    document = write.document(N)
    blob, key = artifact(router, server, document), router.key(document.ids)
    router.expect(key)
    assert expect(router, "r1", router.wanted(document.ids)).awaited == (key,)
    router.tell(router.compile(5, "r2", document.ids))
    if comes:
        router.offer(key, blob)
    else:
        router.withdraw(key)
    assert router.hear(m.Arrived).ok == comes
    done = router.hear(m.Compiled)
    assert done.ok and done.nbytes == len(blob)
    assert router.fetch(key, done.nbytes)[0][:64] == blob[:64]
    router.withdraw(key)


def test_a_flush_in_the_middle_fails_what_was_ordered(router: LoneRouter, server: Server, write: Writer) -> None:
    document = write.document(N)
    key = router.key(document.ids)
    router.expect(key)
    assert expect(router, "r1", router.wanted(document.ids)).awaited == (key,)
    router.tell(router.compile(5, "r2", document.ids))
    flush(server)
    router.withdraw(key)
    assert not router.hear(m.Compiled).ok
    assert compiled(router, document, 6).ok


def test_cancelled_while_it_is_fetched(router: LoneRouter, server: Server, write: Writer) -> None:
    document = write.document(N)
    key = router.key(document.ids)
    router.expect(key)
    assert expect(router, "r1", router.wanted(document.ids)).awaited == (key,)
    free = router.hear(m.Heartbeat).free
    router.tell(m.Cancel(request="r1"))
    router.hear(m.Heartbeat, lambda b: b.free >= free)
    router.withdraw(key)


def test_a_flush_in_the_middle_takes_what_is_on_its_way_along(
    router: LoneRouter, server: Server, write: Writer
) -> None:
    document = write.document(N)
    blob, key = artifact(router, server, document), router.key(document.ids)
    router.expect(key)
    assert expect(router, "r1", router.wanted(document.ids)).awaited == (key,)
    flush(server)
    router.offer(key, blob)
    arrived = router.hear(m.Arrived)
    assert not arrived.ok and arrived.reason == "invalidated"
    assert outcomes(ask(server, requests.generate_body(write, [[document]]), "r1")) == [("compiled", None)]
    router.withdraw(key)


def test_a_lent_artifact_is_not_evicted_and_later_it_may_be(router: LoneRouter, server: Server, write: Writer) -> None:
    document = write.document(N)
    done = compiled(router, document)  # on offer from now on
    flood = [write.document(2000) for _ in range(6)]
    for d in flood:
        ask(server, requests.generate_body(write, [[d]]))
    blob, _ = router.fetch(done.key, done.nbytes)
    assert decode_header(blob).tokens == token_bytes(document.ids)
