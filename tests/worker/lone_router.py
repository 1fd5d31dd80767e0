"""A router and a peer in the hands of a test: real sockets, no decisions of their own."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from hypic.engine.cluster.exchange import rank_address
from hypic.engine.keys import artifact_key
from hypic.ports import free_ports
from hypic.router import messages as m
from hypic.router.transport import Peer, Receipt
from hypic.router.transport.security import Curve, Listener, make_keys
from hypic.router.transport.zmq_blobs import ZmqTransport

T = TypeVar("T")
PATIENCE = 60.0
RANKS = 2
SECRET = "what a launcher draws"


class LoneRouter:
    """What the worker says is kept until a test asks for it; what a test wants is sent.

    Attributes:
        control: address to give to the worker, as if it were on another host.
        member: the keys for that, as flags.
        peer: address from which the worker may fetch what tests offer.
        hello: the worker's last.
    """

    def __init__(self, folder: Path):
        (port,) = free_ports(1)
        self.control, self._name = f"tcp://127.0.0.1:{port}", b"first"
        private, allowed = folder / "private", folder / "allowed"
        for new in (private, allowed):
            new.mkdir(mode=0o700)
        pairs = {name: make_keys(private, name) for name in ("router", "worker")}
        for public, _ in pairs.values():
            shutil.copy(public, allowed)
        self._curve = Curve(pairs["router"][1], allowed)
        self.member = ("--hypic-curve-secret", str(pairs["worker"][1]), "--hypic-curve-allowed", str(allowed))
        self.member += ("--hypic-router-key", str(pairs["router"][0]))
        self.hello: m.Hello
        self._folder = folder
        self._said: list[m.Message] = []
        self._worker = b""
        self._loop = asyncio.new_event_loop()
        self._news = threading.Condition()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._do(self._open())

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _open(self) -> None:
        self.peer = f"ipc://{self._folder}/peer"
        self.transports = [ZmqTransport(rank_address(self.peer, r), retry_after=0.2) for r in range(RANKS)]
        for transport in self.transports:
            await transport.start()
        await self._bind()

    async def _bind(self) -> None:
        self._listener = Listener(self.control, self._curve, {})
        self._socket = self._listener.socket
        self._reader = asyncio.create_task(self._read())

    async def _unbind(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._listener.close()

    async def _read(self) -> None:
        while True:
            sender, frame = await self._socket.recv_multipart()
            message = m.decode(frame, m.ToRouter)
            if isinstance(message, m.Hello):
                self.hello, self._worker = message, sender
                await self._send(m.Welcome(router=self._name, heartbeat=0.05, dead_after=3.0))
            elif sender != self._worker:
                welcome = m.Welcome(router=self._name, heartbeat=0.05, dead_after=3.0)
                await self._socket.send_multipart([sender, m.encode(welcome)])
                continue
            with self._news:
                self._said.append(message)
                self._news.notify_all()

    async def _send(self, message: m.Message) -> None:
        await self._socket.send_multipart([self._worker, m.encode(message)])

    # ------------------------------------------------------------------ for tests

    def tell(self, message: m.Message) -> None:
        self._do(self._send(message))

    def send_raw(self, frame: bytes) -> None:
        async def send() -> None:
            await self._socket.send_multipart([self._worker, frame])

        self._do(send())

    def hear(self, kind: type[T], holds: Callable[[T], bool] = lambda _: True, seconds: float = PATIENCE) -> T:
        """The first message of that kind, since the last `forget`, of which this holds. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                for message in self._said:
                    if isinstance(message, kind) and holds(message):
                        self._said.remove(message)
                        return message
                left = deadline - time.monotonic()
                assert left > 0, f"no {kind.__name__} among {[type(s).__name__ for s in self._said][-20:]}"
                self._news.wait(left)

    def silent(self, kind: type[m.Message], holds: Callable[[Any], bool], seconds: float) -> bool:
        """Whether nothing of that kind is said for a while."""
        try:
            self.hear(kind, holds, seconds)
        except AssertionError:
            return True
        return False

    def forget(self) -> None:
        with self._news:
            self._said.clear()

    def restart(self, name: bytes, gap: float = 0.0) -> None:
        """End, and begin again as another router that knows nothing."""
        self._do(self._unbind())
        time.sleep(gap)
        self.forget()
        self._name, self._worker = name, b""
        self._do(self._bind())

    def offer(self, key: bytes, blob: bytes, rank: int = 0) -> None:
        """Be a peer that has this artifact (a rank's part of it)."""
        self._loop.call_soon_threadsafe(self.transports[rank].offer, key, memoryview(blob))

    def expect(self, key: bytes, rank: int = 0) -> None:
        """Be a peer that is still making it."""
        self._loop.call_soon_threadsafe(self.transports[rank].expect, key)

    def withdraw(self, key: bytes) -> None:
        for transport in self.transports:
            self._do(transport.withdraw(key))

    def fetch(self, key: bytes, nbytes: int, timeout: float = 10.0, rank: int = 0) -> tuple[bytes, Receipt]:
        """Take an artifact from the worker. Raises TransferError."""
        into = bytearray(nbytes)
        source = Peer(rank_address(self.hello.data, rank))
        receipt = self._do(self.transports[rank].fetch(source, key, memoryview(into), timeout))
        return bytes(into), receipt

    def key(self, tokens: list[int], tenant: str = "") -> bytes:
        return artifact_key(self.hello.identity, tenant, "", array("q", tokens))

    def compile(self, flight: int, request: str, tokens: list[int], **fields: Any) -> m.Compile:
        key = fields.pop("key", None) or self.key(tokens)
        raw = array("q", tokens).tobytes()
        deadline = fields.pop("deadline", 30.0)
        told = dict(flight=flight, request=request, key=key, tenant="", adapter="", tokens=raw, deadline=deadline)
        return m.Compile(**told, **fields)

    def wanted(self, tokens: list[int], address: str | None = None, cold: bool = True) -> m.Wanted:
        raw = array("q", tokens).tobytes()
        return m.Wanted(self.key(tokens), "", "", raw, "peer", self.peer if address is None else address, cold)

    def close(self) -> None:
        async def end() -> None:
            await self._unbind()
            for transport in self.transports:
                await transport.close()

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
