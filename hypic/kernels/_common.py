"""What all operations share: choosing an implementation, typed views of artifact blobs, plans in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Impl = Literal["torch", "triton"]
BLOB_ALIGN = 16
"""Blob offsets are multiples of this many bytes, so that kernels read them in wide loads."""

_PAIR = 2
"""Vectors of plans begin at multiples of so many int64, which is what Triton takes for aligned."""

IntVector = Sequence[int] | np.ndarray | Tensor


def pick_impl(impl: Impl | None, tensor: Tensor) -> Impl:
    """``impl``, or by default Triton for CUDA tensors and the torch reference for all others. Raises ValueError."""
    if impl is None:
        return "triton" if tensor.is_cuda else "torch"
    if impl not in ("torch", "triton"):
        raise ValueError(f"impl={impl!r}: must be 'torch', 'triton' or None")
    return impl


def blob_view(arena: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A view (no copy) of ``prod(shape)`` elements of ``dtype`` that start ``offset`` bytes into the uint8 arena.

    Raises RuntimeError (from torch) if the offset is not a multiple of the element size.
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if offset < 0 or offset + nbytes > arena.numel():
        raise ValueError(f"bytes {offset}..{offset + nbytes} are outside of the arena ({arena.numel()} bytes)")
    return arena[offset : offset + nbytes].view(dtype).view(*shape)


def to_device(vectors: Mapping[str, IntVector], device: torch.device | str) -> dict[str, Tensor]:
    """Integer vectors as int64 tensors on ``device``: all host ones travel in one asynchronous copy.

    Tensors that already are on the device are only cast. Nothing here waits for the device. Each begins at a multiple of 16
    bytes, since Triton compiles a kernel anew (half a second) for each combination of arguments that do and do not.
    """
    device = torch.device(device)
    out: dict[str, Tensor] = {}
    host: dict[str, np.ndarray] = {}
    for name, vector in vectors.items():
        if isinstance(vector, Tensor):
            out[name] = vector.to(device=device, dtype=torch.int64, non_blocking=True)
        else:
            host[name] = np.asarray(vector, dtype=np.int64)
    starts = np.cumsum([0, *(v.size + v.size % _PAIR for v in host.values())])
    buffer = np.zeros(starts[-1], np.int64)
    for start, array in zip(starts, host.values(), strict=False):
        buffer[start : start + array.size] = array.ravel()
    packed = torch.from_numpy(buffer)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    for start, (name, array) in zip(starts, host.items(), strict=False):
        out[name] = packed[start : start + array.size].view(array.shape)
    return out


def as_list(vector: IntVector) -> list[int]:
    """A host list of the vector; reading it from a CUDA tensor waits for the device."""
    return [int(x) for x in (vector.tolist() if isinstance(vector, Tensor | np.ndarray) else vector)]
