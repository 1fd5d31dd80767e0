"""SGLang's ``torch_native`` attention without its detour: only the new tokens are queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def latent_method(original: Callable[..., Any], cls: Any, backend_name: str) -> Any:
    """Around ``AttentionBackendRegistry.get_handler``: the absorbed form of latent attention for ``torch_native``.

    That backend reads K and V from the pool, which holds the latent: no other form is attention over that.
    """
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    if backend_name != "torch_native":
        return original(cls, backend_name)
    return lambda attention, forward_batch: AttnForwardMethod.MLA


def rope_without_compiled_kernels(
    original: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any
) -> Any:
    """Around ``get_rope_wrapper``: its way for a CPU knows one kind of scaling, the other way all."""
    return original(*args, device=None, **kwargs)


def run_sdpa_forward_extend(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Tensor:
    """Around ``TorchNativeAttnBackend._run_sdpa_forward_extend``.

    Where a row has a prefix the original pads its queries to the length of the prefix, so that a plain causal mask fits,
    and throws their results away: a few new tokens behind thousands cost as much as all of them. Here they get the mask
    that they need. Rows without a prefix, and whatever is not plain causal attention, are the original's.

    Args:
        query, output: [tokens, heads, head size]. k_cache, v_cache: [slots, KV heads, head size].
    """
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if encoder_lens is not None or not causal or is_cross_attn or windowed or not extend_prefix_lens.any():
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
        )  # fmt: skip
    first = 0
    lengths = zip(extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, (prefix, new) in zip(req_pool_indices.tolist(), lengths, strict=True):
        slots = req_to_token[row, : prefix + new]
        q = query[first : first + new].transpose(0, 1)
        k, v = (cache[slots].to(q.dtype).transpose(0, 1) for cache in (k_cache, v_cache))
        mask = torch.ones(new, prefix + new, dtype=torch.bool, device=q.device).tril(prefix) if prefix else None
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scaling, enable_gqa=enable_gqa, is_causal=mask is None
        )
        output[first : first + new] = out[0].transpose(0, 1)
        first += new
    return output
