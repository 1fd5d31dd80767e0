"""Windows through the Mooncake Transfer Engine: memory of other hosts over RDMA (optional, package ``mooncake-transfer-engine``).

The engine reads registered memory of a process by host, port and address. It asks nobody for permission: whoever reaches its
ports reads the arena. So it is never chosen by itself, and belongs into a network that only workers can reach; over TCP it is
for trying out. What goes over our own sockets stays behind CURVE.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from hypic.engine.cluster.windows import WindowError


class Registered(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Memory that a Mooncake engine serves.

    Attributes:
        session: host and port of the engine.
        start, nbytes: of the arena, in the address space of its process.
    """

    session: str
    start: int
    nbytes: int


_DECODER = msgspec.msgpack.Decoder(Registered)


class MooncakeWindow:
    """The arena of another worker."""

    def __init__(self, engine: Any, token: Registered):
        self._engine, self._token, self.nbytes = engine, token, token.nbytes

    def copy_to(self, place: torch.Tensor, offset: int) -> None:
        """Read as many bytes as `place` has; returns when they are there. Raises WindowError."""
        remote = self._token.start + offset
        status = self._engine.transfer_sync_read(self._token.session, place.data_ptr(), remote, place.numel())
        if status:
            raise WindowError(f"Mooncake cannot read from {self._token.session}: status {status}")


class MooncakeWindows:
    """Our arena for others, and theirs for us.

    Args:
        buffer: our arena (host or GPU memory).
        host: our name or address, as other hosts know it.
        protocol: "rdma" or "tcp".

    Raises:
        WindowError: the package is missing, or its engine does not start.
    """

    def __init__(self, buffer: torch.Tensor, host: str, protocol: str):
        try:
            from mooncake.engine import TransferEngine
        except ImportError as e:
            raise WindowError(f"--hypic-transport mooncake: pip install mooncake-transfer-engine ({e})") from None
        self._engine = TransferEngine()
        if status := self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise WindowError(f"Mooncake's engine does not start on {host} over {protocol}: status {status}")
        address, nbytes = buffer.data_ptr(), buffer.numel()
        if status := self._engine.register_memory(address, nbytes):
            raise WindowError(f"Mooncake cannot register the arena of {nbytes} bytes: status {status}")
        mine = Registered(f"{host}:{self._engine.get_rpc_port()}", address, nbytes)
        self.token: bytes = msgspec.msgpack.encode(mine)

    def find(self, token: bytes, offset: int, nbytes: int) -> MooncakeWindow:
        """As :meth:`hypic.engine.cluster.windows.Windows.find`."""
        try:
            found = _DECODER.decode(token)
        except msgspec.DecodeError as e:
            raise WindowError(f"not memory of a Mooncake engine: {e}") from None
        if not 0 <= offset <= offset + nbytes <= found.nbytes:
            raise WindowError(f"[{offset}, {offset + nbytes}) leaves memory of {found.nbytes} bytes")
        return MooncakeWindow(self._engine, found)
