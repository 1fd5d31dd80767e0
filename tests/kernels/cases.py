"""Random layers and batches, and the float64 truth of every GDN operation, token by token."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hypic.algebra import naive
from hypic.kernels._common import blob_view
from hypic.kernels.gdn_chain import ChainItem, ChainPlan
from hypic.kernels.operators import operator_bytes, read_operator, write_operator

NAN_BYTE = 0xFF  # a float of any type made of these bytes is a NaN
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BF16 = 2**-8
"""How much one rounding to bf16 may change a number, relative to it."""


@dataclass(frozen=True)
class Target:
    """An implementation and where it runs. ``dots``: options for full fp32 precision, where a kernel takes them."""

    impl: Literal["torch", "triton"]
    device: str

    @property
    def dots(self) -> dict[str, Any]:
        return {"impl": self.impl, "precision": "ieee"}

    def __str__(self) -> str:
        return f"{self.impl}-{self.device}"


def _targets() -> list[Target]:
    if INTERPRETED:
        return [Target("triton", "cpu")]
    return [Target("torch", "cpu")] + [Target("triton", "cuda")] * torch.cuda.is_available()


TARGETS = _targets()


def stand_in(target: Target) -> Target:
    """What runs in place of SGLang's kernels: the implementation that is tested, or torch where that takes seconds a token."""
    return Target("torch", target.device) if INTERPRETED else target


def sizes(every: list[Any], interpreted: list[Any]) -> list[Any]:
    return interpreted if INTERPRETED else every


@dataclass(frozen=True)
class Heads:
    """Shape of a GDN layer. Deliberately d_k != d_v, grouped heads and sizes that are no powers of two.

    ``channels``: a KDA layer instead, with a gate per key channel, windows as [W-1, D], and beta as it is.
    """

    hk: int = 2
    hv: int = 4
    dk: int = 16
    dv: int = 24
    width: int = 4
    channels: bool = False

    @property
    def dim(self) -> int:
        return 2 * self.hk * self.dk + self.hv * self.dv

    @property
    def gates(self) -> tuple[int, ...]:
        return (self.hv, self.dk) if self.channels else (self.hv,)

    def __str__(self) -> str:
        return f"hk{self.hk}-hv{self.hv}-dk{self.dk}-dv{self.dv}-w{self.width}" + "-kda" * self.channels


INT8 = 1 / 254
"""How far an entry beside the diagonal may be off in int8, relative to its row's largest there."""

KDA = Heads(2, 2, 16, 24, channels=True)


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
    operator_dtype: torch.dtype | None = None
    """Of T, None: state_dtype."""
    bias: bool = True
    device: str = "cpu"
    rng: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        h, self.rng = self.heads, torch.Generator().manual_seed(self.seed)
        self.x = self.randn(self.tokens, h.dim)
        self.a, self.b = self.randn(self.tokens, math.prod(h.gates)), self.randn(self.tokens, h.hv)
        if h.channels:
            self.b = self.b.sigmoid()
        self.layer = {
            "conv_weight": self.randn(h.dim, h.width),
            "conv_bias": self.randn(h.dim) if self.bias else None,
            "activation": "silu",
            "A_log": self.randn(h.hv) - 1.5,
            "dt_bias": self.randn(*h.gates),
            "num_k_heads": h.hk,
            "num_v_heads": h.hv,
            "head_k_dim": h.dk,
            "head_v_dim": h.dv,
        }
        window = (h.width - 1, h.dim) if h.channels else (h.dim, h.width - 1)
        self.conv_pool = torch.full((self.slots, *window), float("nan"), dtype=self.pool_dtype)
        self.ssm_pool = torch.full((self.slots, h.hv, h.dv, h.dk), float("nan"), dtype=self.pool_dtype)
        state = self.state_dtype.itemsize
        self.t_dtype = self.operator_dtype or self.state_dtype
        self.t_bytes, s_bytes = operator_bytes(h.hv, h.dk, self.t_dtype), h.hv * h.dv * h.dk * state
        self.t_off, self.s_off = 64, 64 + -(-self.t_bytes // 16) * 16 + 16
        self.c_off = self.s_off + -(-s_bytes // 16) * 16 + 16
        c_bytes = h.dim * (h.width - 1) * self.pool_dtype.itemsize
        self.stride = -(-(self.c_off + c_bytes) // 64) * 64 + 64
        self.arena = torch.full((self.blobs * self.stride,), NAN_BYTE, dtype=torch.uint8)
        for name in ("x", "a", "b", "conv_pool", "ssm_pool", "arena"):
            setattr(self, name, getattr(self, name).to(self.device))
        if h.channels:
            self.conv_pool = self.conv_pool.mT
        self.layer = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in self.layer.items()}

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def t(self, blob: int) -> Tensor:
        """A copy in fp32."""
        h = self.heads
        return read_operator(self.arena, blob * self.stride + self.t_off, h.hv, h.dk, self.t_dtype)

    def erase_t(self, blob: int) -> None:
        """As it was before anything was written there."""
        self.arena[blob * self.stride + self.t_off :][: self.t_bytes] = NAN_BYTE

    def t_view(self, blob: int) -> Tensor:
        h = self.heads
        return blob_view(self.arena, blob * self.stride + self.t_off, (h.hv, h.dk, h.dk), self.state_dtype)

    def s_view(self, blob: int) -> Tensor:
        h = self.heads
        return blob_view(self.arena, blob * self.stride + self.s_off, (h.hv, h.dv, h.dk), self.state_dtype)

    def c_view(self, blob: int) -> Tensor:
        h, at = self.heads, blob * self.stride + self.c_off
        if h.channels:
            return blob_view(self.arena, at, (h.width - 1, h.dim), self.pool_dtype).mT
        return blob_view(self.arena, at, (h.dim, h.width - 1), self.pool_dtype)

    def fill_slot(self, slot: int) -> None:
        self.conv_pool[slot] = self.randn(*self.conv_pool.shape[1:]).to(self.pool_dtype)
        self.ssm_pool[slot] = self.randn(*self.ssm_pool.shape[1:]).to(self.pool_dtype)

    def fill_artifact(self, blob: int, own: int) -> None:
        """A random artifact with an asymmetric T; columns of the tail that are not its own stay NaN."""
        h = self.heads
        t = (self.randn(h.hv, h.dk, h.dk) * (0.6 / h.dk**0.5)).to(self.device)
        write_operator(t, self.arena, blob * self.stride + self.t_off, self.t_dtype)
        self.s_view(blob).copy_(self.randn(h.hv, h.dv, h.dk))
        if own:
            self.c_view(blob)[:, -own:] = self.randn(h.dim, own).to(self.pool_dtype)

    # ------------------------------------------------------------ the truth, float64

    def token_inputs(self, window: Tensor, token: int) -> tuple[list[Tensor], Tensor]:
        """q, k, v, g, beta of one token ([1, HV, .]) after ``window`` [D, W-1], and the window after it."""
        h, p = self.heads, {k: v.cpu().double() if isinstance(v, Tensor) else v for k, v in self.layer.items()}
        full = torch.cat([window, self.x[token].cpu().double()[:, None]], 1)
        y = (full * p["conv_weight"]).sum(1) + (p["conv_bias"] if self.bias else 0)
        y = y * torch.sigmoid(y)
        q, k, v = y.split([h.hk * h.dk, h.hk * h.dk, h.hv * h.dv])
        group = h.hv // h.hk
        q, k = (t.view(h.hk, h.dk).repeat_interleave(group, 0) for t in (q, k))
        q, k = (t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
        a, beta = self.a[token].cpu().double().view(h.gates), self.b[token].cpu().double()
        rate = p["A_log"].exp()
        g = -(rate[:, None] if h.channels else rate) * torch.log1p((a + p["dt_bias"]).exp())
        beta = beta if h.channels else 1 / (1 + (-beta).exp())
        return [t[None] for t in (q * h.dk**-0.5, k, v.view(h.hv, h.dv), g, beta)], full[:, 1:]

    def chain_truth(
        self, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(out [T, HV, V], conv_pool, ssm_pool) after the chain, what is not written unchanged; float64."""
        h = self.heads
        conv, ssm = self.conv_pool.cpu().double(), self.ssm_pool.cpu().double()
        out = torch.full((self.tokens, h.hv, h.dv), float("nan"), dtype=torch.float64)
        for row, s, new in zip(rows, slot, fresh, strict=True):
            state = torch.zeros_like(ssm[s]) if new else ssm[s]
            window = torch.zeros_like(conv[s]) if new else conv[s]
            for item in row:
                for t in range(item.tok, item.tok + item.length):
                    inputs, window = self.token_inputs(window, t)
                    rule = naive.kimi_delta if h.channels else naive.gated_delta_net
                    o, state = rule(*inputs, state)
                    out[t] = o[0]
                if item.art >= 0:
                    blob = item.art // self.stride
                    state = state @ self.t(blob).cpu().double() + self.s_view(blob).cpu().double()
                    own = self.c_view(blob).cpu().double()[:, h.width - 1 - item.own :]
                    window = torch.cat([window, own], 1)[:, item.own :]
            conv[s], ssm[s] = window, state
        return out, conv, ssm

    def chain_plan(self, rows: list[list[ChainItem]], slot: list[int], fresh: list[bool]) -> ChainPlan:
        return ChainPlan.build(rows=rows, slot=slot, fresh=fresh, conv_width=self.heads.width, device=self.device)

    def chain_args(self, out: Tensor) -> dict[str, object]:
        return {
            **self.layer,
            "conv_pool": self.conv_pool,
            "ssm_pool": self.ssm_pool,
            "arena": self.arena,
            "t_off": self.t_off,
            "s_off": self.s_off,
            "c_off": self.c_off,
            "state_dtype": self.state_dtype,
            "operator_dtype": self.operator_dtype,
            "out": out,
        }


def assert_close(got: Tensor, want: Tensor, tol: float) -> None:
    """Same NaNs (what must stay untouched is NaN in both), and within ``tol`` of the truth relative to its scale."""
    got, want = got.cpu(), want.cpu()
    assert got.shape == want.shape
    torch.testing.assert_close(got.isnan(), want.isnan(), msg="NaNs where there should be none, or the reverse")
    error = (got.double() - want.double()).nan_to_num(0.0).abs().max().item() if want.numel() else 0.0
    scale = max(1.0, want.double().nan_to_num(0.0).abs().max().item()) if want.numel() else 1.0
    assert error <= tol * scale, f"error {error:.3g} at scale {scale:.3g}, tolerance {tol:.3g}"
