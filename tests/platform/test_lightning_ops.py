"""The torch stand-ins on SGLang's Lightning path against the token recurrence in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hypic.algebra import naive
from hypic.platform_cpu import lightning_ops as ops
from hypic.platform_cpu.attention import rope_without_compiled_kernels

H, K, V, SLOTS = 4, 24, 40, 7
SLOPES = torch.tensor([0.001, 0.02, 0.3, 0.9])


def batch(lengths: list[int], slots: list[int], goes_on: list[bool]) -> tuple[list[Tensor], Any]:
    rng = torch.Generator().manual_seed(0)
    n = sum(lengths)
    tensors = [torch.randn(*size, generator=rng) for size in ((n, H, K), (n, H, K), (n, H, V), (SLOTS, H, K, V))]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return tensors, SimpleNamespace(
        batch_size=len(lengths), q_offsets=offsets, s_offsets=torch.tensor(slots), s_scales=torch.tensor(goes_on),
        mask=None,
    )  # fmt: skip


def test_packed_sequences_go_on_and_begin() -> None:
    """Lengths around the block of 32; one padded; one kept after 64 of its tokens."""
    lengths, slots = [1, 100, 5, 32, 33], [3, 0, -1, 5, 2]
    (q, k, v, pool), meta = batch(lengths, slots, [True, True, True, False, False])
    before, kept = pool.clone(), torch.tensor([0, 64, 0, 0, 0])
    out = ops.seg_la_fwd(
        q,
        k,
        v,
        pool,
        SLOPES.view(H, 1, 1),
        meta,
        track_lens=kept,
        track_state_indices=torch.tensor([-1, 6, -1, -1, -1]),
    )
    want, bounds = before.double(), meta.q_offsets.tolist()
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        h = before[slot].double().mT if meta.s_scales[i] else torch.zeros(H, V, K, dtype=torch.float64)
        for t in range(bounds[i], bounds[i + 1]):
            one = slice(t, t + 1)
            o, h = naive.retention(q[one].double() * K**-0.5, k[one].double(), v[one].double(), -SLOPES.double(), h)
            torch.testing.assert_close(out[t].double(), o[0], rtol=1e-4, atol=1e-5)
            if i == 1 and t - bounds[i] == 63:
                want[6] = h.mT
        want[slot] = h.mT
    torch.testing.assert_close(pool.double(), want, rtol=1e-4, atol=1e-5)


def test_speculative_decoding_is_refused() -> None:
    (q, k, v, pool), meta = batch([3], [1], [True])
    with pytest.raises(NotImplementedError, match="speculative"):
        ops.seg_la_fwd(q, k, v, pool, SLOPES, meta, caches=pool)


def test_rotary_embeddings_of_a_cpu() -> None:
    """Without a scaling SGLang's factory for CPUs raises: it is never asked, whatever device a model names."""
    asked: list[Any] = []
    rope_without_compiled_kernels(
        lambda *args, **kwargs: asked.append((args, kwargs)), 64, 32, 512, 10000, device="cpu"
    )
    assert asked == [((64, 32, 512, 10000), {"device": None})]
