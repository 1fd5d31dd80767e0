"""The causal convolution of a batch's runs: the first step of every family whose inputs are convolved.

An input of a token stands in its run, in the window its row starts with, or in the tail of an artifact that was joined
between two runs; the plan's window codes say where. The output is fp32, for the family's chain kernel to read.

SGLang's pools hold windows as [D, W-1], those of KDA as [W-1, D]: the operations take the view [slots, D, W-1] of
either, and the tail in a blob lies as a slot does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.kernels._common import blob_view
from hypic.kernels._triton import block, constexpr, jit, jit_counts, require_triton, tl
from hypic.kernels.chain_plans import ARTIFACT, NO_ARTIFACT, POOL, TOKEN, ChainItem, Runs

_TOKEN, _POOL, _ARTIFACT = constexpr(TOKEN), constexpr(POOL), constexpr(ARTIFACT)


def check_conv(weight: Tensor, activation: str | None, x: Tensor, conv_pool: Tensor) -> None:
    """Raise ValueError if the shapes of weights [D, W], batch [T, D] and pool [slots, D, W-1] disagree."""
    if activation not in (None, "silu", "swish"):
        raise ValueError(f"activation {activation!r}: only silu, swish and None are known")
    dim, width = weight.shape
    if x.shape[1] != dim or tuple(conv_pool.shape[1:]) != (dim, width - 1):
        raise ValueError(
            f"x {tuple(x.shape)}, conv_weight {tuple(weight.shape)}, conv_pool {tuple(conv_pool.shape)}: "
            f"expected {dim} channels and a window of {width - 1}"
        )
    if x.stride(1) != 1 or conv_pool.stride()[1:] not in ((width - 1, 1), (1, dim)):
        raise ValueError(f"x (strides {x.stride()}) and slots of conv_pool ({conv_pool.stride()}) must be contiguous")


def convolve_row_torch(
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    x: Tensor,
    window: Tensor,
    row: Sequence[ChainItem],
    arena: Tensor,
    c_off: int,
    tail_dtype: torch.dtype,
    column: int = 1,
) -> tuple[Tensor, Tensor]:
    """Convolve the run tokens of one row inside its stream.

    Args:
        window: [D, W-1] fp32, in front of the row. c_off, tail_dtype: of conv tails in the arena's blobs.
        column: stride between the inputs of a channel in a tail, as in the pool: 1, or D.
    Returns:
        [M_row, D] fp32, and the window at the row's end.
    """
    dim, back = window.shape
    stream, length = [window.t()], back
    at: list[int] = []
    for item in row:
        stream.append(x[item.tok : item.tok + item.length].float())
        at += range(length, length + item.length)
        length += item.length
        if item.art != NO_ARTIFACT:
            shape = (dim, back) if column == 1 else (back, dim)
            tail = blob_view(arena, item.art + c_off, shape, tail_dtype)
            tail = tail if column == 1 else tail.t()
            stream.append(tail[:, back - item.own :].t().float())
            length += item.own
    inputs, taps = torch.cat(stream), weight.float()
    here = torch.tensor(at, dtype=torch.int64, device=x.device)
    y = inputs[here - back] * taps[:, 0]
    for j in range(1, back + 1):
        y = y + inputs[here - back + j] * taps[:, j]
    if bias is not None:
        y = y + bias.float()
    return (F.silu(y) if activation else y), inputs[length - back :].t()


def launch_convolve_runs(
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    x: Tensor,
    conv_pool: Tensor,
    arena: Tensor,
    c_off: int,
    runs: Runs,
    out: Tensor,
) -> None:
    """One launch: convolve all M run tokens into out, fp32 [M, D] contiguous; every tap looks up where it stands."""
    require_triton(x)
    if runs.total == 0:
        return
    dim, width = weight.shape
    tokens, channels = 16, min(block(dim), 64)
    _convolve_kernel[(-(-runs.total // tokens), -(-dim // channels))](
        x,
        weight,
        bias if bias is not None else weight,
        conv_pool,
        arena,
        runs.item_tok,
        runs.item_row,
        runs.item_win,
        runs.slot,
        runs.run_tok,
        runs.run_item,
        out,
        runs.total,
        x.stride(0),
        weight.stride(0),
        conv_pool.stride(0),
        c_off // conv_pool.element_size(),
        DIM=dim,
        W=width,
        ITEM_BYTES=conv_pool.element_size(),
        HAS_BIAS=bias is not None,
        SILU=activation is not None,
        BM=tokens,
        BD=channels,
        COLUMN=conv_pool.stride(2),
        num_warps=4,
    )


@jit
def in_window(channels, column, BACK, COLUMN):
    """Where an input stands in a window whose columns are COLUMN apart: 1, or as many as there are channels."""
    if COLUMN == 1:
        at = channels * BACK + column
    else:
        at = channels + column * COLUMN
    return at


@jit
def load_window(
    x, conv_pool, arena, code, slot, channels, live, x_stride, pool_stride, c_off, BACK, ITEM_BYTES, COLUMN=1
):
    """Inputs at window ``code`` s of ``channels`` (both broadcast to a tile), fp32; 0 where not ``live``."""
    kind, value = code & 3, code >> 2
    found = tl.load(x + value * x_stride + channels, mask=live & (kind == _TOKEN), other=0.0).to(tl.float32)
    in_pool = conv_pool + slot * pool_stride + in_window(channels, value, BACK, COLUMN)
    found += tl.load(in_pool, mask=live & (kind == _POOL), other=0.0).to(tl.float32)
    tails = arena.to(tl.pointer_type(conv_pool.dtype.element_ty))
    in_tail = tails + (value // BACK) // ITEM_BYTES + c_off + in_window(channels, value % BACK, BACK, COLUMN)
    return found + tl.load(in_tail, mask=live & (kind == _ARTIFACT), other=0.0).to(tl.float32)


@jit
def convolve_tile(
    x, conv_weight, conv_bias, conv_pool, arena, item_tok, item_row, item_win, slots, run_tok, run_item, m, channels,
    ok_m, ok_d, x_stride, weight_stride, pool_stride, c_off,
    W: tl.constexpr, ITEM_BYTES: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BM: tl.constexpr,
    BD: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Convolution, bias and activation of run tokens ``m`` and ``channels``: [BM, BD], fp32."""
    BACK: tl.constexpr = W - 1
    ok = ok_m[:, None] & ok_d[None, :]
    token = tl.load(run_tok + m, mask=ok_m, other=0)
    item = tl.load(run_item + m, mask=ok_m, other=0)
    local = token - tl.load(item_tok + item, mask=ok_m, other=0)
    slot = tl.load(slots + tl.load(item_row + item, mask=ok_m, other=0), mask=ok_m, other=0)

    y = tl.zeros([BM, BD], dtype=tl.float32)
    for j in tl.static_range(W):
        in_run = local >= BACK - j
        code = tl.load(item_win + item * BACK + local + j, mask=ok_m & (local < BACK - j), other=0)
        code = tl.where(in_run, (token - BACK + j) << 2 | _TOKEN, code)
        inputs = load_window(
            x, conv_pool, arena, code[:, None], slot[:, None], channels[None, :], ok, x_stride, pool_stride, c_off,
            BACK, ITEM_BYTES, COLUMN,
        )  # fmt: skip
        weight = tl.load(conv_weight + channels * weight_stride + j, mask=ok_d, other=0.0).to(tl.float32)
        y += inputs * weight[None, :]
    if HAS_BIAS:
        y += tl.load(conv_bias + channels, mask=ok_d, other=0.0).to(tl.float32)[None, :]
    if SILU:
        y = y * tl.sigmoid(y)
    return y


@jit_counts("total")
def _convolve_kernel(
    x,
    conv_weight,
    conv_bias,
    conv_pool,
    arena,
    item_tok,
    item_row,
    item_win,
    slots,
    run_tok,
    run_item,
    out,
    total,
    x_stride,
    weight_stride,
    pool_stride,
    c_off,
    DIM: tl.constexpr,
    W: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    COLUMN: tl.constexpr,
):
    """One program: BM run tokens, BD channels."""
    m, channels = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BD + tl.arange(0, BD)
    ok_m, ok_d = m < total, channels < DIM
    ok = ok_m[:, None] & ok_d[None, :]
    y = convolve_tile(
        x, conv_weight, conv_bias, conv_pool, arena, item_tok, item_row, item_win, slots, run_tok, run_item, m, channels,
        ok_m, ok_d, x_stride, weight_stride, pool_stride, c_off, W, ITEM_BYTES, HAS_BIAS, SILU, BM, BD, COLUMN,
    )  # fmt: skip
    tl.store(out + m[:, None] * DIM + channels[None, :], y, mask=ok)


@jit
def store_row_window(
    x,
    conv_pool,
    arena,
    row_win,
    row,
    slot,
    first,
    count,
    x_stride,
    pool_stride,
    c_off,
    BACK,
    ITEM_BYTES,
    BC,
    BW,
    COLUMN=1,
):
    """Write the window that a row ends with, for channels [first, first + count) with count <= BC, to its pool slot."""
    c, columns = tl.arange(0, BC), tl.arange(0, BW)
    channels = first + c
    code = tl.load(row_win + row * BACK + columns, mask=columns < BACK, other=0)
    live = (c < count)[:, None] & (columns < BACK)[None, :]
    window = load_window(
        x, conv_pool, arena, code[None, :], slot, channels[:, None], live, x_stride, pool_stride, c_off, BACK,
        ITEM_BYTES, COLUMN,
    )  # fmt: skip
    tl.debug_barrier()
    at = conv_pool + slot * pool_stride + in_window(channels[:, None], columns[None, :], BACK, COLUMN)
    tl.store(at, window.to(conv_pool.dtype.element_ty), mask=live)
