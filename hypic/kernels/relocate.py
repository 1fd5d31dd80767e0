"""Interiors between artifact blobs and KV slots: relocate (K by one extra rotation, V copied) and capture.

K is stored after RoPE at the positions of the compile. R(p) R(j) = R(p + j), so a segment that stands ``shift`` tokens
further on needs one more rotation by ``shift``, the same for all its tokens. EPIC, arXiv 2410.15332; HYPIC, 2607.01299.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import Impl, IntVector, blob_view, pick_impl, to_device


class InteriorLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    blob_kv: list[int]
    counts: list[int]
    shift: list[int]


@dataclass(frozen=True, kw_only=True)
class InteriorPlan:
    """The interiors of a batch, built once by :meth:`build`; int64 on the device, N segments, M tokens.

    The KV block of a segment with n interior tokens holds, for each full-attention layer in order, K [n, H, Dk] then
    V [n, H, Dv], contiguous, in the type of the pools.

    Attributes:
        blob_kv: [N] byte offset in the arena of the segment's KV block. count: [N] interior tokens n.
        shift: [N] tokens to move by: start position minus the offset it was compiled at; may be negative.
        slots: [M] destination (or source) KV slots, segment after segment. cu: [N+1]. tok_seg: [M] segment of a token.
        total: M.
    """

    blob_kv: Tensor
    count: Tensor
    shift: Tensor
    slots: Tensor
    cu: Tensor
    tok_seg: Tensor
    total: int
    lists: InteriorLists

    @classmethod
    def build(
        cls,
        *,
        blob_kv: Sequence[int],
        count: Sequence[int],
        slots: IntVector,
        shift: Sequence[int] | None = None,
        device: torch.device | str,
    ) -> InteriorPlan:
        """Plan the batch. ``slots`` may be a device tensor; ``shift`` defaults to 0 (capture ignores it).

        Raises: ValueError if the number of slots is not the sum of ``count``.
        """
        counts = np.asarray(count, np.int64)
        if len(slots) != counts.sum():
            raise ValueError(f"{len(slots)} slots for {counts.sum()} interior tokens")
        shift = list(shift) if shift is not None else [0] * len(counts)
        on_device = to_device(
            {
                "blob_kv": blob_kv,
                "count": counts,
                "shift": shift,
                "slots": slots,
                "cu": np.concatenate([[0], counts.cumsum()]),
                "tok_seg": np.repeat(np.arange(len(counts)), counts),
            },
            device,
        )
        return cls(**on_device, total=len(slots), lists=InteriorLists(list(blob_kv), list(count), shift))


def relocate_interiors(
    arena: Tensor,
    plan: InteriorPlan,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    *,
    cos_sin: Tensor | Sequence[Tensor],
    rotary_dim: int,
    is_neox: bool,
    scale: float = 1.0,
    impl: Impl | None = None,
) -> None:
    """Copy all interiors of all full-attention layers from the arena into KV slots, K rotated by the shift.

    Args:
        arena: uint8 [bytes].
        k_pools, v_pools: per layer [slots, H, Dk] and [slots, H, Dv].
        cos_sin: SGLang's ``cos_sin_cache`` [max_pos, rotary_dim] = [cos | sin], one for all layers or one per layer.
            Needs rows up to the largest absolute shift.
        rotary_dim: how many leading dims of K rotate. is_neox: half-split pairs, else interleaved (GPT-J).
        scale: attention factor that yarn and mrope multiply into cos *and* sin. K in the pool already holds it once,
            and the extra rotation must be a pure one, so both are divided by it.
    The rotation is computed in fp32 and rounded once; a shift of 0 copies bit by bit.

    Raises: ValueError if the numbers of layers disagree.
    """
    tables = [cos_sin] * len(k_pools) if isinstance(cos_sin, Tensor) else list(cos_sin)
    if not len(k_pools) == len(v_pools) == len(tables):
        raise ValueError(f"{len(k_pools)} K pools, {len(v_pools)} V pools, {len(tables)} rotary tables")
    if pick_impl(impl, arena) == "triton":
        raise NotImplementedError("relocate_interiors: the Triton kernel is not there yet")
    start = 0
    for n, shift, blocks in _blocks(arena, plan, k_pools, v_pools):
        slots = plan.slots[start : start + n]
        for (k, v), k_pool, v_pool, table in zip(blocks, k_pools, v_pools, tables, strict=True):
            k_pool[slots] = _rotate(k, shift, table, rotary_dim, is_neox, scale)
            v_pool[slots] = v
        start += n


def capture_interiors(
    arena: Tensor,
    plan: InteriorPlan,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    impl: Impl | None = None,
) -> None:
    """Copy K and V of all interiors from KV slots into their blobs, bit by bit. Arguments as relocate_interiors."""
    if len(k_pools) != len(v_pools):
        raise ValueError(f"{len(k_pools)} K pools, {len(v_pools)} V pools")
    if pick_impl(impl, arena) == "triton":
        raise NotImplementedError("capture_interiors: the Triton kernel is not there yet")
    start = 0
    for n, _, blocks in _blocks(arena, plan, k_pools, v_pools):
        slots = plan.slots[start : start + n]
        for (k, v), k_pool, v_pool in zip(blocks, k_pools, v_pools, strict=True):
            k.copy_(k_pool[slots])
            v.copy_(v_pool[slots])
        start += n


# ---------------------------------------------------------------- torch reference


def _blocks(
    arena: Tensor, plan: InteriorPlan, k_pools: Sequence[Tensor], v_pools: Sequence[Tensor]
) -> list[tuple[int, int, list[tuple[Tensor, Tensor]]]]:
    """Per segment: n, shift, and per layer the blob's K and V as views of the arena."""
    out = []
    for offset, n, shift in zip(*plan.lists, strict=True):
        layers = []
        for k_pool, v_pool in zip(k_pools, v_pools, strict=True):
            pair = []
            for pool in (k_pool, v_pool):
                block = blob_view(arena, offset, (n, *pool.shape[1:]), pool.dtype)
                offset += block.numel() * block.element_size()
                pair.append(block)
            layers.append((pair[0], pair[1]))
        out.append((n, shift, layers))
    return out


def _rotate(k: Tensor, shift: int, table: Tensor, rotary_dim: int, is_neox: bool, scale: float) -> Tensor:
    """K [n, H, D] at local positions -> K at local positions + shift."""
    if shift == 0:
        return k
    cos, sin = (table[abs(shift)].float() / scale).chunk(2)
    sin = sin if shift > 0 else -sin
    x = k[..., :rotary_dim].float()
    if is_neox:
        x1, x2 = x.chunk(2, -1)
        y = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    else:
        x1, x2 = x[..., ::2], x[..., 1::2]
        y = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2)
    return torch.cat([y.to(k.dtype), k[..., rotary_dim:]], -1)
