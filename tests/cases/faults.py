"""What tests change in an engine's own processes (``start_engine(prepare=...)``)."""

from __future__ import annotations

from typing import Any

import torch


def unpinned() -> None:
    """SGLang's LoRA layers ask for pinned memory outright, which a machine without an accelerator does not have."""
    for name in ("tensor", "zeros"):
        original = getattr(torch, name)

        def make(*args: Any, _original: Any = original, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            made: torch.Tensor = _original(*args, **kwargs)
            return made

        setattr(torch, name, make)
