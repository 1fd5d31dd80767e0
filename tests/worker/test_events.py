"""The parts of an exchange that need no sockets: one event of all ranks, and bytes of the arena in host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from hypic.engine.cluster.events import Asked, Fetched, Returned, Tally
from hypic.engine.cluster.exchange import rank_address
from hypic.engine.cluster.memory import DirectMemory, HostMemory, StagedMemory

A, B = b"a" * 24, b"b" * 24


def test_a_fetch_is_over_when_it_is_over_at_all_ranks() -> None:
    tally = Tally(3)
    assert tally.add(Fetched(A, True, seconds=1.0)) is None
    assert tally.add(Fetched(B, True)) is None
    assert tally.add(Returned(A)) is None
    assert tally.add(Fetched(A, True, seconds=3.0)) is None
    assert tally.add(Fetched(A, True, seconds=2.0)) == Fetched(A, True, seconds=3.0)
    assert tally.add(Fetched(A, True)) is None  # the next one of the same artifact
    assert tally.add(Fetched(B, False, "gone")) is None
    assert tally.add(Fetched(B, True)) == Fetched(B, False, "gone")
    assert tally.add(Returned(A)) is None
    assert tally.add(Returned(A)) == Returned(A)


def test_one_rank_that_asks_is_enough() -> None:
    assert Tally(2).add(Asked(A)) == Asked(A)


@pytest.mark.parametrize(
    ("address", "second"),
    [("ipc:///run/x/w0", "ipc:///run/x/w0.2"), ("tcp://10.0.0.1:7000", "tcp://10.0.0.1:7002")],
)
def test_ranks_have_addresses_of_their_own(address: str, second: str) -> None:
    assert (rank_address(address, 0), rank_address(address, 2)) == (address, second)


@pytest.mark.parametrize("memory", [DirectMemory, StagedMemory])
def test_bytes_get_out_and_in(memory: Callable[[torch.Tensor], HostMemory]) -> None:
    arena = torch.arange(256, dtype=torch.uint8)

    async def main() -> None:
        host = memory(arena)
        assert bytes(await host.readable(16, 4)) == bytes([16, 17, 18, 19])
        view = host.writable(32, 4)
        view[:] = b"abcd"
        await host.arrived(32, view)

    asyncio.run(main())
    assert bytes(arena[32:36].tolist()) == b"abcd"
    assert [int(arena[i]) for i in (31, 36)] == [31, 36]


def test_a_blob_under_way_is_not_yet_in_a_devices_arena() -> None:
    """What was received in part must not be seen."""
    arena = torch.zeros(64, dtype=torch.uint8)
    view = StagedMemory(arena).writable(0, 64)
    view[:] = b"x" * 64
    assert not arena.any()
