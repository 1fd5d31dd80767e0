"""bf16 in Triton's interpreter as on a GPU. By itself it multiplies the bits of bf16 as integers, and cuts digits off."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def patch() -> None:
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Products of bf16 are exact in fp32."""
        return dot(self, widen(a), widen(b), *rest)

    def cast_impl(self: Any, src: Any, to: Any) -> Any:
        """To the nearest."""
        if (src.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, src, to)
        rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
