"""A worker of two TP ranks: each has its part of an artifact, and all do the same at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hypic.artifact.layout import decode_header
from hypic.router import messages as m
from tests.cases.driving import Writer
from tests.server import requests
from tests.server.serving import Server
from tests.worker.conftest import worker
from tests.worker.lone_router import RANKS, LoneRouter
from tests.worker.test_worker import N, ask, compiled, expect, flush, outcomes


@pytest.fixture(scope="module")
def cluster(tiny_model: Callable[[str], Path]) -> Iterator[tuple[LoneRouter, Server]]:
    with worker(tiny_model("qwen3next"), "--tp-size", str(RANKS)) as running:
        yield running


def test_every_rank_serves_its_part(router: LoneRouter, server: Server, write: Writer) -> None:
    done = compiled(router, write.document(N))
    parts = [router.fetch(done.key, done.nbytes, rank=r)[0] for r in range(RANKS)]
    assert [(h.tp_rank, h.tp_size) for h in map(decode_header, parts)] == [(0, 2), (1, 2)]
    assert parts[0] != parts[1]


@pytest.mark.parametrize("fault", [None, "other rank's part", "gone at one rank"])
def test_parts_are_received_at_all_ranks_or_compiled_at_all(
    router: LoneRouter, server: Server, write: Writer, fault: str | None
) -> None:
    document = write.document(N)
    body = requests.generate_body(write, [[document]])
    alone = ask(server, body)
    flush(server)
    done = compiled(router, document)
    parts = [router.fetch(done.key, done.nbytes, rank=r)[0] for r in range(RANKS)]
    flush(server)
    router.offer(done.key, parts[0], 0)
    if fault != "gone at one rank":
        router.offer(done.key, parts[0 if fault else 1], 1)
    assert expect(router, "r1", router.wanted(document.ids)).awaited == (done.key,)
    arrived = router.hear(m.Arrived)
    assert arrived.ok == (fault is None)
    answer = ask(server, body, "r1")
    assert answer["output_ids"] == alone["output_ids"]
    assert outcomes(answer) == [("received", "peer") if fault is None else ("compiled", None)]
    router.withdraw(done.key)


def test_a_wish_at_one_rank_locks_the_artifact_at_all(router: LoneRouter, server: Server, write: Writer) -> None:
    document = write.document(N)
    requests.know(server, write, document)
    key = router.key(document.ids)
    stored = router.hear(m.Stored, lambda s: key in s.keys)
    nbytes = stored.nbytes[stored.keys.index(key)]
    part, _ = router.fetch(key, nbytes, rank=1)
    assert decode_header(part).tp_rank == 1
    other, receipt = router.fetch(key, nbytes, rank=0)
    assert decode_header(other).tp_rank == 0 and receipt.waited < 5


def test_named_segments_are_the_same_at_all_ranks(server: Server, write: Writer) -> None:
    """Pinned at one rank and evicted at the other, an artifact would end the server at its next use."""
    ids = [write.tokens(N) for _ in range(2)]
    made = server.ask("/v1/segments", {"segments": [{"input_ids": i} for i in ids], "pin": True})["data"]
    for _ in range(8):
        requests.know(server, write, *write.documents(4, N))
    prompt = write.tokens(9)
    body = {"input_ids": prompt, "sampling_params": requests.native()}
    insert = [[3, made[0]["id"]], [5, made[1]["id"]]]
    answer = server.ask("/generate", {**body, "hypic": {"insert": insert, "report": True}})
    assert outcomes(answer) == [("hit_device", None)] * 2
    spans = [[3, 3 + N], [5 + N, 5 + 2 * N]]
    whole = prompt[:3] + ids[0] + prompt[3:5] + ids[1] + prompt[5:]
    by_ids = server.ask("/generate", {**body, "input_ids": whole, "hypic": {"segments": spans}})
    assert answer["output_ids"] == by_ids["output_ids"]
    for one in made:
        assert server.http.delete(f"/v1/segments/{one['id']}").status_code == 200
