"""A random Mamba2 layer and batch, and the float64 truth of the chain, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cases import NAN_BYTE, Target
from torch import Tensor

from hypic.algebra import naive
from hypic.engine.families.base import Memory
from hypic.engine.families.mamba2 import MixerLayer
from hypic.kernels._common import blob_view
from hypic.kernels.chain_plans import ChainItem, ChainPlan
from hypic.kernels.mamba2_layer import Mamba2Layer


@dataclass(frozen=True)
class Heads:
    """Shape of a layer. Deliberately d_k != d_v, grouped heads and sizes that are no powers of two."""

    h: int = 4
    g: int = 2
    dv: int = 24
    dk: int = 16
    width: int = 4

    @property
    def dim(self) -> int:
        return self.h * self.dv + 2 * self.g * self.dk

    def __str__(self) -> str:
        return f"h{self.h}-g{self.g}-dv{self.dv}-dk{self.dk}-w{self.width}"


@dataclass
class Case:
    """One layer, one batch and the pools and arena around it; everything not written on purpose is NaN."""

    heads: Heads
    tokens: int
    slots: int = 5
    blobs: int = 4
    seed: int = 0
    pool_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    bias: bool = True
    device: str = "cpu"
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        h, self.rng = self.heads, torch.Generator().manual_seed(self.seed)
        # as a model's projection: gate, x B C and dt side by side, so that the latter two are strided views
        self.projected = self.randn(self.tokens, h.h * h.dv + h.dim + h.h)
        self.layer = Mamba2Layer(
            conv_weight=self.randn(h.dim, h.width),
            conv_bias=self.randn(h.dim) if self.bias else None,
            activation="silu",
            A=-(self.randn(h.h) - 1.5).exp(),
            dt_bias=self.randn(h.h),
            skip=self.randn(h.h),
            heads=h.h,
            groups=h.g,
            d_v=h.dv,
            d_k=h.dk,
        )
        self.conv_pool = torch.full((self.slots, h.dim, h.width - 1), float("nan"), dtype=self.pool_dtype)
        self.ssm_pool = torch.full((self.slots, h.h, h.dv, h.dk), float("nan"), dtype=self.pool_dtype)
        self.t_off, self.s_off = 64, 64 + -(-h.h * 4 // 16) * 16
        self.c_off = self.s_off + -(-h.h * h.dv * h.dk * self.state_dtype.itemsize // 16) * 16 + 16
        c_bytes = h.dim * (h.width - 1) * self.pool_dtype.itemsize
        self.stride = -(-(self.c_off + c_bytes) // 64) * 64 + 64
        self.arena = torch.full((self.blobs * self.stride,), NAN_BYTE, dtype=torch.uint8)
        for name in ("projected", "conv_pool", "ssm_pool", "arena"):
            setattr(self, name, getattr(self, name).to(self.device))
        self.layer = Mamba2Layer(*(v.to(self.device) if isinstance(v, Tensor) else v for v in self.layer))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    @property
    def x(self) -> Tensor:
        return self.projected[:, self.heads.h * self.heads.dv : -self.heads.h]

    @property
    def dt(self) -> Tensor:
        return self.projected[:, -self.heads.h :]

    def t_view(self, blob: int) -> Tensor:
        return blob_view(self.arena, blob * self.stride + self.t_off, (self.heads.h,), torch.float32)

    def s_view(self, blob: int) -> Tensor:
        h = self.heads
        return blob_view(self.arena, blob * self.stride + self.s_off, (h.h, h.dv, h.dk), self.state_dtype)

    def c_view(self, blob: int) -> Tensor:
        h = self.heads
        return blob_view(self.arena, blob * self.stride + self.c_off, (h.dim, h.width - 1), self.pool_dtype)

    def fill_slot(self, slot: int) -> None:
        self.conv_pool[slot] = self.randn(*self.conv_pool.shape[1:]).to(self.pool_dtype)
        self.ssm_pool[slot] = self.randn(*self.ssm_pool.shape[1:]).to(self.pool_dtype)

    def fill_artifact(self, blob: int, own: int) -> None:
        """Decays from hardly any to all but gone; columns of the tail that are not the artifact's own stay NaN."""
        h = self.heads
        self.t_view(blob).copy_(-(self.randn(h.h) * 2).exp())
        self.s_view(blob).copy_(self.randn(h.h, h.dv, h.dk))
        if own:
            self.c_view(blob)[:, -own:] = self.randn(h.dim, own).to(self.pool_dtype)

    def memory(self) -> Memory:
        return Memory(
            self.conv_pool, self.ssm_pool, self.arena, self.t_off, self.s_off, self.c_off, self.state_dtype, "ieee"
        )

    def chain(self, target: Target, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool]) -> Tensor:
        """Through the family's layer, as the engine calls it: out [T, H, V]."""
        h = self.heads
        plan = ChainPlan.build(rows=rows, slot=slot, fresh=fresh, conv_width=h.width, device=self.device)
        out = torch.full((self.tokens, h.h, h.dv), float("nan"), dtype=self.projected.dtype, device=self.device)
        MixerLayer(self.layer, target.impl).chain((self.projected,), self.memory(), plan, out)
        return out

    # ------------------------------------------------------------ the truth, float64

    def truth(self, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """(out [T, H, V], conv_pool, ssm_pool) after the chain, what is not written unchanged; float64."""
        h = self.heads
        conv, ssm = self.conv_pool.cpu().double(), self.ssm_pool.cpu().double()
        out = torch.full((self.tokens, h.h, h.dv), float("nan"), dtype=torch.float64)
        for row, s, new in zip(rows, slot, fresh, strict=True):
            state = torch.zeros_like(ssm[s]) if new else ssm[s]
            window = torch.zeros_like(conv[s]) if new else conv[s]
            for item in row:
                for t in range(item.tok, item.tok + item.length):
                    out[t], state, window = self._token(window, t, state)
                if item.art >= 0:
                    blob = item.art // self.stride
                    decay = self.t_view(blob).cpu().double().exp()
                    state = decay[:, None, None] * state + self.s_view(blob).cpu().double()
                    own = self.c_view(blob).cpu().double()[:, h.width - 1 - item.own :]
                    window = torch.cat([window, own], 1)[:, item.own :]
            conv[s], ssm[s] = window, state
        return out, conv, ssm

    def _token(self, window: Tensor, t: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.heads
        p = Mamba2Layer(*(v.cpu().double() if isinstance(v, Tensor) else v for v in self.layer))
        full = torch.cat([window, self.x[t].cpu().double()[:, None]], 1)
        y = (full * p.conv_weight).sum(1) + (p.conv_bias if p.conv_bias is not None else 0)
        y = y * torch.sigmoid(y)
        x, b, c = y.split([h.h * h.dv, h.g * h.dk, h.g * h.dk])
        b, c = (z.view(h.g, h.dk).repeat_interleave(h.h // h.g, 0)[None] for z in (b, c))
        step = torch.log1p((self.dt[t].cpu().double() + p.dt_bias).exp())
        x = x.view(h.h, h.dv)
        o, state = naive.mamba2(c, b, x[None], step[None], p.A, state)
        return o[0] + p.skip[:, None] * x, state, full[:, 1:]
