"""Multi-head latent attention (MLA) of linked batches: always by SGLang's absorbed form.

SGLang has two ways through a latent layer. One expands the latent into K and V of every head, which suits a prompt
without a prefix; the other folds the expansion into queries and outputs ("absorbed") and attends to what the KV pool
holds. It chooses by what the batch says of its rows, but in a linked batch the rows are runs, whose prefix the batch does
not know. The absorbed form holds for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LATENT_BACKENDS = ("torch_native", "triton")
"""Attention backends whose absorbed form reads the expanded view as plain attention does."""


def backend_problem(server_args: Any) -> str | None:
    """Why the server's attention backend cannot serve a model with latent attention, or None."""
    name: str | None = server_args.get_attention_backends()[0]
    if name is None or name in LATENT_BACKENDS:
        return None
    known = " or ".join(LATENT_BACKENDS)
    return f"latent attention (MLA) by the {name} backend is not proven: --attention-backend {known}"


def method_of_batch(original: Callable[..., Any], cls: Any, backend_name: str) -> Any:
    """Around AttentionBackendRegistry.get_handler: what chooses the form of a latent layer for a batch."""
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    backend = get_attn_backend()
    full = getattr(backend, "full_attn_backend", backend)
    if not hasattr(full, "hypic_plan"):
        return original(cls, backend_name)
    return lambda attention, forward_batch: AttnForwardMethod.MLA
