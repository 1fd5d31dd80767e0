"""Models that SGLang 0.5.17 has all parts of but does not register, through its seam for external models.

SGLang imports every module of this package when it looks for model classes (SGLANG_EXTERNAL_MODEL_PACKAGE).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def offer() -> None:
    """Make SGLang find the package, its configs and what its schedulers ask of them. Idempotent.

    A package of external models that the user names takes precedence: SGLang knows one.
    """
    if os.environ.setdefault(_PACKAGE, __name__) != __name__:
        return
    from hypic.engine.model_classes.config import register

    register()
    if registry := sys.modules.get("sglang.srt.models.registry"):  # imported before the plugins: it has looked already
        registry.ModelRegistry.register(__name__, overwrite=True)


def supports_extra_buffer(original: Callable[..., bool], view: Any, model_arch: str) -> bool:
    """Around SGLang's list of architectures whose states the radix tree may keep beside an overlapping schedule."""
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_spec_by_arch

    spec = get_linear_attn_spec_by_arch(model_arch)
    if spec is not None and spec.support_mamba_cache_extra_buffer:
        return bool(view.linear_attn_backend == "triton")
    return original(view, model_arch)
