"""What a figure was made with and on: goes into every result file."""

from __future__ import annotations

import importlib.metadata
import os
import platform

PACKAGES = ("hypic", "sglang", "torch", "triton", "flashinfer-python", "sglang-kernel", "transformers")


def versions() -> dict[str, str]:
    """Of Python and of PACKAGES, those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Its processor, and its GPUs if it has some."""
    import torch

    found = {"cpu": platform.processor() or platform.machine(), "cores": str(os.cpu_count())}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "gpus": str(torch.cuda.device_count())}
    return found
