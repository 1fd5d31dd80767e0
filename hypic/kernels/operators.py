"""How transition operators T [H, K, K] of a layer lie in an artifact: in a float type, or in int8 with a scale per row.

In int8 a layer has, one behind the other, the scales and the diagonals of T, fp32 [H, K] each, and the rows, int8 [H, K, K]:
T[r, c] = scale[r] q[r, c] beside the diagonal, with scale[r] the row's largest magnitude there over 127. So an entry is off by
at most 1/254 of the largest beside the diagonal, and T near a multiple of the identity, as weak writes leave it, by next to
nothing. S is made with T as it is stored (gdn_end_states): a join is off by (h - h_w) times that error and no more
(docs/SEMANTICS.md, "How S comes about").
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypic.kernels._common import BLOB_ALIGN, blob_view
from hypic.kernels._triton import constexpr, jit, tl, triton_dtype

_LARGEST = 127
_LARGEST_TL = constexpr(_LARGEST)


def operator_bytes(heads: int, dk: int, dtype: torch.dtype) -> int:
    """Bytes of a layer's T in this type, torch.int8 for rows with scales; a multiple of BLOB_ALIGN then."""
    if dtype == torch.int8:
        return -(-heads * dk * (2 * 4 + dk) // BLOB_ALIGN) * BLOB_ALIGN
    return heads * dk * dk * dtype.itemsize


def read_operator(arena: Tensor, offset: int, heads: int, dk: int, dtype: torch.dtype) -> Tensor:
    """T in fp32, a copy. Raises: as blob_view."""
    if dtype != torch.int8:
        return blob_view(arena, offset, (heads, dk, dk), dtype).to(torch.float32, copy=True)
    (scale, diagonal), rows = _int8_views(arena, offset, heads, dk)
    t = rows.float() * scale[..., None]
    t.diagonal(dim1=1, dim2=2).copy_(diagonal)
    return t


def write_operator(t: Tensor, arena: Tensor, offset: int, dtype: torch.dtype) -> None:
    """Store T [H, K, K]. Raises: as blob_view."""
    heads, dk, _ = t.shape
    if dtype != torch.int8:
        blob_view(arena, offset, t.shape, dtype).copy_(t)
        return
    (scale, diagonal), rows = _int8_views(arena, offset, heads, dk)
    diagonal.copy_(t.diagonal(dim1=1, dim2=2))
    beside = t - t.diagonal(dim1=1, dim2=2).diag_embed()
    scale.copy_(beside.abs().amax(-1) / _LARGEST)
    rows.copy_((beside / scale.where(scale > 0, 1.0)[..., None]).round())


def _int8_views(arena: Tensor, offset: int, heads: int, dk: int) -> tuple[Tensor, Tensor]:
    """Views of scales and diagonals [2, H, K], and of rows [H, K, K]."""
    return (
        blob_view(arena, offset, (2, heads, dk), torch.float32),
        blob_view(arena, offset + 2 * 4 * heads * dk, (heads, dk, dk), torch.int8),
    )


def triton_operator(dtype: torch.dtype) -> Any:
    """Triton's name of T's type, for constexpr arguments called OPERATOR."""
    return tl.int8 if dtype == torch.int8 else triton_dtype(dtype)


@jit
def _int8_places(at, hv, r, d, HV: tl.constexpr, DK: tl.constexpr):
    """Pointers to scales and to the diagonal [rows], and to the rows [rows, columns], as _int8_views has them."""
    scale = at.to(tl.pointer_type(tl.float32)) + hv * DK + r
    rows = at.to(tl.pointer_type(tl.int8)) + 2 * 4 * HV * DK + (hv * DK + r[:, None]) * DK + d[None, :]
    return scale, scale + HV * DK, rows


@jit
def load_operator(at, hv, r, d, ok, HV: tl.constexpr, DK: tl.constexpr, OPERATOR: tl.constexpr):
    """Rows r and columns d, where ok, else 0, of head hv's T in fp32; `at`: pointer to bytes where the layer's T starts."""
    if tl.int8 == OPERATOR:
        scale_at, diagonal_at, rows_at = _int8_places(at, hv, r, d, HV, DK)
        scale = tl.load(scale_at, mask=r < DK, other=0.0)
        diagonal = tl.load(diagonal_at, mask=r < DK, other=0.0)
        t = tl.load(rows_at, mask=ok, other=0).to(tl.float32) * scale[:, None]
        return tl.where(ok, tl.where(r[:, None] == d[None, :], diagonal[:, None], t), 0.0)
    inner = (hv * DK + r[:, None]) * DK + d[None, :]
    return tl.load(at.to(tl.pointer_type(OPERATOR)) + inner, mask=ok, other=0.0).to(tl.float32)


@jit
def apply_operator(
    h, plus, at, hv, d, HV: tl.constexpr, DK: tl.constexpr, OPERATOR: tl.constexpr, PRECISION: tl.constexpr
):
    """h T + plus for all of head hv's T, fp32 [rows, len(d)]; `d`: 0 to the power of two behind DK; `at`: as above."""
    ok = (d < DK)[:, None] & (d < DK)[None, :]
    if tl.int8 == OPERATOR:  # scales go to h's columns: the matrix stays in 8 bits until it is an operand
        scale_at, diagonal_at, rows_at = _int8_places(at, hv, d, d, HV, DK)
        scale = tl.load(scale_at, mask=d < DK, other=0.0)
        diagonal = tl.load(diagonal_at, mask=d < DK, other=0.0)
        t = tl.load(rows_at, mask=ok, other=0).to(tl.float32)
        return tl.dot(h * scale[None, :], t, plus, input_precision=PRECISION) + h * diagonal[None, :]
    return tl.dot(h, load_operator(at, hv, d, d, ok, HV, DK, OPERATOR), plus, input_precision=PRECISION)


@jit
def store_operator(t, at, hv, r, d, ok, HV: tl.constexpr, DK: tl.constexpr, OPERATOR: tl.constexpr):
    """Store whole rows r of head hv's T, as load_operator reads them: fp32 [rows, >= DK] with zeros from DK on."""
    if tl.int8 == OPERATOR:
        on_diagonal = r[:, None] == d[None, :]
        beside = tl.where(on_diagonal, 0.0, t)
        # A maximum may pass over a NaN; a sum does not, and as a scale it makes the whole row one.
        scale = tl.max(tl.abs(beside), 1) / _LARGEST_TL + 0.0 * tl.sum(t, 1)
        scaled = beside * tl.where(scale > 0, 1.0 / scale, 0.0)[:, None]
        scale_at, diagonal_at, rows_at = _int8_places(at, hv, r, d, HV, DK)
        tl.store(scale_at, scale, mask=r < DK)
        tl.store(diagonal_at, tl.sum(tl.where(on_diagonal, t, 0.0), 1), mask=r < DK)
        tl.store(rows_at, tl.floor(scaled + 0.5).to(tl.int8), mask=ok)
    else:
        inner = (hv * DK + r[:, None]) * DK + d[None, :]
        tl.store(at.to(tl.pointer_type(OPERATOR)) + inner, t.to(OPERATOR), mask=ok)
