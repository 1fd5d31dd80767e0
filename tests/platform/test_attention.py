"""CPU mode's extend attention equals SGLang's own, which computes the whole prefix again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hypic.platform_cpu.attention import run_sdpa_forward_extend

HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 16, 512
CASES = [((0,), (5,)), ((100,), (1,)), ((7, 0, 63), (1, 9, 130)), ((0, 0), (3, 64))]


@pytest.mark.parametrize(("prefix", "new"), CASES, ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_equals_the_original(prefix: tuple[int, ...], new: tuple[int, ...]) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    original = TorchNativeAttnBackend._run_sdpa_forward_extend
    original = getattr(original, "__wrapped__", original)
    torch.manual_seed(0)
    k, v = torch.randn(2, SLOTS, KV_HEADS, SIZE)
    query = torch.randn(sum(new), HEADS, SIZE)
    lengths = torch.tensor(prefix) + torch.tensor(new)
    table = torch.stack([torch.randperm(SLOTS) for _ in prefix])
    arguments: dict[str, Any] = dict(
        k_cache=k,
        v_cache=v,
        req_to_token=table,
        req_pool_indices=torch.arange(len(prefix)).flip(0),
        seq_lens=lengths,
        extend_prefix_lens=torch.tensor(prefix),
        extend_seq_lens=torch.tensor(new),
        scaling=SIZE**-0.5,
        enable_gqa=True,
        causal=True,
    )
    backend = object.__new__(TorchNativeAttnBackend)
    calls = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    expected = original(backend, query, torch.zeros_like(query), **arguments)
    found = run_sdpa_forward_extend(counted, backend, query, torch.zeros_like(query), **arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert bool(calls) == (not any(prefix)), "rows without a prefix are the original's"
