"""Bytes of the arena as a transport over sockets needs them: in host memory."""

from __future__ import annotations

import asyncio
from typing import Protocol

import torch

_POLL = 0.0005


class HostMemory(Protocol):
    """Host-side places of blobs. All calls come from one event loop."""

    async def readable(self, offset: int, nbytes: int) -> memoryview:
        """The blob's bytes, for sending. Valid as long as the blob is locked and the view is referred to."""

    def writable(self, offset: int, nbytes: int) -> memoryview:
        """Where to receive the blob; :meth:`arrived` puts it in its place."""

    async def arrived(self, offset: int, view: memoryview) -> None:
        """What was received into `view` is in the arena once this returns, for every stream that is asked afterwards."""


def host_memory(buffer: torch.Tensor) -> HostMemory:
    """For the arena's buffer (uint8, one-dimensional)."""
    return DirectMemory(buffer) if buffer.device.type == "cpu" else StagedMemory(buffer)


class DirectMemory:
    """An arena in host memory: its own bytes, no copy."""

    def __init__(self, buffer: torch.Tensor):
        self._bytes = buffer.numpy().data

    async def readable(self, offset: int, nbytes: int) -> memoryview:
        return self._bytes[offset : offset + nbytes]

    def writable(self, offset: int, nbytes: int) -> memoryview:
        return self._bytes[offset : offset + nbytes]

    async def arrived(self, offset: int, view: memoryview) -> None:
        pass


class StagedMemory:
    """An arena on a device: pinned buffers beside it, copied on a stream of their own.

    Producers are done before a blob is offered (the result of their forward pass was processed), and consumers are
    launched after `arrived`, so no stream waits for another; the event loop waits without blocking.
    """

    def __init__(self, buffer: torch.Tensor):
        self._buffer = buffer
        self._pinned = buffer.device.type == "cuda"
        self._stream = torch.cuda.Stream(buffer.device) if self._pinned else None

    async def readable(self, offset: int, nbytes: int) -> memoryview:
        staged = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        await self._copy(staged, self._buffer[offset : offset + nbytes])
        return staged.numpy().data

    def writable(self, offset: int, nbytes: int) -> memoryview:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned).numpy().data

    async def arrived(self, offset: int, view: memoryview) -> None:
        staged = torch.frombuffer(view, dtype=torch.uint8)
        await self._copy(self._buffer[offset : offset + view.nbytes], staged)

    async def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            to.copy_(source)
            return
        with torch.cuda.device(self._buffer.device), torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        while not done.query():
            await asyncio.sleep(_POLL)
