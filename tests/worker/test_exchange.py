"""The exchange by itself, against the router's real control socket: joining with keys, transfers, idle offers, its end."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from hypic.artifact.layout import Header, encode_header, token_bytes
from hypic.engine.cluster import exchange as exchange_module
from hypic.engine.cluster.events import ClusterEvent, Fetched, Idle, Returned
from hypic.engine.cluster.exchange import Exchange, Place
from hypic.engine.cluster.membership import Load, Membership
from hypic.engine.cluster.memory import DirectMemory
from hypic.engine.cluster.movers import SocketMover, WindowMover
from hypic.engine.cluster.windows import FileWindow, WindowError, Windows, export, shared_buffer
from hypic.router import messages as m
from hypic.router.control import ControlSocket
from hypic.router.coordinator import Coordinator
from hypic.router.costs import Costs
from hypic.router.transport import Peer
from hypic.router.transport.security import InsecureError, public_key
from tests.router.conftest import folder  # noqa: F401
from tests.router.test_security import keys

T = TypeVar("T", bound=ClusterEvent)
KEY = b"k" * 24
HEADER = encode_header(
    Header("f", "seam", 8, "", 0, 1, None, None, token_bytes(array("q", range(100)))),
)
BLOB = HEADER + bytes(range(256)) * 40


def until(holds: Callable[[], T | bool | None], what: str, seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.005)
    return found


class Rig:
    """An exchange over a small arena."""

    def __init__(self, member: Membership, blob: bytes = b"", windows: bool = False):
        self.arena = shared_buffer(1 << 16).zero_()
        self.arena[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else 0
        mover = WindowMover(self.arena, Windows(self.arena)) if windows else SocketMover(DirectMemory(self.arena))
        self.exchange = Exchange(member, b"identity", mover)
        self.exchange.start()
        self._seen: list[ClusterEvent] = []

    def event(self, kind: type[T], seconds: float = 10.0) -> T:
        def find() -> T | None:
            self._seen += self.exchange.take()
            return next((e for e in self._seen if isinstance(e, kind)), None)

        found = until(find, kind.__name__, seconds)
        self._seen.remove(found)
        return found  # type: ignore[no-any-return]


def test_orders_of_one_request_are_taken_together(folder: Path) -> None:  # noqa: F811
    """Its first pass has what there is when the scheduler wakes."""
    rig = Rig(Membership(f"ipc://{folder}/nobody", "w0", f"ipc://{folder}/w0", "", 1))
    orders = [
        m.Compile(
            flight=i, request="r", key=bytes([i]) * 24, tenant="", adapter="", tokens=b"", deadline=9.0, more=15 - i
        )
        for i in range(16)
    ]
    try:
        for _ in range(20):
            rig.exchange._post(lambda: [rig.exchange._told(o) for o in orders])
            assert select.select([rig.exchange.wake_fd], [], [], 10)[0], "as an idle scheduler waits"
            assert len(rig.exchange.take()) == len(orders)
    finally:
        rig.exchange.close()


class Control:
    """The router's socket in an event loop of its own."""

    def __init__(self, address: str, curve: Any = None):
        self.coordinator = Coordinator(Costs(tokens_per_s=1e4, transfer_gb_s=1))
        self._loop = asyncio.new_event_loop()
        self._socket = ControlSocket(self.coordinator, address, lambda _: None, curve)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.address = self._do(self._socket.start())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def close(self) -> None:
        self._do(self._socket.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []

    def later(thing: Any) -> Any:
        opened.append(thing)
        return thing

    yield later
    for thing in reversed(opened):
        (thing.exchange if isinstance(thing, Rig) else thing).close()


def member(folder: Path, name: str, router: str, **fields: Any) -> Membership:  # noqa: F811
    given = {"data": f"ipc://{folder}/{name}", "http": "http://127.0.0.1:1", "capacity": 1 << 16, **fields}
    return Membership(router=router, worker=name, **given)


def test_over_tcp_with_keys(folder: Path, closing: Callable[[Any], Any]) -> None:  # noqa: F811
    """Two workers join and pass an artifact on; one whose key is not allowed neither joins nor gets anything."""
    pairs = keys(folder, "router", "a", "b", others=("stranger",))
    control = closing(Control("tcp://127.0.0.1:0", pairs["router"]))
    router_key = public_key(folder / "private" / "router.key")
    common = {"data": "tcp://127.0.0.1:0", "router_key": router_key}
    workers = control.coordinator.cluster.workers
    a = closing(Rig(member(folder, "a", control.address, curve=pairs["a"], **common), BLOB))
    b = closing(Rig(member(folder, "b", control.address, curve=pairs["b"], **common)))
    stranger = closing(Rig(member(folder, "stranger", control.address, curve=pairs["stranger"], **common)))
    until(lambda: {"a", "b"} <= workers.keys(), "joined")
    hello = control.coordinator._by_name["a"].hello
    assert hello.data.startswith("tcp://127.0.0.1:") and len(hello.public_key) == 40
    a.exchange.stored(KEY, len(BLOB))
    until(lambda: control.coordinator.cluster.directory.holds("a", KEY), "announced")
    a.exchange.offer(KEY, 0, len(BLOB))
    place, peer = Place(KEY, 512, len(BLOB), HEADER), Peer(hello.data, hello.public_key)
    b.exchange.fetch(place, peer, 5.0)
    assert b.event(Fetched).ok
    assert bytes(b.arena[512 : 512 + len(BLOB)].numpy()) == BLOB
    stranger.exchange.fetch(place, peer, 1.0)
    assert stranger.event(Fetched) == Fetched(KEY, False, "timeout")
    assert not stranger.arena.any()
    assert workers.keys() == {"a", "b"}


def test_what_nobody_asks_for_is_taken_back(
    folder: Path,  # noqa: F811
    closing: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange_module, "OFFER_IDLE", 1.0)
    nowhere = f"ipc://{folder}/nobody"
    a = closing(Rig(member(folder, "a", nowhere), BLOB))
    b = closing(Rig(member(folder, "b", nowhere)))
    a.exchange.stored(KEY, len(BLOB))
    a.exchange.offer(KEY, 0, len(BLOB))
    for _ in range(3):  # in use, so not idle
        b.exchange.fetch(Place(KEY, 0, len(BLOB), HEADER), Peer(f"ipc://{folder}/a"), 5.0)
        assert b.event(Fetched).ok
        time.sleep(0.4)
    assert not [e for e in a.exchange.take() if isinstance(e, Idle)]
    assert a.event(Idle).key == KEY
    a.exchange.withdraw(KEY, "gone")
    assert a.event(Returned).key == KEY
    b.exchange.fetch(Place(KEY, 0, len(BLOB), HEADER), Peer(f"ipc://{folder}/a"), 0.3)
    assert not b.event(Fetched).ok


@pytest.mark.parametrize("heard", ["hello", "nothing"])
def test_leaving_and_joining_as_another_model(
    folder: Path,  # noqa: F811
    closing: Callable[[Any], Any],
    heard: str,
) -> None:
    """Also while the router's Welcome to what it was is still on its way."""
    control = closing(Control(f"ipc://{folder}/control"))
    a = closing(Rig(member(folder, "a", control.address)))
    workers = control.coordinator.cluster.workers
    if heard == "hello":
        until(lambda: "a" in workers, "joined")
    a.exchange.rename(b"other weights")
    until(lambda: control.coordinator.identity == b"other weights", "the only worker decides what the cluster serves")
    a.exchange.show(Load(queued_tokens=3, free=7, tokens_per_s=123.0))
    until(lambda: workers["a"].tokens_per_s == 123.0, "its speed was heard")
    a.exchange.close()
    until(lambda: not workers, "it said goodbye")


def test_when_it_ends_what_was_waited_for_fails(folder: Path, closing: Callable[[Any], Any]) -> None:  # noqa: F811
    """A fault in the thread must not leave requests waiting for ever."""
    a = closing(Rig(member(folder, "a", f"ipc://{folder}/nobody")))
    a.exchange.fetch(Place(KEY, 0, len(BLOB), HEADER), Peer(f"ipc://{folder}/b"), 60.0)
    a.exchange.close()
    assert not a.event(Fetched).ok


def test_an_address_that_strangers_could_reach_is_refused_at_start(folder: Path) -> None:  # noqa: F811
    with pytest.raises(InsecureError, match="TCP only with CURVE"):
        Rig(member(folder, "a", f"ipc://{folder}/control", data="tcp://127.0.0.1:0"))
    with pytest.raises(InsecureError, match="TCP only with CURVE"):
        Rig(member(folder, "a", "tcp://127.0.0.1:5"))


# ---------------------------------------------------------------------- windows


@pytest.mark.parametrize("to", [True, False])
@pytest.mark.parametrize("source", [True, False])
def test_workers_with_and_without_windows_understand_each_other(
    folder: Path,  # noqa: F811
    closing: Callable[[Any], Any],
    source: bool,
    to: bool,
) -> None:
    nowhere = f"ipc://{folder}/nobody"
    a = closing(Rig(member(folder, "a", nowhere), BLOB, windows=source))
    b = closing(Rig(member(folder, "b", nowhere), windows=to))
    b.exchange.fetch(Place(KEY, 512, len(BLOB), HEADER), Peer(f"ipc://{folder}/a"), 5.0)
    time.sleep(0.05)  # the wish is there first
    a.exchange.order(KEY)
    a.exchange.offer(KEY, 0, len(BLOB))
    assert b.event(Fetched).ok
    assert bytes(b.arena[512 : 512 + len(BLOB)].numpy()) == BLOB
    assert not b.arena[:512].any() and not b.arena[512 + len(BLOB) :].any()
    sent = a.exchange._transport.stats
    assert sent.sent_bytes == len(BLOB)
    assert (sent.sent_chunks == 0) == (source and to)


def test_what_was_withdrawn_during_the_copy_is_dropped(
    folder: Path,  # noqa: F811
    closing: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source has used the memory for something else meanwhile: it says so, and the copy counts for nothing."""
    nowhere = f"ipc://{folder}/nobody"
    a = closing(Rig(member(folder, "a", nowhere), BLOB, windows=True))
    b = closing(Rig(member(folder, "b", nowhere), windows=True))
    a.exchange.stored(KEY, len(BLOB))
    a.exchange.offer(KEY, 0, len(BLOB))
    copy = WindowMover._copy

    async def slow(self: WindowMover, window: FileWindow, offset: int, place: torch.Tensor) -> None:
        await copy(self, window, offset, place)
        a.exchange.withdraw(KEY, "invalidated")
        a.exchange.gone(KEY)
        await asyncio.to_thread(a.event, Returned)
        a.exchange.offer(KEY, 0, len(BLOB))  # even if it is on offer again
        await asyncio.sleep(0.1)

    monkeypatch.setattr(WindowMover, "_copy", slow)
    b.exchange.fetch(Place(KEY, 0, len(BLOB), HEADER), Peer(f"ipc://{folder}/a"), 5.0)
    assert b.event(Fetched) == Fetched(KEY, False, "gone")


def test_a_window_is_the_memory_itself() -> None:
    buffer = shared_buffer(4096)
    buffer[:] = torch.arange(4096, dtype=torch.int64).to(torch.uint8)
    windows = Windows(shared_buffer(64))
    token = export(buffer)
    window, place = windows.find(token, 100, 10), torch.zeros(10, dtype=torch.uint8)
    buffer[100] = 7
    window.copy_to(place, 100)
    assert torch.equal(place, buffer[100:110])
    for offset, nbytes in ((4090, 10), (-1, 10)):
        with pytest.raises(WindowError, match="leaves a window"):
            windows.find(token, offset, nbytes)


def test_a_window_on_a_gpu_is_refused_where_there_is_none() -> None:
    token = msgspec.msgpack.encode(["CudaIpc", 1, bytes(64), 0, 4096])
    with pytest.raises(WindowError, match="another kind of memory"):
        Windows(shared_buffer(64)).find(token, 0, 16)


@pytest.mark.parametrize("token", ["garbage", "other file", "closed", "size", "no process"])
def test_what_is_no_window_is_not_mapped(token: str, tmp_path: Path) -> None:
    mine = msgspec.msgpack.decode(export(shared_buffer(4096)))
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 4096)
    with secret.open() as file:
        forged = {
            "garbage": b"\xc1",
            "other file": msgspec.msgpack.encode([mine[0], mine[1], file.fileno(), 4096]),
            "closed": msgspec.msgpack.encode([mine[0], mine[1], 10**6, 4096]),
            "size": msgspec.msgpack.encode([*mine[:3], 8192]),
            "no process": msgspec.msgpack.encode([mine[0], 2**22 + 1, *mine[2:]]),
        }[token]
        with pytest.raises(WindowError):
            Windows(shared_buffer(64)).find(forged, 0, 16)


def test_host_memory_without_a_file_has_no_window() -> None:
    with pytest.raises(WindowError, match="not in a file"):
        export(torch.zeros(64, dtype=torch.uint8))
