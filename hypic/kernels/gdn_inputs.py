"""From the projected batch to the inputs of the gated delta rule: causal conv, SiLU, l2norm, gates; for seam chains.

Gated DeltaNet decays a head by one gate, Kimi delta attention (KDA) each key channel of it by its own; the rest is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.kernels._triton import block, constexpr, jit, jit_counts, require_triton, tl
from hypic.kernels.chain_plans import Runs
from hypic.kernels.conv_runs import check_conv, convolve_tile

L2_EPS = 1e-6
_L2_EPS = constexpr(L2_EPS)


class GdnLayer(NamedTuple):
    """The parameters of one GDN layer that its inputs need, D = 2 HK K + HV V channels laid out [q | k | v].

    Attributes:
        conv_weight: [D, W]. conv_bias: [D] or None. activation: "silu", "swish" or None.
        A_log: [HV]. dt_bias: [HV]; or, with a gate per channel (KDA), [HV, K].

    The projections that go with it: a, b [T, HV]; or, with a gate per channel, a [T, HV K], and b holds beta itself.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    activation: str | None
    A_log: Tensor
    dt_bias: Tensor
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    @property
    def dim(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def width(self) -> int:
        return self.conv_weight.shape[1]

    @property
    def channel_gates(self) -> bool:
        return self.dt_bias.dim() == 2

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Of the log decay of a token."""
        return tuple(self.dt_bias.shape)

    def check(self, x: Tensor, conv_pool: Tensor) -> None:
        """Raise ValueError if the shapes of the layer, the batch and the pool disagree, or channels are strided."""
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(f"{self.num_v_heads} value heads are no multiple of {self.num_k_heads} key heads")
        if self.conv_weight.shape[0] != self.dim:
            raise ValueError(f"conv_weight {tuple(self.conv_weight.shape)}: expected {self.dim} channels")
        check_conv(self.conv_weight, self.activation, x, conv_pool)
        if self.channel_gates and self.gate_shape != (self.num_v_heads, self.head_k_dim):
            raise ValueError(f"dt_bias {self.gate_shape} is not [{self.num_v_heads}, {self.head_k_dim}]")


# ---------------------------------------------------------------- torch reference


def conv_torch(layer: GdnLayer, taps: Sequence[Tensor], channels: slice = slice(None)) -> Tensor:
    """Causal convolution and activation of some channels.

    taps: for each of the W inputs under the kernel, oldest first, [n, channels] fp32.
    """
    weight = layer.conv_weight[channels].float()
    y = taps[0] * weight[:, 0]
    for j in range(1, layer.width):
        y = y + taps[j] * weight[:, j]
    if layer.conv_bias is not None:
        y = y + layer.conv_bias[channels].float()
    return F.silu(y) if layer.activation else y


def l2norm_torch(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def split_heads_torch(layer: GdnLayer, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, D] -> q [n, HK, K] normalised and scaled by K**-0.5, k [n, HK, K] normalised, v [n, HV, V]."""
    key_dim = layer.num_k_heads * layer.head_k_dim
    q, k, v = y.split([key_dim, key_dim, layer.num_v_heads * layer.head_v_dim], -1)
    heads = (y.shape[0], layer.num_k_heads, layer.head_k_dim)
    v = v.reshape(y.shape[0], layer.num_v_heads, layer.head_v_dim)
    return l2norm_torch(q.reshape(heads)) * layer.head_k_dim**-0.5, l2norm_torch(k.reshape(heads)), v


def gates_torch(layer: GdnLayer, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Projections a, b -> log decay g = -exp(A_log) softplus(a + dt_bias), [n, HV] or [n, HV, K], and beta, fp32."""
    rate = -layer.A_log.float().exp()
    if layer.channel_gates:
        a = a.unflatten(1, layer.gate_shape)
        return rate[:, None] * F.softplus(a.float() + layer.dt_bias.float()), b.float()
    return rate * F.softplus(a.float() + layer.dt_bias.float()), b.float().sigmoid()


# ---------------------------------------------------------------- Triton


def launch_inputs(
    layer: GdnLayer,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    conv_pool: Tensor,
    runs: Runs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    arena: Tensor,
    c_off: int,
) -> None:
    """One launch: q and k [M, HK, K], v [M, HV, V], g [M, HV] or [M, HV, K], beta [M, HV], all contiguous fp32.

    Grid: blocks of 16 tokens x heads (q, k, then v). For the few tokens of seams: every tap of the convolution looks up
    where it stands (see chain_plans). The many tokens of a compile go through gdn_keys.
    """
    require_triton(x)
    if runs.total == 0:
        return
    if a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError(f"a (strides {a.stride()}) and b ({b.stride()}) must be contiguous in their last dimension")
    hk, hv, tokens = layer.num_k_heads, layer.num_v_heads, 16
    heads = 2 * hk + hv
    _inputs_kernel[(-(-runs.total // tokens), heads)](
        x,
        a,
        b,
        layer.conv_weight,
        layer.conv_bias if layer.conv_bias is not None else layer.conv_weight,
        layer.A_log,
        layer.dt_bias,
        conv_pool,
        arena,
        runs.item_tok,
        runs.item_row,
        runs.item_win,
        runs.slot,
        runs.run_tok,
        runs.run_item,
        q,
        k,
        v,
        g,
        beta,
        runs.total,
        x.stride(0),
        a.stride(0),
        b.stride(0),
        layer.conv_weight.stride(0),
        conv_pool.stride(0),
        c_off // conv_pool.element_size(),
        HK=hk,
        HV=hv,
        DK=layer.head_k_dim,
        DV=layer.head_v_dim,
        W=layer.width,
        ITEM_BYTES=conv_pool.element_size(),
        HAS_BIAS=layer.conv_bias is not None,
        SILU=layer.activation is not None,
        BM=tokens,
        BD=block(max(layer.head_k_dim, layer.head_v_dim)),
        VECTOR=gcd(16, layer.head_k_dim, layer.head_v_dim),
        CHANNEL_GATES=layer.channel_gates,
        COLUMN=conv_pool.stride(2),
        num_warps=4,
    )


@jit
def unit_rows(y):
    return y * tl.rsqrt(tl.sum(y * y, 1) + _L2_EPS)[:, None]


@jit
def gate(a, dt_bias, A_log):
    """Log decay -exp(A_log) softplus(a + dt_bias) <= 0."""
    pre = a + dt_bias
    softplus = tl.where(pre > 20.0, pre, tl.log(1.0 + tl.exp(tl.minimum(pre, 20.0))))
    return -tl.exp(A_log) * softplus


@jit_counts("total")
def _inputs_kernel(
    x,
    a,
    b,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    conv_pool,
    arena,
    item_tok,
    item_row,
    item_win,
    slots,
    run_tok,
    run_item,
    q_out,
    k_out,
    v_out,
    g_out,
    beta_out,
    total,
    x_stride,
    a_stride,
    b_stride,
    weight_stride,
    pool_stride,
    c_off,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    W: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    VECTOR: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    COLUMN: tl.constexpr,
):
    """One program: BM run tokens of one head; q and k heads are normalised, value heads also give g and beta."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1)
    is_value = head >= 2 * HK
    dim = tl.where(is_value, DV, DK)
    first = tl.multiple_of(tl.where(is_value, 2 * HK * DK + (head - 2 * HK) * DV, head * DK), VECTOR)
    d = tl.arange(0, BD)
    ok_m, ok_d = m < total, d < dim
    ok = ok_m[:, None] & ok_d[None, :]
    channels = first + d

    token = tl.load(run_tok + m, mask=ok_m, other=0)
    y = convolve_tile(
        x, conv_weight, conv_bias, conv_pool, arena, item_tok, item_row, item_win, slots, run_tok, run_item, m, channels,
        ok_m, ok_d, x_stride, weight_stride, pool_stride, c_off, W, ITEM_BYTES, HAS_BIAS, SILU, BM, BD, COLUMN,
    )  # fmt: skip

    if is_value:
        hv = head - 2 * HK
        tl.store(v_out + (m[:, None] * HV + hv) * DV + d[None, :], y, mask=ok)
        beta = tl.load(b + token * b_stride + hv, mask=ok_m, other=0.0).to(tl.float32)
        rate = tl.load(A_log + hv).to(tl.float32)
        if CHANNEL_GATES:
            ok_k = d < DK
            ok_g = ok_m[:, None] & ok_k[None, :]
            pre = tl.load(a + token[:, None] * a_stride + hv * DK + d[None, :], mask=ok_g, other=0.0).to(tl.float32)
            bias = tl.load(dt_bias + hv * DK + d, mask=ok_k, other=0.0).to(tl.float32)
            tl.store(g_out + (m[:, None] * HV + hv) * DK + d[None, :], gate(pre, bias[None, :], rate), mask=ok_g)
        else:
            pre = tl.load(a + token * a_stride + hv, mask=ok_m, other=0.0).to(tl.float32)
            tl.store(g_out + m * HV + hv, gate(pre, tl.load(dt_bias + hv).to(tl.float32), rate), mask=ok_m)
            beta = tl.sigmoid(beta)
        tl.store(beta_out + m * HV + hv, beta, mask=ok_m)
    else:
        y = tl.where(ok, y, 0.0)
        y = unit_rows(y)
        if head < HK:
            tl.store(q_out + (m[:, None] * HK + head) * DK + d[None, :], y * (DK**-0.5), mask=ok)
        else:
            tl.store(k_out + (m[:, None] * HK + head - HK) * DK + d[None, :], y, mask=ok)
