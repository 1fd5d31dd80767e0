"""Arenas that other processes of this host can map and read: an anonymous file on a CPU, CUDA IPC on a GPU.

A window's token says how to map it. It comes from another worker, so nothing in it is trusted: no pickle, no path, and only
memory of this user that calls itself a window of ours.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Any

import msgspec
import torch

_NAME = "hypic-arena"


class WindowError(RuntimeError):
    """Memory of another worker that cannot be mapped; the text says why."""


class MemoryFile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """An anonymous file that a process has open."""

    pid: int
    fd: int
    nbytes: int


class CudaIpc(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What torch needs to map memory of another process on a device that both see under the same number.

    Attributes:
        handles: of the allocation, its reference counter and its event.
        numbers: bytes of the allocation, offset of the storage in it, offset of the counter.
        start, nbytes: of the arena in the storage.
    """

    device: int
    handles: tuple[bytes, bytes, bytes]
    numbers: tuple[int, int, int]
    synchronise: bool
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
        storage: Any = buffer.untyped_storage()
        try:
            device, handle, size, offset, counter, counter_offset, event, wait = storage._share_cuda_()
        except RuntimeError as e:
            raise WindowError(f"CUDA IPC: {e}") from None
        start = int(buffer.storage_offset())
        numbers = size, offset, counter_offset
        token = CudaIpc(device, (bytes(handle), bytes(counter), bytes(event)), numbers, wait, start, buffer.numel())
    elif (fd := _FILES.get(buffer.data_ptr())) is not None:
        token = MemoryFile(os.getpid(), fd, buffer.numel())
    else:
        raise WindowError("host memory that is not in a file")
    return msgspec.msgpack.encode(token)


class Windows:
    """Windows of other workers, mapped once. Those of processes that are gone are dropped when a new one comes."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, torch.Tensor]] = {}

    def view(self, token: bytes, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of a window, uint8, to be read only. Raises WindowError."""
        if token not in self._open:
            self._open = {t: (pid, w) for t, (pid, w) in self._open.items() if not pid or _lives(pid)}
            self._open[token] = _map(token)
        _, window = self._open[token]
        if offset + nbytes > window.numel():
            raise WindowError(f"[{offset}, {offset + nbytes}) leaves a window of {window.numel()} bytes")
        return window[offset : offset + nbytes]


def _map(token: bytes) -> tuple[int, torch.Tensor]:
    try:
        found = _DECODER.decode(token)
    except msgspec.DecodeError as e:
        raise WindowError(f"not a window: {e}") from None
    try:
        return (found.pid, _map_file(found)) if isinstance(found, MemoryFile) else (0, _map_cuda(found))
    except (OSError, RuntimeError, ValueError) as e:
        raise WindowError(f"cannot map memory of another worker (same host, user and pid namespace?): {e}") from None


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


def _map_cuda(token: CudaIpc) -> torch.Tensor:
    handle, counter, event = token.handles
    size, offset, counter_offset = token.numbers
    new: Any = torch.UntypedStorage._new_shared_cuda
    storage = new(token.device, handle, size, offset, counter, counter_offset, event, token.synchronise)
    empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", token.device))
    return empty.set_(storage, token.start, (token.nbytes,), (1,))


def _lives(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
