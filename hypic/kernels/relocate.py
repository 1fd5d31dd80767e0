"""Interiors between artifact blobs and KV slots: relocate (K by one extra rotation, V copied) and capture.

K is stored after RoPE at the positions of the compile. R(p) R(j) = R(p + j), so a segment that stands ``shift`` tokens
further on needs one more rotation by ``shift``, the same for all its tokens. EPIC, arXiv 2410.15332; HYPIC, 2607.01299.
Multi-head latent attention keeps one row per token, [latent | part of K that all heads share], and only the latter rotates:
its pools are passed as K, with first_dim at the shared part, and there are no V pools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import BLOB_ALIGN, Impl, IntVector, blob_view, pick_impl, to_device
from hypic.kernels._triton import block, jit_counts, require_triton, tl


class InteriorLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    blob_kv: list[int]
    counts: list[int]
    local: list[int]
    shift: list[int]


@dataclass(frozen=True, kw_only=True)
class InteriorPlan:
    """The interiors of a batch, built once by :meth:`build`; int64 on the device, N segments, M tokens.

    The KV block of a segment with n interior tokens holds, for each full-attention layer in order, K [n, H, Dk] then
    V [n, H, Dv], contiguous, in the type of the pools.

    Attributes:
        blob_kv: [N] byte offset in the arena of the segment's KV block. count: [N] interior tokens n.
        local: [N] position at which the segment's first interior token was compiled.
        shift: [N] tokens to move by: start position minus the offset it was compiled at; may be negative.
        slots: [M] destination (or source) KV slots, segment after segment. cu: [N+1]. tok_seg: [M] segment of a token.
        total: M.
    """

    blob_kv: Tensor
    count: Tensor
    local: Tensor
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
        local: Sequence[int] | None = None,
        shift: Sequence[int] | None = None,
        device: torch.device | str,
    ) -> InteriorPlan:
        """Plan the batch. ``slots`` may be a device tensor; ``local`` and ``shift`` default to 0 (capture ignores them).

        Raises: ValueError if the number of slots is not the sum of ``count``, or a block is not aligned to BLOB_ALIGN.
        """
        if any(offset % BLOB_ALIGN for offset in blob_kv):
            raise ValueError(f"blob_kv {list(blob_kv)}: must be multiples of {BLOB_ALIGN} bytes")
        counts = np.asarray(count, np.int64)
        if len(slots) != counts.sum():
            raise ValueError(f"{len(slots)} slots for {counts.sum()} interior tokens")
        local = list(local) if local is not None else [0] * len(counts)
        shift = list(shift) if shift is not None else [0] * len(counts)
        on_device = to_device(
            {
                "blob_kv": blob_kv,
                "count": counts,
                "local": local,
                "shift": shift,
                "slots": slots,
                "cu": np.concatenate([[0], counts.cumsum()]),
                "tok_seg": np.repeat(np.arange(len(counts)), counts),
            },
            device,
        )
        return cls(**on_device, total=len(slots), lists=InteriorLists(list(blob_kv), list(count), local, shift))


def relocate_interiors(
    arena: Tensor,
    plan: InteriorPlan,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    *,
    cos_sin: Tensor | Sequence[Tensor] | None,
    rotary_dim: int = 0,
    first_dim: int = 0,
    is_neox: bool = True,
    scale: float = 1.0,
    impl: Impl | None = None,
) -> None:
    """Copy all interiors of all full-attention layers from the arena into KV slots, K rotated by the shift.

    Args:
        arena: uint8 [bytes].
        k_pools, v_pools: per layer [slots, H, Dk] and [slots, H, Dv]. No v_pools: what K's hold is all there is.
        cos_sin: SGLang's ``cos_sin_cache`` [max_pos, rotary_dim] = [cos | sin], one for all layers or one per layer.
            Needs a row for every position, before and after the move. None: K does not depend on positions and is copied.
        rotary_dim: how many dims of K rotate, from first_dim on. is_neox: half-split pairs, else interleaved (GPT-J).
        scale: attention factor that yarn and mrope multiply into cos *and* sin. K in the pool already holds it once,
            and the extra rotation must be a pure one, so both are divided by it.
    A token is turned from the table's angle at its old position to the table's angle at its new one: the table's own
    rounding (2e-4 radians near position 4,000 in fp32) cancels, which it would not with the table's row of the shift.
    The rotation is computed in fp32 and rounded once; a shift of 0 copies bit by bit. The Triton kernel is one launch
    for all layers; it reads and writes each byte once, so 4.3 TB/s is its budget (32k tokens x 20 KiB: 0.3 ms).

    Raises: ValueError if the numbers of layers disagree; for Triton also if the layers' pools differ in shape.
    """
    tables = list(cos_sin) if isinstance(cos_sin, Sequence) else [cos_sin] * len(k_pools)
    if not len(k_pools) == len(tables) or len(v_pools) not in (0, len(k_pools)):
        raise ValueError(f"{len(k_pools)} K pools, {len(v_pools)} V pools, {len(tables)} rotary tables")
    if pick_impl(impl, arena) == "triton":
        rotary = [t for t in tables if t is not None]
        _move_triton(arena, plan, k_pools, v_pools, rotary, rotary_dim, first_dim, is_neox, scale, into_slots=True)
        return
    start = 0
    moves = zip(plan.lists.local, plan.lists.shift, strict=True)
    for (n, blocks), (local, shift) in zip(_blocks(arena, plan, k_pools, v_pools), moves, strict=True):
        slots = plan.slots[start : start + n]
        for (k, *_), k_pool, table in zip(blocks, k_pools, tables, strict=True):
            k_pool[slots] = (
                k if table is None else rotate(k, local, shift, table, rotary_dim, is_neox, scale, first_dim)
            )
        for (_, v), v_pool in zip(blocks if v_pools else (), v_pools, strict=True):
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
    if len(v_pools) not in (0, len(k_pools)):
        raise ValueError(f"{len(k_pools)} K pools, {len(v_pools)} V pools")
    if pick_impl(impl, arena) == "triton":
        _move_triton(arena, plan, k_pools, v_pools)
        return
    start = 0
    for n, blocks in _blocks(arena, plan, k_pools, v_pools):
        slots = plan.slots[start : start + n]
        for parts, pools in zip(blocks, _per_layer(k_pools, v_pools), strict=True):
            for part, pool in zip(parts, pools, strict=True):
                part.copy_(pool[slots])
        start += n


# ---------------------------------------------------------------- torch reference


def _per_layer(k_pools: Sequence[Tensor], v_pools: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """(K pool, V pool) of every layer, or (K pool,)."""
    return list(zip(k_pools, v_pools, strict=True)) if v_pools else [(k,) for k in k_pools]


def _blocks(
    arena: Tensor, plan: InteriorPlan, k_pools: Sequence[Tensor], v_pools: Sequence[Tensor]
) -> list[tuple[int, list[tuple[Tensor, ...]]]]:
    """Per segment: n, and per layer the blob's K and V (if there is one) as views of the arena."""
    out = []
    for offset, n in zip(plan.lists.blob_kv, plan.lists.counts, strict=True):
        layers = []
        for pools in _per_layer(k_pools, v_pools):
            parts = []
            for pool in pools:
                block = blob_view(arena, offset, (n, *pool.shape[1:]), pool.dtype)
                offset += block.numel() * block.element_size()
                parts.append(block)
            layers.append(tuple(parts))
        out.append((n, layers))
    return out


def rotate(
    k: Tensor, local: int, shift: int, table: Tensor, rotary_dim: int, is_neox: bool, scale: float, first_dim: int = 0
) -> Tensor:
    """K [n, H, D] at positions local, local + 1, ... -> K moved by shift. Arguments as in :func:`relocate_interiors`."""
    if shift == 0:
        return k
    (cos0, sin0), (cos1, sin1) = (
        (table[at : at + len(k), None].float() / scale).chunk(2, -1) for at in (local, local + shift)
    )
    cos, sin = cos1 * cos0 + sin1 * sin0, sin1 * cos0 - cos1 * sin0
    before, x, behind = k.split([first_dim, rotary_dim, k.shape[-1] - first_dim - rotary_dim], -1)
    x = x.float()
    if is_neox:
        x1, x2 = x.chunk(2, -1)
        y = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    else:
        x1, x2 = x[..., ::2], x[..., 1::2]
        y = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2)
    return torch.cat([before, y.to(k.dtype), behind], -1)


# ---------------------------------------------------------------- Triton


@lru_cache(maxsize=64)
def _distances(pointers: tuple[int, ...], item_bytes: int, device: torch.device) -> Tensor:
    """Elements from the first pointer to each, int64 on the device; built once: it is a function of its key alone.

    Kernels add these to a typed base pointer: unlike an address from memory it is known to be aligned.
    """
    return torch.tensor([(p - pointers[0]) // item_bytes for p in pointers], dtype=torch.int64, device=device)


def _uniform(name: str, pools: Sequence[Tensor]) -> Tensor:
    """The first of the pools, after checking that one launch can serve all of them."""
    first = pools[0]
    if any((p.shape, p.stride(), p.dtype) != (first.shape, first.stride(), first.dtype) for p in pools):
        raise ValueError(f"{name} differ in shape, strides or type between layers; use impl='torch'")
    return first


def _move_triton(
    arena: Tensor,
    plan: InteriorPlan,
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    tables: Sequence[Tensor] = (),
    rotary_dim: int = 0,
    first_dim: int = 0,
    is_neox: bool = True,
    scale: float = 1.0,
    into_slots: bool = False,
) -> None:
    """Blobs to slots, with a rotation if ``tables`` are given; or slots to blobs."""
    require_triton(arena)
    if plan.total == 0 or not k_pools:
        return
    k, v = _uniform("k_pools", k_pools), _uniform("v_pools", v_pools) if v_pools else k_pools[0][..., :0]
    parts = [k, v][: 1 + bool(v_pools)]
    if k.dtype != v.dtype or any(p.stride()[1:] != (p.shape[2], 1) for p in parts):
        raise ValueError(f"slots of k_pools {k.stride()} and v_pools {v.stride()} must be contiguous, of one type")
    table = _uniform("cos_sin", tables) if tables else None
    if table is not None and (table.stride() != (rotary_dim, 1)):
        raise ValueError(f"cos_sin {tuple(table.shape)} must be contiguous with {rotary_dim} columns")
    item, heads, width = k.element_size(), k.shape[1], block(max(k.shape[2], v.shape[2]))
    tokens = max(1, min(16, 4096 // width))
    pools = tuple(p.data_ptr() for pair in _per_layer(k_pools, v_pools) for p in pair)
    rotary = list(tables or [k])
    vector = gcd(BLOB_ALIGN // item, k.shape[2], v.shape[2], k.stride(0), v.stride(0), *(p // item for p in pools))
    _move_kernel[(-(-plan.total // tokens), len(pools), heads)](
        arena,
        k,
        rotary[0],
        _distances(pools, item, arena.device),
        _distances(tuple(t.data_ptr() for t in rotary), rotary[0].element_size(), arena.device),
        plan.blob_kv,
        plan.count,
        plan.local,
        plan.shift,
        plan.slots,
        plan.cu,
        plan.tok_seg,
        plan.total,
        k.stride(0),
        v.stride(0),
        1.0 / scale**2,
        H=heads,
        DK=k.shape[2],
        DV=v.shape[2],
        ITEM_BYTES=item,
        VECTOR=vector,
        INTO_SLOTS=into_slots,
        ROTARY=rotary_dim if tables else 0,
        FIRST=first_dim,
        PARTS=len(parts),
        NEOX=is_neox,
        BM=tokens,
        BD=width,
        num_warps=4,
    )


@jit_counts("total")
def _move_kernel(
    arena,
    first_pool,
    first_table,
    pools,
    tables,
    blob_kv,
    counts,
    first_local,
    shifts,
    slots,
    cu,
    tok_seg,
    total,
    k_stride,
    v_stride,
    inv_scale2,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    INTO_SLOTS: tl.constexpr,
    ROTARY: tl.constexpr,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    NEOX: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    """One program: BM tokens of one head of K or V of one layer."""
    layer, is_v, head = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS == 1, tl.program_id(2)
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)
    ok_m = m < total
    dim = tl.where(is_v, DV, DK)
    ok = ok_m[:, None] & (d < dim)[None, :]
    seg = tl.load(tok_seg + m, mask=ok_m, other=0)
    n = tl.load(counts + seg, mask=ok_m, other=0)
    local = m - tl.load(cu + seg, mask=ok_m, other=0)
    block_at = tl.load(blob_kv + seg, mask=ok_m, other=0) // ITEM_BYTES + n * (
        layer * H * (DK + DV) + tl.where(is_v, H * DK, 0)
    )
    block_at = tl.multiple_of(block_at + local * H * dim + head * dim, VECTOR)
    element: tl.constexpr = first_pool.dtype.element_ty
    in_blob = arena.to(tl.pointer_type(element)) + block_at[:, None]
    slot = tl.load(slots + m, mask=ok_m, other=0)
    pool = tl.load(pools + tl.program_id(1))
    slot_at = tl.multiple_of(pool + slot * tl.where(is_v, v_stride, k_stride) + head * dim, VECTOR)
    in_pool = first_pool + slot_at[:, None] + d[None, :]

    if INTO_SLOTS:
        values = tl.load(in_blob + d[None, :], mask=ok, other=0.0)
        if ROTARY > 0:  # noqa: SIM102 (the first condition is the compiler's, the second the program's)
            if not is_v:
                half: tl.constexpr = ROTARY // 2
                r = d - FIRST
                if NEOX:
                    is_first = r < half
                    partner, frequency = tl.where(is_first, d + half, d - half), r % half
                else:
                    is_first = r % 2 == 0
                    partner, frequency = FIRST + (r ^ 1), r // 2
                shift = tl.load(shifts + seg, mask=ok_m, other=0)
                rotates = ok & ((r >= 0) & (r < ROTARY))[None, :] & (shift != 0)[:, None]
                origin = tl.load(first_local + seg, mask=ok_m, other=0) + local
                old = first_table + tl.load(tables + layer) + origin[:, None] * ROTARY + frequency[None, :]
                new = old + shift[:, None] * ROTARY
                cos0 = tl.load(old, mask=rotates, other=0.0).to(tl.float32)
                sin0 = tl.load(old + half, mask=rotates, other=0.0).to(tl.float32)
                cos1 = tl.load(new, mask=rotates, other=0.0).to(tl.float32)
                sin1 = tl.load(new + half, mask=rotates, other=0.0).to(tl.float32)
                cos = (cos1 * cos0 + sin1 * sin0) * inv_scale2
                sin = (sin1 * cos0 - cos1 * sin0) * inv_scale2
                sin = tl.where(is_first[None, :], -sin, sin)
                other = tl.load(in_blob + partner[None, :], mask=rotates, other=0.0).to(tl.float32)
                turned = values.to(tl.float32) * cos + other * sin
                values = tl.where(rotates, turned.to(element), values)
        tl.store(in_pool, values, mask=ok)
    else:
        tl.store(in_blob + d[None, :], tl.load(in_pool, mask=ok, other=0.0), mask=ok)
