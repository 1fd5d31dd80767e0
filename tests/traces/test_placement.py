"""Independent servers as one target: whose prefix cache a prompt goes to, and what is known of the load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from hypic.traces.engines import Engine, read_engine
from hypic.traces.placement import BLOCK, Affinity, RoundRobin
from hypic.traces.play import Seen
from hypic.traces.prompts import Prompt
from hypic.traces.report import _base
from hypic.traces.targets import SpreadTarget


def prompt(*parts: int, blocks: int = 4, tenant: str | None = None) -> Prompt:
    """`blocks` blocks of each part's own token, and half a block of another."""
    ids = [part for part in parts for _ in range(blocks * BLOCK)]
    return Prompt([*ids, *[9] * (BLOCK // 2)], [], tenant)


def test_names() -> None:
    assert read_engine("hypic") == Engine("hypic") and not read_engine("none").hypic
    assert read_engine("cluster:8") == Engine("cluster", 8, "lpt") and read_engine("cluster:8").hypic
    assert read_engine("prefix:2:round_robin") == Engine("prefix", 2, "round_robin")
    assert read_engine("prefix:2").policy == "affinity"
    for wrong in (
        "vllm",
        "cluster",
        "cluster:0",
        "cluster:x",
        "none:2",
        "prefix:2:lpt",
        "cluster:8:affinity",
        "prefix:65",
    ):
        with pytest.raises(ValueError, match=r"prefix:N\[:affinity\|round_robin\]"):
            read_engine(wrong)


def test_a_prompt_goes_where_its_prefix_is_unless_too_much_waits_there() -> None:
    place = Affinity(2)
    first = place.choose(prompt(1, 2))
    assert first == (0, len(prompt(1, 2).ids))
    place.begun(first)
    again = place.choose(prompt(1, 3))
    assert (again.server, again.tokens) == (0, 4 * BLOCK + BLOCK // 2), "the shared prefix, in whole blocks"
    other = place.choose(prompt(5, 6))
    assert other.server == 1, "nothing waits there"
    place.begun(again)
    third = place.choose(prompt(1, 4))
    assert third.server == 0
    # Four and a half blocks wait at 0, eight and a half at 1. Once more waits at 0 than the prefix saves, load decides.
    place.begun(other)
    busy = place.choose(prompt(1, 7))
    assert busy.server == 1, "4.5 of waiting and 4.5 of its own against 8.5 of its own"


def test_tenants_share_no_prefix_and_what_was_sent_long_ago_is_gone() -> None:
    place = Affinity(1, capacity=8 * BLOCK)
    place.choose(prompt(1))
    assert place.choose(prompt(1, tenant="x")).tokens == len(prompt(1).ids)
    assert place.choose(prompt(1)).tokens == BLOCK // 2
    place.choose(prompt(2, 3))
    assert place.choose(prompt(1)).tokens == len(prompt(1).ids), "eight other blocks came since"
    place.flushed()
    assert place.choose(prompt(1)).tokens == len(prompt(1).ids)


def test_round_robin() -> None:
    place = RoundRobin(3)
    assert [place.choose(prompt(1)).server for _ in range(4)] == [0, 1, 2, 0]


class Server:
    """Answers at once; `broken` ones fail before their first token."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.asked, self.flushed = broken, 0, 0

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def ask(self, _: Prompt, new_tokens: int) -> AsyncGenerator[Seen, None]:
        self.asked += 1
        if self.broken:
            raise ValueError("broken")
        for i in range(new_tokens):
            yield Seen(i + 1, 7)

    async def flush(self) -> None:
        self.flushed += 1


def test_load_is_over_with_the_first_token_or_with_the_request() -> None:
    servers: list[Any] = [Server(), Server(broken=True)]
    place = Affinity(2)

    async def ask() -> None:
        async with SpreadTarget(servers, place) as target:
            assert [s.tokens async for s in target.ask(prompt(1), 3)] == [1, 2, 3]
            with pytest.raises(ValueError, match="broken"):
                [s async for s in target.ask(prompt(2), 3)]
            stream = target.ask(prompt(1), 3)
            await anext(stream)
            assert place._waiting == [0, 0]
            await stream.aclose()
            await target.flush()

    asyncio.run(ask())
    assert place._waiting == [0, 0]
    assert [s.asked for s in servers] == [2, 1] and [s.flushed for s in servers] == [1, 1]


def test_a_cluster_is_held_against_as_many_servers_placed_best() -> None:
    found: dict[str, float | None] = {"prefix:8": 5.0, "prefix:8:round_robin": 3.0, "prefix:4": 9.0, "prefix": 1.0}
    assert _base("cluster:8", "prefix", found) == 5.0
    assert _base("cluster:2", "prefix", found) is None
    assert _base("hypic", "prefix", found) == 1.0
