"""relocate_interiors and capture_interiors against a rotation in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cases import Target
from torch import Tensor

from hypic.kernels._common import blob_view
from hypic.kernels.relocate import InteriorPlan, capture_interiors, relocate_interiors

LAYERS, SLOTS, MAX_POS = 3, 200, 128


def angles(rotary_dim: int) -> Tensor:
    return 100.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)


def table(rotary_dim: int, scale: float) -> Tensor:
    """SGLang's cos_sin_cache, with an attention factor multiplied into it as yarn does."""
    phase = torch.arange(MAX_POS).double()[:, None] * angles(rotary_dim)
    return (torch.cat([phase.cos(), phase.sin()], -1) * scale).float()


def rotate_at(
    k: Tensor, positions: Tensor, rotary_dim: int, is_neox: bool, scale: float = 1.0, first: int = 0
) -> Tensor:
    """RoPE in float64 as complex numbers; k [n, H, D]."""
    k = k.double().clone()
    x = k[..., first : first + rotary_dim]
    x1, x2 = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
    phase = positions.double()[:, None, None] * angles(rotary_dim)
    z = torch.complex(x1, x2) * torch.polar(torch.full_like(phase, scale), phase)
    y = torch.cat([z.real, z.imag], -1) if is_neox else torch.stack([z.real, z.imag], -1).flatten(-2)
    return torch.cat([k[..., :first], y, k[..., first + rotary_dim :]], -1)


@dataclass(frozen=True)
class Rope:
    rotary_dim: int = 8
    is_neox: bool = True
    scale: float = 1.0
    heads: int = 2
    dk: int = 12
    dv: int = 6
    dtype: torch.dtype = torch.float32
    first: int = 0
    """With dv = 0 a row of latent attention: what stands before it does not rotate."""

    def __str__(self) -> str:
        style = "neox" if self.is_neox else "gptj"
        return f"{style}-rot{self.first}+{self.rotary_dim}-dk{self.dk}-dv{self.dv}-x{self.scale}-{str(self.dtype)[6:]}"


class Pools:
    def __init__(self, rope: Rope, counts: list[int], target: Target, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.rope, self.counts, self.target = rope, counts, target
        self.k = [torch.full((SLOTS, rope.heads, rope.dk), float("nan"), dtype=rope.dtype) for _ in range(LAYERS)]
        self.v = [torch.full((SLOTS, rope.heads, rope.dv), float("nan"), dtype=rope.dtype) for _ in range(LAYERS)]
        per_token = LAYERS * rope.heads * (rope.dk + rope.dv) * rope.dtype.itemsize
        self.blob_kv, end = [], 128
        for n in counts:
            self.blob_kv.append(end)
            end += -(-n * per_token // 16) * 16 + 32
        self.arena = torch.full((end + 64,), 0xFF, dtype=torch.uint8)
        self.slots = torch.randperm(SLOTS, generator=rng)[: sum(counts)].tolist()
        self.rng = rng
        self.k, self.v = ([p.to(target.device) for p in pools] for pools in (self.k, self.v))
        self.arena = self.arena.to(target.device)

    def plan(self, shift: list[int], local: list[int] | None = None) -> InteriorPlan:
        return InteriorPlan.build(
            blob_kv=self.blob_kv,
            count=self.counts,
            slots=self.slots,
            local=local,
            shift=shift,
            device=self.target.device,
        )

    def blocks(self, i: int) -> list[tuple[Tensor, Tensor]]:
        """K and V of segment i per layer, as views of the arena."""
        r, n, at, out = self.rope, self.counts[i], self.blob_kv[i], []
        for _ in range(LAYERS):
            k = blob_view(self.arena, at, (n, r.heads, r.dk), r.dtype)
            v = blob_view(self.arena, at + k.nbytes, (n, r.heads, r.dv), r.dtype)
            at += k.nbytes + v.nbytes
            out.append((k, v))
        return out

    def fill_blobs(self) -> None:
        for i in range(len(self.counts)):
            for k, v in self.blocks(i):
                k.copy_(torch.randn(k.shape, generator=self.rng).to(k.dtype))
                v.copy_(torch.randn(v.shape, generator=self.rng).to(v.dtype))

    def segment_slots(self, i: int) -> list[int]:
        start = sum(self.counts[:i])
        return self.slots[start : start + self.counts[i]]

    def relocate(
        self, shift: list[int], local: list[int] | None = None, cos_sin: Tensor | list[Tensor] | None = None
    ) -> None:
        r = self.rope
        relocate_interiors(
            self.arena,
            self.plan(shift, local),
            self.k,
            self.v if r.dv else [],
            cos_sin=cos_sin if cos_sin is not None else table(r.rotary_dim, r.scale).to(self.target.device),
            rotary_dim=r.rotary_dim,
            first_dim=r.first,
            is_neox=r.is_neox,
            scale=r.scale,
            impl=self.target.impl,
        )

    def capture(self) -> None:
        v_pools = self.v if self.rope.dv else []
        capture_interiors(self.arena, self.plan([0] * len(self.counts)), self.k, v_pools, impl=self.target.impl)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


ROPES = [
    Rope(),
    Rope(is_neox=False),
    Rope(rotary_dim=12, scale=1.3),
    Rope(is_neox=False, dk=8, dv=16, scale=0.7),
    Rope(dtype=torch.bfloat16, heads=1, dk=20),
    Rope(heads=1, dk=21, dv=0, first=13, is_neox=False),
    Rope(heads=1, dk=44, dv=0, first=32, rotary_dim=12, scale=1.3, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_relocated_keys_stand_at_their_new_positions(rope: Rope, target: Target) -> None:
    """K rotated at local positions, then relocated, equals K rotated at the final positions (factor applied once)."""
    shift, local, counts = [5, 0, 31, 17], [8, 3, 0, 8], [7, 65, 1, 0]
    pools = Pools(rope, counts, target)
    pools.fill_blobs()
    raw = []
    for i, n in enumerate(counts):
        raw.append([k.cpu().double().clone() for k, _ in pools.blocks(i)])
        for k, before in zip((k for k, _ in pools.blocks(i)), raw[i], strict=True):
            at = torch.arange(n) + local[i]
            k.copy_(rotate_at(before, at, rope.rotary_dim, rope.is_neox, rope.scale, rope.first).to(k.dtype))
    before = pools.arena.clone()
    pools.relocate(shift, local)
    tol = 2e-5 if rope.dtype == torch.float32 else 3e-2
    for i, n in enumerate(counts):
        slots = pools.segment_slots(i)
        for layer, (_, v) in enumerate(pools.blocks(i)):
            at = torch.arange(n) + local[i] + shift[i]
            want = rotate_at(raw[i][layer], at, rope.rotary_dim, rope.is_neox, rope.scale, rope.first)
            torch.testing.assert_close(pools.k[layer][slots].cpu().double(), want, atol=tol, rtol=tol)
            assert same_bits(pools.v[layer][slots], v)
    untouched = sorted(set(range(SLOTS)) - set(pools.slots))
    assert all(p[untouched].isnan().all() for p in pools.k + pools.v)
    assert torch.equal(pools.arena, before)


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_shift_zero_copies_bits(rope: Rope, target: Target) -> None:
    """Even NaN and infinity, and with an attention factor."""
    pools = Pools(rope, [9, 3], target)
    pools.fill_blobs()
    pools.blocks(0)[1][0][2, 0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    pools.relocate([0, 0])
    for i in range(2):
        for layer, (k, v) in enumerate(pools.blocks(i)):
            assert same_bits(pools.k[layer][pools.segment_slots(i)], k)
            assert same_bits(pools.v[layer][pools.segment_slots(i)], v)


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_shift_back_undoes_a_shift(rope: Rope, target: Target) -> None:
    pools = Pools(rope, [11], target)
    pools.fill_blobs()
    first = [k.clone() for k, _ in pools.blocks(0)]
    pools.relocate([13])
    pools.capture()
    pools.relocate([-13], [13])
    tol = 2e-5 if rope.dtype == torch.float32 else 3e-2
    for layer, k in enumerate(first):
        torch.testing.assert_close(pools.k[layer][pools.slots], k, atol=tol, rtol=tol)


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_capture_writes_the_block_and_nothing_else(rope: Rope, target: Target) -> None:
    counts = [7, 0, 64, 1]
    pools = Pools(rope, counts, target)
    for p in pools.k + pools.v:
        p[pools.slots] = torch.randn((len(pools.slots), *p.shape[1:]), generator=pools.rng).to(p)
    pools.capture()
    for i in range(len(counts)):
        for layer, (k, v) in enumerate(pools.blocks(i)):
            assert same_bits(pools.k[layer][pools.segment_slots(i)], k)
            assert same_bits(pools.v[layer][pools.segment_slots(i)], v)
            k.view(torch.uint8).fill_(0xFF)
            v.view(torch.uint8).fill_(0xFF)
    assert (pools.arena == 0xFF).all()


def test_the_rounding_of_a_table_far_out_cancels(target: Target) -> None:
    """SGLang's tables are cosines of float32 angles; near position 20,000 those are off by up to 1e-3."""
    rope, start, n = Rope(), 20_000, 7
    phase = torch.arange(start + n).float()[:, None] * angles(rope.rotary_dim).float()
    cos_sin = torch.cat([phase.cos(), phase.sin()], -1)
    pools = Pools(rope, [n], target)
    pools.fill_blobs()
    blocks = [k for k, _ in pools.blocks(0)]
    raw = [k.cpu().clone() for k in blocks]
    for k, before in zip(blocks, raw, strict=True):
        k.copy_(by_table(before, cos_sin[:n]))
    pools.relocate([start], cos_sin=cos_sin.to(target.device))
    for layer, before in enumerate(raw):
        want = by_table(before, cos_sin[start:])
        torch.testing.assert_close(pools.k[layer][pools.slots].cpu(), want, atol=2e-6, rtol=2e-6)


def by_table(k: Tensor, rows: Tensor) -> Tensor:
    """NeoX RoPE with given rows [n, rotary_dim] of a table; k [n, H, D]."""
    cos, sin = rows[:, None].chunk(2, -1)
    x1, x2 = k[..., : rows.shape[-1]].chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, k[..., rows.shape[-1] :]], -1)


def test_each_layer_may_have_its_own_table(target: Target) -> None:
    rope = Rope()
    pools = Pools(rope, [3], target)
    pools.fill_blobs()
    zero = torch.cat([torch.ones(MAX_POS, 4), torch.zeros(MAX_POS, 4)], -1).to(target.device)
    pools.relocate([5], cos_sin=[zero, table(8, 1.0).to(target.device), zero])
    moved = [not same_bits(pools.k[layer][pools.slots], k) for layer, (k, _) in enumerate(pools.blocks(0))]
    assert moved == [False, True, False]


def test_without_tables_a_move_is_a_copy(target: Target) -> None:
    """Models without RoPE: whatever the shift."""
    pools = Pools(Rope(dtype=torch.bfloat16), [9, 3], target)
    pools.fill_blobs()
    plan = pools.plan([5, 40])
    relocate_interiors(pools.arena, plan, pools.k, pools.v, cos_sin=None, impl=target.impl)
    for i in range(2):
        for layer, (k, v) in enumerate(pools.blocks(i)):
            assert same_bits(pools.k[layer][pools.segment_slots(i)], k)
            assert same_bits(pools.v[layer][pools.segment_slots(i)], v)
    untouched = sorted(set(range(SLOTS)) - set(pools.slots))
    assert all(p[untouched].isnan().all() for p in pools.k + pools.v)


def test_wrong_numbers_are_refused(target: Target) -> None:
    pools = Pools(Rope(), [3], target)
    with pytest.raises(ValueError, match="2 slots for 3"):
        InteriorPlan.build(blob_kv=[0], count=[3], slots=[1, 2], device="cpu")
    with pytest.raises(ValueError, match="multiples of 16"):
        InteriorPlan.build(blob_kv=[8], count=[1], slots=[1], device="cpu")
    with pytest.raises(ValueError, match="rotary tables"):
        pools.relocate([5], cos_sin=[table(8, 1.0)])
    with pytest.raises(ValueError, match="V pools"):
        capture_interiors(pools.arena, pools.plan([0]), pools.k, pools.v[:1])
