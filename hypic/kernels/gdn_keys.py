"""Keys and gates of the interiors that a batch compiles: causal conv, SiLU, l2norm, without queries and values."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from hypic.kernels._common import Impl, pick_impl
from hypic.kernels._triton import block, jit, require_triton, tl
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.conv_runs import in_window
from hypic.kernels.gdn_inputs import GdnLayer, conv_torch, gate, gates_torch, l2norm_torch, unit_rows
from hypic.kernels.wy import CHUNK

__all__ = ["Keys", "TransitionPlan", "gdn_keys"]


class Keys(NamedTuple):
    """What T is a function of, the rows of all interiors concatenated (M = ``plan.total``).

    Attributes:
        k: [M, HK, K], l2-normalised; bf16 for a 16-bit model, else fp32. beta: [M, HV] fp32.
        g: log decay, fp32 [M, HV]; [M, HV, K] where each channel has a gate.
    """

    k: Tensor
    g: Tensor
    beta: Tensor


def gdn_keys(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    activation: str | None,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_pool: Tensor,
    plan: TransitionPlan,
    impl: Impl | None = None,
) -> Keys:
    """One launch: convolved, normalised keys and the gates of every interior.

    Keys are computed in fp32 and rounded once, to bf16 where ``x`` is of a 16-bit type, as stock SGLang rounds them.
    Budget (8,192 tokens, HK = 16, K = 128, bf16): 32 MiB of x read, 32 MiB of k written: 16 us at 4.3 TB/s.

    Args:
        x: [T, D] projections before the convolution. a, b: [T, HV]; with a gate per channel see gdn_inputs.GdnLayer.
        conv_pool: [slots, D, W-1]; call this *before* the native kernel replaces the windows.
    Raises: ValueError if shapes disagree.
    """
    layer = GdnLayer(
        conv_weight, conv_bias, activation, A_log, dt_bias, num_k_heads, num_v_heads, head_k_dim, head_v_dim
    )
    layer.check(x, conv_pool)
    k_dtype = torch.float32 if x.dtype == torch.float32 else torch.bfloat16
    if pick_impl(impl, x) == "torch":
        return _gdn_keys_torch(layer, x, a, b, conv_pool, plan, k_dtype)
    return _gdn_keys_triton(layer, x, a, b, conv_pool, plan, k_dtype)


# ---------------------------------------------------------------- torch reference


def _gdn_keys_torch(
    layer: GdnLayer, x: Tensor, a: Tensor, b: Tensor, conv_pool: Tensor, plan: TransitionPlan, k_dtype: torch.dtype
) -> Keys:
    back, key_dim = layer.width - 1, layer.num_k_heads * layer.head_k_dim
    keys = slice(key_dim, 2 * key_dim)
    counts = plan.cu.diff()
    seq = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts, output_size=plan.total)
    offset = torch.arange(plan.total, device=x.device) - plan.cu[seq]
    token, local = plan.tok[seq] + offset, plan.before[seq] + offset
    windows = conv_pool[plan.slot, keys].float().masked_fill(plan.fresh[:, None, None] != 0, 0.0)
    taps = []
    for j in range(layer.width):
        from_run = x[(token - back + j).clamp(min=0), keys].float()
        from_window = windows[seq, :, (local + j).clamp(max=back - 1)]
        taps.append(torch.where((local - back + j >= 0)[:, None], from_run, from_window))
    k = conv_torch(layer, taps, keys).view(plan.total, layer.num_k_heads, layer.head_k_dim)
    return Keys(l2norm_torch(k).to(k_dtype), *gates_torch(layer, a[token], b[token]))


# ---------------------------------------------------------------- Triton


def _gdn_keys_triton(
    layer: GdnLayer, x: Tensor, a: Tensor, b: Tensor, conv_pool: Tensor, plan: TransitionPlan, k_dtype: torch.dtype
) -> Keys:
    require_triton(x)
    if a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError(f"a (strides {a.stride()}) and b ({b.stride()}) must be contiguous in their last dimension")
    hk, hv = layer.num_k_heads, layer.num_v_heads
    k = x.new_empty(plan.total, hk, layer.head_k_dim, dtype=k_dtype)
    g, beta = (x.new_empty(plan.total, *shape, dtype=torch.float32) for shape in (layer.gate_shape, (hv,)))
    if plan.total:
        _keys_kernel[(plan.chunks, hk + (hv if layer.channel_gates else 1))](
            x,
            a,
            b,
            layer.conv_weight,
            layer.conv_bias if layer.conv_bias is not None else layer.conv_weight,
            layer.A_log,
            layer.dt_bias,
            conv_pool,
            plan.tok,
            plan.before,
            plan.slot,
            plan.fresh,
            plan.cu,
            plan.chunk_seq,
            plan.chunk_row,
            k,
            g,
            beta,
            x.stride(0),
            a.stride(0),
            b.stride(0),
            layer.conv_weight.stride(0),
            conv_pool.stride(0),
            HK=hk,
            HV=hv,
            DK=layer.head_k_dim,
            W=layer.width,
            HAS_BIAS=layer.conv_bias is not None,
            SILU=layer.activation is not None,
            C=CHUNK,
            BK=block(layer.head_k_dim),
            BH=block(hv),
            VECTOR=gcd(16, layer.head_k_dim),
            CHANNEL_GATES=layer.channel_gates,
            COLUMN=conv_pool.stride(2),
            num_warps=8,
        )
    return Keys(k, g, beta)


@jit
def _keys_kernel(
    x,
    a,
    b,
    conv_weight,
    conv_bias,
    A_log,
    dt_bias,
    conv_pool,
    toks,
    befores,
    slots,
    fresh,
    cu,
    chunk_seq,
    chunk_row,
    k_out,
    g_out,
    beta_out,
    x_stride,
    a_stride,
    b_stride,
    weight_stride,
    pool_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BH: tl.constexpr,
    VECTOR: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    COLUMN: tl.constexpr,
):
    """One program: the keys of one chunk and key head; or (the last of a chunk) the gates of all its value heads, of one
    value head where each channel has a gate."""
    BACK: tl.constexpr = W - 1
    chunk, head = tl.program_id(0), tl.program_id(1)
    seq, row = tl.load(chunk_seq + chunk), tl.load(chunk_row + chunk)
    start, end = tl.load(cu + seq), tl.load(cu + seq + 1)
    i = tl.arange(0, C)
    m, token = row + i, tl.load(toks + seq) + row - start + i
    ok_m = m < end

    if head >= HK and CHANNEL_GATES:
        hv, d = head - HK, tl.arange(0, BK)
        live = ok_m[:, None] & (d < DK)[None, :]
        bias = tl.load(dt_bias + hv * DK + d, mask=d < DK, other=0.0).to(tl.float32)
        pre = tl.load(a + token[:, None] * a_stride + hv * DK + d[None, :], mask=live, other=0.0).to(tl.float32)
        decay = gate(pre, bias[None, :], tl.load(A_log + hv).to(tl.float32))
        tl.store(g_out + (m[:, None] * HV + hv) * DK + d[None, :], decay, mask=live)
        strength = tl.load(b + token * b_stride + hv, mask=ok_m, other=0.0).to(tl.float32)
        tl.store(beta_out + m * HV + hv, strength, mask=ok_m)
    elif head >= HK:
        h = tl.arange(0, BH)
        live = ok_m[:, None] & (h < HV)[None, :]
        decay_at = tl.load(A_log + h, mask=h < HV, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + h, mask=h < HV, other=0.0).to(tl.float32)
        pre = tl.load(a + token[:, None] * a_stride + h[None, :], mask=live, other=0.0).to(tl.float32)
        out = m[:, None] * HV + h[None, :]
        tl.store(g_out + out, gate(pre, bias[None, :], decay_at[None, :]), mask=live)
        strength = tl.load(b + token[:, None] * b_stride + h[None, :], mask=live, other=0.0).to(tl.float32)
        tl.store(beta_out + out, tl.sigmoid(strength), mask=live)
    else:
        d = tl.arange(0, BK)
        ok_d = d < DK
        ok = ok_m[:, None] & ok_d[None, :]
        channels = tl.multiple_of((HK + head) * DK, VECTOR) + d
        before = tl.load(befores + seq) + row - start  # tokens of the row in front of this chunk
        y = tl.zeros([C, BK], dtype=tl.float32)
        for j in tl.static_range(W):
            in_run = before + i >= BACK - j
            at = x + (token - (BACK - j))[:, None] * x_stride + channels[None, :]
            weight = tl.load(conv_weight + channels * weight_stride + j, mask=ok_d, other=0.0).to(tl.float32)
            y += tl.load(at, mask=ok & in_run[:, None], other=0.0).to(tl.float32) * weight[None, :]
        if (before < BACK) & (tl.load(fresh + seq) == 0):  # the first tokens look into the slot's window
            window = conv_pool + tl.load(slots + seq) * pool_stride
            for r in tl.static_range(BACK):
                missing = tl.zeros([BK], dtype=tl.float32)
                for j in tl.static_range(BACK - r):
                    column = before + r + j
                    weight = tl.load(conv_weight + channels * weight_stride + j, mask=ok_d, other=0.0).to(tl.float32)
                    tap_at = window + in_window(channels, column, BACK, COLUMN)
                    tap = tl.load(tap_at, mask=ok_d & (column < BACK), other=0.0).to(tl.float32)
                    missing += tap * weight
                y += tl.where((i == r)[:, None], missing[None, :], 0.0)
        if HAS_BIAS:
            y += tl.load(conv_bias + channels, mask=ok_d, other=0.0).to(tl.float32)[None, :]
        if SILU:
            y = y * tl.sigmoid(y)
        y = unit_rows(tl.where(ok, y, 0.0))
        tl.store(k_out + (m[:, None] * HK + head) * DK + d[None, :], y.to(k_out.dtype.element_ty), mask=ok)
