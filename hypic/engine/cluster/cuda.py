"""What windows on GPU memory need of the CUDA driver, by its C interface.

torch can share memory between processes too, but it maps it in a context on the device that owns it: every worker would pay
a context, some 500 MB, on every other worker's GPU. The driver maps it for the device at hand, and copies between the two.

All functions work in the context of the current device (`torch.cuda.device`), in any thread.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_LAZY_PEER_ACCESS = 1


class CudaError(RuntimeError):
    """A call of the driver failed; the text is the driver's."""


class Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


@functools.cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise CudaError(str(e)) from None
    pointer, size = ctypes.c_uint64, ctypes.c_size_t
    for name, arguments in (
        ("cuCtxGetCurrent", (ctypes.POINTER(ctypes.c_void_p),)),
        ("cuCtxSetCurrent", (ctypes.c_void_p,)),
        ("cuDevicePrimaryCtxRetain", (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)),
        ("cuMemGetAddressRange_v2", (ctypes.POINTER(pointer), ctypes.POINTER(size), pointer)),
        ("cuIpcGetMemHandle", (ctypes.POINTER(Handle), pointer)),
        ("cuIpcOpenMemHandle_v2", (ctypes.POINTER(pointer), Handle, ctypes.c_uint)),
        ("cuIpcCloseMemHandle", (pointer,)),
        ("cuMemcpyAsync", (pointer, pointer, size, ctypes.c_void_p)),
        ("cuGetErrorString", (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))),
    ):
        getattr(library, name).argtypes = arguments
        getattr(library, name).restype = ctypes.c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _driver()
    if status := getattr(library, name)(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'unknown').decode()} ({status})")


def _enter() -> None:
    """Have a context in this thread.

    The runtime gives a thread one when it is first called there. `torch.cuda.device` calls it for another device than the
    thread's own (0, in a new one) only.
    """
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), torch.cuda.current_device())
        _call("cuCtxSetCurrent", context)


def export_memory(address: int) -> tuple[bytes, int]:
    """For another process of this host: the handle of the allocation that holds `address`, and the offset in it.

    Raises:
        CudaError: memory that cannot be exported, as that of expandable segments.
    """
    base, nbytes, handle = ctypes.c_uint64(), ctypes.c_size_t(), Handle()
    _enter()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(nbytes), address)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base.value)
    return ctypes.string_at(ctypes.byref(handle), ctypes.sizeof(handle)), address - base.value


def map_memory(handle: bytes) -> int:
    """The address of another process's allocation, on whichever GPU it is. Raises CudaError."""
    address = ctypes.c_uint64()
    _enter()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def unmap_memory(address: int) -> None:
    """Raises CudaError."""
    _enter()
    _call("cuIpcCloseMemHandle", address)


def copy_memory(to: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy on a stream. Raises CudaError."""
    _enter()
    _call("cuMemcpyAsync", to, source, nbytes, stream)
