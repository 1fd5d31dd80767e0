"""A random Lightning layer and batch, and the float64 truth of the chain, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cases import NAN_BYTE, Target
from torch import Tensor

from hypic.algebra import naive
from hypic.engine.families.base import Memory
from hypic.engine.families.lightning import RotatedLayer
from hypic.kernels._common import blob_view
from hypic.kernels.chain_plans import ChainItem, ChainPlan
from hypic.kernels.lightning_chain import KeyRotation, LightningLayer

POSITIONS = 1024


@dataclass(frozen=True)
class Heads:
    """Shape of a layer. Deliberately d_k != d_v where nothing needs states as SGLang has them; ``rotary`` 0: no RoPE."""

    h: int = 3
    dk: int = 24
    dv: int = 40
    rotary: int = 12

    def __str__(self) -> str:
        return f"h{self.h}-dk{self.dk}-dv{self.dv}-r{self.rotary}"


def angles(heads: Heads, positions: Tensor) -> Tensor:
    """float64 [n, rotary / 2]."""
    exponents = torch.arange(0, heads.rotary, 2).double() / max(heads.rotary, 1)
    return positions.double()[:, None] * 1000.0**-exponents


def rotate(heads: Heads, x: Tensor, positions: Tensor, scale: float = 1.0) -> Tensor:
    """x [n, ..., K] at positions [n], as pairs of complex numbers; float64."""
    half = heads.rotary // 2
    turn = torch.polar(torch.full((1,), scale).double(), angles(heads, positions))
    z = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    z = z * turn.view(len(x), *[1] * (x.dim() - 2), half)
    return torch.cat([z.real, z.imag, x[..., 2 * half :].double()], -1)


@dataclass
class Case:
    """One layer, one batch and the pool and arena around it; everything not written on purpose is NaN.

    ``scale``: of the rotary table, as yarn has it.
    """

    heads: Heads
    tokens: int
    slots: int = 5
    blobs: int = 4
    seed: int = 0
    pool_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    scale: float = 1.0
    device: str = "cpu"
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        h, self.rng = self.heads, torch.Generator().manual_seed(self.seed)
        # as the model's: q and k from the rotary embedding, v a strided view of the projection
        self.q, self.k = self.randn(self.tokens, h.h, h.dk), self.randn(self.tokens, h.h, h.dk)
        self.v = self.randn(self.tokens, h.h * (2 * h.dk + h.dv))[:, -h.h * h.dv :].view(-1, h.h, h.dv)
        rotation = None
        if h.rotary:
            a = angles(h, torch.arange(POSITIONS))
            table = (torch.cat([a.cos(), a.sin()], -1) * self.scale).float().to(self.device)
            rotation = KeyRotation(table, h.rotary, self.scale)
        slope = (2.0 ** -(8.0 * torch.arange(1, h.h + 1) / h.h)).to(self.device)
        self.layer = LightningLayer(slope, 0.3, rotation)
        self.pool = torch.full((self.slots, h.h, h.dk, h.dv), float("nan"), dtype=self.pool_dtype)
        self.t_off, self.s_off = 64, 64 + -(-h.h * 4 // 16) * 16
        s_bytes = h.h * h.dv * h.dk * self.state_dtype.itemsize
        self.stride = -(-(self.s_off + s_bytes) // 64) * 64 + 64
        self.arena = torch.full((self.blobs * self.stride,), NAN_BYTE, dtype=torch.uint8)
        for name in ("q", "k", "v", "pool", "arena"):
            setattr(self, name, getattr(self, name).to(self.device))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def t_view(self, blob: int) -> Tensor:
        return blob_view(self.arena, blob * self.stride + self.t_off, (self.heads.h,), torch.float32)

    def s_view(self, blob: int) -> Tensor:
        h = self.heads
        return blob_view(self.arena, blob * self.stride + self.s_off, (h.h, h.dk, h.dv), self.state_dtype)

    def fill_slot(self, slot: int) -> None:
        self.pool[slot] = self.randn(*self.pool.shape[1:]).to(self.pool_dtype)

    def fill_artifact(self, blob: int) -> None:
        self.t_view(blob).copy_(-(self.randn(self.heads.h) * 2).exp())
        self.s_view(blob).copy_(self.randn(*self.s_view(blob).shape))

    def memory(self) -> Memory:
        return Memory(None, self.pool, self.arena, self.t_off, self.s_off, 0, self.state_dtype, "ieee")

    def bound(self, target: Target) -> RotatedLayer:
        return RotatedLayer(self.layer, self.heads.dk, target.impl)

    def chain(
        self, target: Target, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool], dtype: torch.dtype
    ) -> Tensor:
        """Through the family's layer, as the engine calls it: out [T, H, V]."""
        plan = ChainPlan.build(rows=rows, slot=slot, fresh=fresh, conv_width=1, device=self.device)
        out = torch.full((self.tokens, self.heads.h, self.heads.dv), float("nan"), dtype=dtype, device=self.device)
        self.bound(target).chain((self.q, self.k, self.v), self.memory(), plan, out)
        return out

    def truth(self, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool]) -> tuple[Tensor, Tensor]:
        """(out [T, H, V], pool) after the chain, what is not written unchanged; float64."""
        h, pool = self.heads, self.pool.cpu().double()
        out = torch.full((self.tokens, h.h, h.dv), float("nan"), dtype=torch.float64)
        q, k, v = (x.cpu().double() for x in (self.q, self.k, self.v))
        for row, s, new in zip(rows, slot, fresh, strict=True):
            state = (torch.zeros_like(pool[s]) if new else pool[s]).mT  # as naive has it
            for item in row:
                t = slice(item.tok, item.tok + item.length)
                out[t], state = naive.retention(q[t] * self.layer.scale, k[t], v[t], -self.layer.slope.cpu(), state)
                if item.art >= 0:
                    blob = item.art // self.stride
                    keys = rotate(h, self.s_view(blob).cpu().double().mT[None], torch.tensor([item.shift]))[0]
                    state = self.t_view(blob).cpu().double().exp()[:, None, None] * state + keys
            pool[s] = state.mT
        return out, pool
