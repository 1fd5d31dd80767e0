"""Blobs over real ZeroMQ sockets: what is lost, late, twice, in another order or forged costs time and nothing else."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from hypic.router import messages as m
from hypic.router.transport import Peer, TransferError
from hypic.router.transport.zmq_blobs import ZmqTransport
from hypic.router.transport.zmq_server import OPEN_CHUNKS

KEY, OTHER = bytes(m.KEY_BYTES), bytes([1]) * m.KEY_BYTES
CHUNK = 4096
BLOB = random.Random(0).randbytes(100 * CHUNK + 17)
LIMIT = 90.0
PATIENCE = 30.0

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


def run(test: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(LIMIT), AsyncExitStack() as stack:
            await test(stack)

    asyncio.run(main())


async def started(stack: AsyncExitStack, folder: Path, name: str, **kwargs: Any) -> tuple[ZmqTransport, Peer]:
    transport = ZmqTransport(f"ipc://{folder}/{name}", **{"chunk": CHUNK, "retry_after": 0.1, **kwargs})
    address = await transport.start()
    stack.push_async_callback(transport.close)
    return transport, Peer(address)


async def until(holds: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE):
            while not holds():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"never {what}") from None


def room() -> memoryview:
    return memoryview(bytearray(len(BLOB)))


def test_a_blob_arrives_whole_and_only_where_it_belongs(folder: Path) -> None:
    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink", retry_after=PATIENCE)
        source.offer(KEY, memoryview(BLOB))
        arena = bytearray(b"\xee" * (len(BLOB) + 64))
        receipt = await sink.fetch(peer, KEY, memoryview(arena)[32:-32], timeout=PATIENCE)
        assert arena[32:-32] == BLOB
        assert arena[:32] == arena[-32:] == b"\xee" * 32
        assert (receipt.nbytes, receipt.again) == (len(BLOB), 0)
        assert sink.stats.received_bytes == source.stats.sent_bytes == len(BLOB)
        assert sink.stats.received_chunks == 101
        assert sink.stats.gb_per_s > 0
        await asyncio.gather(*(sink.fetch(peer, KEY, room(), timeout=PATIENCE) for _ in range(4)))

    run(test)


def test_what_is_still_being_made_leaves_when_it_is_offered(folder: Path) -> None:
    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink")
        source.expect(KEY)
        into = room()
        task = asyncio.create_task(sink.fetch(peer, KEY, into, timeout=PATIENCE))
        await asyncio.sleep(0.25)  # longer than retry_after: asking again must not count as loss
        assert not task.done() and sink.stats.received_chunks == sink.stats.asked_again == 0
        source.offer(KEY, memoryview(BLOB))
        receipt = await task
        assert into == BLOB and receipt.waited > 0.2

    run(test)


def test_refusals_name_their_reason(folder: Path) -> None:
    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink")
        source.offer(KEY, memoryview(BLOB))
        source.expect(OTHER)

        async def reason(key: bytes, into: memoryview, seconds: float = PATIENCE, of: Peer = peer) -> str:
            with pytest.raises(TransferError) as e:
                await sink.fetch(of, key, into, timeout=seconds)
            return e.value.reason

        assert await reason(bytes([7]) * m.KEY_BYTES, room()) == "gone"
        assert await reason(KEY, memoryview(bytearray(len(BLOB) - 1))) == "size"
        assert await reason(OTHER, room(), 0.2) == "timeout"
        assert await reason(KEY, room(), 0.2, Peer(f"ipc://{folder}/nobody")) == "timeout"
        failing = asyncio.create_task(reason(OTHER, room()))
        await asyncio.sleep(0.05)
        await source.withdraw(OTHER, "compile_failed")
        assert await failing == "gone"
        lost = asyncio.create_task(reason(KEY, room(), of=Peer(f"ipc://{folder}/nobody")))
        await asyncio.sleep(0.05)
        await sink.forget(Peer(f"ipc://{folder}/nobody"))
        assert await lost == "gone"

    run(test)


def test_cancelled_fetches_write_nothing_more(folder: Path) -> None:
    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink", window=1)
        source.offer(KEY, memoryview(BLOB))
        into = room()
        task = asyncio.create_task(sink.fetch(peer, KEY, into, timeout=PATIENCE))
        while sink.stats.received_chunks < 3:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert into != BLOB
        before = bytes(into)
        await asyncio.sleep(0.1)
        assert into == before
        source.expect(OTHER)
        task = asyncio.create_task(sink.fetch(peer, OTHER, into, timeout=PATIENCE))
        while not source.server._blobs[OTHER].waiting:
            await asyncio.sleep(0.01)
        task.cancel()
        await until(lambda: not source.server._blobs[OTHER].waiting, "told to stop")
        await source.withdraw(KEY)
        assert all(not s.transfers for s in sink.client._sources.values())

    run(test)


def test_withdrawn_memory_is_ours_again(folder: Path) -> None:
    """Overwriting a blob after `withdraw` must not reach a peer that was reading it."""

    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink")
        memory = bytearray(BLOB)
        source.offer(KEY, memoryview(memory))
        into = memoryview(bytearray(b"\x55" * len(BLOB)))
        task = asyncio.create_task(sink.fetch(peer, KEY, into, timeout=PATIENCE))
        while source.stats.sent_chunks < 20:
            await asyncio.sleep(0)
        await source.withdraw(KEY)
        memory[:] = bytes(len(memory))
        with pytest.raises(TransferError, match="gone"):
            await task
        for i in range(0, len(BLOB), CHUNK):
            assert into[i : i + CHUNK] in (BLOB[i : i + CHUNK], b"\x55" * len(into[i : i + CHUNK]))
        assert sink.stats.corrupt == 0

    run(test)


def test_withdraw_waits_for_what_is_under_way(folder: Path) -> None:
    """libzmq still reads the memory of frames that a slow peer has not taken: it must not be ours before."""

    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        context = zmq.asyncio.Context()
        slow = context.socket(zmq.DEALER)
        slow.linger, slow.rcvhwm = 0, 1
        slow.connect(peer.address)
        big = 1 << 20
        memory = bytearray(b"\x77" * (16 * big))
        source.offer(KEY, memoryview(memory))
        await slow.send(m.encode(m.Get(transfer=1, key=KEY, nbytes=len(memory), chunk=big, wanted=tuple(range(16)))))
        while source.stats.sent_chunks < 8:
            await asyncio.sleep(0.01)
        withdrawn = asyncio.create_task(source.withdraw(KEY))
        await asyncio.sleep(0.1)
        assert not withdrawn.done()
        _, data = await slow.recv_multipart()
        assert data == memory[:big]
        slow.close()  # it dies: libzmq drops what it has not taken
        context.term()
        await withdrawn

    run(test)


async def chaos(folder: Path, target: Peer, rng: random.Random, faults: dict[str, int]) -> None:
    """A proxy between a sink and `target` that drops, repeats, reorders, damages and invents frames."""
    context = zmq.asyncio.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for s in (front, back):
        s.linger = 0
    front.bind(f"ipc://{folder}/chaos")
    back.connect(target.address)
    held: list[list[bytes]] = []
    who = b""
    try:
        while True:
            ready, _, _ = await asyncio.wait_for(_select(front, back), None)
            if front in ready:
                who, frame = await front.recv_multipart()
                if rng.random() < 0.1:
                    faults["asked"] += 1
                    await back.send(rng.randbytes(40))
                else:
                    await back.send(frame)
            if back in ready:
                frames = await back.recv_multipart()
                fault = rng.choice(
                    ["drop", "twice", "hold", "damage", "garbage", "swap", "lie", "frames", *["pass"] * 8]
                )
                faults[fault] += 1
                if fault == "hold":
                    held.append(frames)
                    continue
                if fault == "drop":
                    continue
                if fault == "damage" and len(frames) == 2:
                    at = rng.randrange(len(frames[1]))
                    data = frames[1]
                    frames[1] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                if fault == "lie" and len(frames) == 2:  # a chunk of a number that the blob does not have, well formed
                    head = m.decode(frames[0], m.ToSink)
                    lie = m.Chunk(transfer=head.transfer, index=10_000, crc=zlib.crc32(frames[1]))
                    await front.send_multipart([who, m.encode(lie), frames[1]])
                if fault == "garbage":
                    await front.send_multipart([who, rng.randbytes(30), rng.randbytes(50)])
                if fault == "frames":
                    await front.send_multipart([who, frames[0], b"x", b"y"])
                for _ in range(2 if fault == "twice" else 1):
                    await front.send_multipart([who, *frames])
                if fault == "swap" and held:
                    await front.send_multipart([who, *held.pop(rng.randrange(len(held)))])
    finally:
        front.close()
        back.close()
        context.term()


async def _select(*sockets: zmq.asyncio.Socket) -> tuple[list[zmq.asyncio.Socket], list[Any], list[Any]]:
    poller = zmq.asyncio.Poller()
    for s in sockets:
        poller.register(s, zmq.POLLIN)
    return [s for s, _ in await poller.poll()], [], []


@pytest.mark.parametrize("seed", range(3))
def test_lost_repeated_reordered_damaged_and_invented_frames(folder: Path, seed: int) -> None:
    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink", retry_after=0.05)
        source.offer(KEY, memoryview(BLOB))
        faults = dict.fromkeys(
            ("asked", "drop", "twice", "hold", "damage", "garbage", "swap", "lie", "frames", "pass"), 0
        )
        proxy = asyncio.create_task(chaos(folder, peer, random.Random(seed), faults))
        rejected, stats = sink.client.inbox.rejected, sink.stats
        try:
            while not min(stats.asked_again, stats.duplicates, stats.corrupt, *faults.values()):
                await sink.fetch(Peer(f"ipc://{folder}/chaos"), KEY, into := room(), timeout=PATIENCE)
                assert into == BLOB
            await until(
                lambda: (rejected["garbage"], rejected["frames"]) == (faults["garbage"], faults["frames"]),
                "read all that was still on its way",
            )
        finally:
            proxy.cancel()
            await asyncio.gather(proxy, return_exceptions=True)
        assert source.server.inbox.rejected["garbage"] > 0

    run(test)


def test_strange_peers_do_not_stop_the_server(folder: Path) -> None:
    """Wrong kinds, wrong numbers of frames, a frame over the limit, greed: each is dropped, and others are served."""

    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink")
        source.offer(KEY, memoryview(BLOB))
        context = zmq.asyncio.Context()
        stack.callback(context.term)
        stranger = context.socket(zmq.DEALER)
        stack.callback(stranger.close)
        stranger.linger = 0
        stranger.rcvhwm = 1  # it does not read: what it asks for stays with the server
        stranger.connect(peer.address)
        far = m.Get(transfer=99, key=KEY, nbytes=len(BLOB), chunk=CHUNK, wanted=(101, 2**31))
        await stranger.send(m.encode(far))
        assert not await stranger.poll(100), "there are no such chunks"
        await stranger.send(m.encode(m.Bye()))
        await stranger.send_multipart([b"one", b"two"])
        await stranger.send(m.MAGIC + b"\x09" + b"\x91\x01")
        for transfer in range(40):  # 40 x 64 chunks, never read
            wanted = tuple(range(64))
            await stranger.send(
                m.encode(m.Get(transfer=transfer, key=KEY, nbytes=len(BLOB), chunk=CHUNK, wanted=wanted))
            )
        await sink.fetch(peer, KEY, into := room(), timeout=PATIENCE)
        assert into == BLOB
        await until(lambda: source.stats.turned_away > 0, "too much was asked for")
        assert max(map(len, source.server._queues.values())) <= OPEN_CHUNKS
        assert source.server.inbox.rejected == {"unexpected": 1, "frames": 1, "version": 1}
        await stranger.send(bytes(1 << 20))  # over MAXMSGSIZE: libzmq hangs up, nothing of it is read
        await asyncio.sleep(0.1)
        assert source.server.inbox.rejected.total() == 3
        await sink.fetch(peer, KEY, room(), timeout=PATIENCE)

    run(test)


def test_a_source_that_starts_again_is_found_again(folder: Path) -> None:
    async def test(stack: AsyncExitStack) -> None:
        source, peer = await started(stack, folder, "source")
        sink, _ = await started(stack, folder, "sink")
        source.expect(KEY)
        into = room()
        task = asyncio.create_task(sink.fetch(peer, KEY, into, timeout=PATIENCE))
        await asyncio.sleep(0.1)
        await source.close()
        again = ZmqTransport(peer.address, chunk=CHUNK)
        again_offers = memoryview(BLOB)
        await again.start()
        stack.push_async_callback(again.close)
        again.offer(KEY, again_offers)
        await task
        assert into == BLOB

    run(test)
