"""Triton, if it is there. Kernels are defined in any case; without Triton only launching one fails, with the reason.

``TRITON_INTERPRET=1`` must be set before anything imports Triton; then kernels also run on CPU tensors (slowly).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl

    INTERPRETED = bool(triton.knobs.runtime.interpret)
    jit, constexpr = triton.jit, tl.constexpr

    def jit_counts(*names: str) -> Any:
        """``jit`` for a kernel whose integers ``names`` change with every batch: it is compiled once for all their values."""
        return triton.jit(do_not_specialize=list(names))

except ImportError:
    triton = tl = None
    INTERPRETED = False

    def jit(fn: Any) -> Any:
        return fn

    def jit_counts(*_: str) -> Any:
        return jit

    def constexpr(value: Any) -> Any:
        return value


Precision = Literal["tf32", "tf32x3", "ieee"]
"""How fp32 operands go through tensor cores. "tf32" rounds them to 11 bits (5e-4 relative, a sixteenth of what stock
SGLang's bf16 operands lose) and is the default; "tf32x3" is close to fp32 at three times the cost; "ieee" is exact fp32
without tensor cores. Triton's interpreter computes all of them exactly."""


def require_triton(tensor: Tensor) -> None:
    """Raise RuntimeError if a kernel on ``tensor`` cannot run here."""
    if triton is None:
        raise RuntimeError("impl='triton' needs the triton package, which is not installed")
    if not tensor.is_cuda and not INTERPRETED:
        raise RuntimeError("impl='triton' on a CPU tensor needs TRITON_INTERPRET=1, set before triton is imported")


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a float type, as a constexpr argument."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def block(n: int) -> int:
    """Tile size for n elements: a power of two, at least the 16 that tensor cores need."""
    return max(16, 1 << (n - 1).bit_length())
