"""Arenas that other processes of this host can map and read: an anonymous file on a CPU, CUDA IPC on a GPU.

A window's token says how to map it. It comes from another worker, so nothing in it is trusted: no pickle, no path, and only
memory of this user that calls itself a window of ours.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from hypic.engine.cluster import cuda

_NAME = "hypic-arena"


class WindowError(RuntimeError):
    """Memory of another worker that cannot be mapped; the text says why."""


class MemoryFile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An anonymous file that a process has open."""

    pid: int
    fd: int
    nbytes: int


class CudaIpc(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An allocation of a process on a GPU: its CUDA IPC handle, and the arena's place in it."""

    pid: int
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    start: int
    nbytes: int


_DECODER = msgspec.msgpack.Decoder(MemoryFile | CudaIpc)


def shared_buffer(nbytes: int) -> torch.Tensor:
    """A buffer [nbytes] uint8 in host memory that :func:`export` can show to others. Lives as long as the process."""
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    buffer = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    _FILES[buffer.data_ptr()] = fd
    return buffer


_FILES: dict[int, int] = {}
"""File descriptors of shared buffers, by address."""


def export(buffer: torch.Tensor) -> bytes:
    """The token of a window on `buffer`: one of :func:`shared_buffer`, or any on a CUDA device. Raises WindowError."""
    token: MemoryFile | CudaIpc
    if buffer.device.type == "cuda":
        try:
            with torch.cuda.device(buffer.device):
                handle, start = cuda.export_memory(buffer.data_ptr())
        except cuda.CudaError as e:
            raise WindowError(f"GPU memory that cannot be exported: {e}") from None
        token = CudaIpc(os.getpid(), handle, start, buffer.numel())
    elif (fd := _FILES.get(buffer.data_ptr())) is not None:
        token = MemoryFile(os.getpid(), fd, buffer.numel())
    else:
        raise WindowError("host memory that is not in a file")
    return msgspec.msgpack.encode(token)


class FileWindow:
    """Host memory of another worker."""

    def __init__(self, token: MemoryFile):
        self.pid, self.nbytes = token.pid, token.nbytes
        self._bytes = _map_file(token)

    def copy_to(self, place: torch.Tensor, offset: int) -> None:
        """Copy as many bytes as `place` (uint8, on the CPU) has; returns when they are there."""
        place.copy_(self._bytes[offset : offset + place.numel()])

    def close(self) -> None:
        pass  # unmapped with the last view


class CudaWindow:
    """GPU memory of another worker, mapped for one of our devices."""

    def __init__(self, token: CudaIpc, device: torch.device):
        self.pid, self.nbytes, self._device = token.pid, token.nbytes, device
        with torch.cuda.device(device):
            self._base = cuda.map_memory(token.handle)
        self._start = self._base + token.start

    def copy_to(self, place: torch.Tensor, offset: int) -> None:
        """Enqueue the copy of as many bytes as `place` (uint8, on our device) has, on the current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        cuda.copy_memory(place.data_ptr(), self._start + offset, place.numel(), stream)

    def close(self) -> None:
        with torch.cuda.device(self._device), contextlib.suppress(cuda.CudaError):
            cuda.unmap_memory(self._base)


class Windows:
    """Windows of other workers, mapped once for memory of `device`. Those of processes that are gone are closed when a new one
    comes.

    Args:
        buffer: our arena, which others may map by `token`. Raises WindowError.
    """

    def __init__(self, buffer: torch.Tensor):
        self._device = buffer.device
        self.token = export(buffer)
        self._open: dict[bytes, FileWindow | CudaWindow] = {}

    def find(self, token: bytes, offset: int, nbytes: int) -> FileWindow | CudaWindow:
        """The window, in which [offset, offset + nbytes) lies. Raises WindowError."""
        window = self._open.get(token)
        if window is None:
            for gone in [t for t, w in self._open.items() if not os.path.exists(f"/proc/{w.pid}")]:
                self._open.pop(gone).close()
            window = self._open[token] = self._map(token)
        if not 0 <= offset <= offset + nbytes <= window.nbytes:
            raise WindowError(f"[{offset}, {offset + nbytes}) leaves a window of {window.nbytes} bytes")
        return window

    def _map(self, token: bytes) -> FileWindow | CudaWindow:
        try:
            found = _DECODER.decode(token)
        except msgspec.DecodeError as e:
            raise WindowError(f"not a window: {e}") from None
        if isinstance(found, CudaIpc) != (self._device.type == "cuda"):
            raise WindowError(f"a window of another kind of memory than ours ({self._device.type})")
        try:
            return FileWindow(found) if isinstance(found, MemoryFile) else CudaWindow(found, self._device)
        except (OSError, ValueError, cuda.CudaError) as e:
            raise WindowError(f"cannot map memory of another worker (same host, user and namespaces?): {e}") from None


def _map_file(token: MemoryFile) -> torch.Tensor:
    path = f"/proc/{token.pid}/fd/{token.fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise WindowError(f"{path} is not a window")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if info.st_uid != os.getuid() or info.st_size != token.nbytes:
            raise WindowError(f"{path} is not this user's, or not of {token.nbytes} bytes")
        mapped = mmap.mmap(fd, token.nbytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():  # torch knows no read-only tensors; nothing writes here
        warnings.simplefilter("ignore")
        return torch.frombuffer(mapped, dtype=torch.uint8)
