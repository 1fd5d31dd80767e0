"""Ring-mini-linear-2.0 and Ring-flash-linear-2.0: SGLang's model of Ring-2.5 with grouped-query attention. Ring-2.5, where
SGLang has lost it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def _awq_optional() -> Iterator[None]:
    """On a CPU without AMX SGLang's module asks vLLM for a function that only AWQ weights use."""

    def refuse(*_: Any) -> Any:
        raise NotImplementedError("AWQ weights on a CPU")

    package, ops = ModuleType("vllm"), ModuleType("vllm._custom_ops")
    ops.awq_dequantize = refuse  # type: ignore[attr-defined]
    stubs = {"vllm": package, "vllm._custom_ops": ops}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


try:
    from sglang.srt.models.bailing_moe_linear import BailingMoELinearForCausalLM, BailingMoeV2_5ForCausalLM
except ModuleNotFoundError as e:
    if e.name != "vllm":
        raise
    with _awq_optional():
        from sglang.srt.models.bailing_moe_linear import BailingMoELinearForCausalLM, BailingMoeV2_5ForCausalLM


class BailingMoeLinearV2ForCausalLM(BailingMoELinearForCausalLM):
    """The config says the rest, see BailingMoeLinearConfig."""


EntryClass = [BailingMoeLinearV2ForCausalLM, BailingMoeV2_5ForCausalLM]
"""The second is SGLang's own class; where its module could not be imported without the above, SGLang does not have it."""
