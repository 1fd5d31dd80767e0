"""T in int8 rows: what is stored, what is read back, and that nothing hides."""

from __future__ import annotations

import pytest
import torch
from cases import INT8

from hypic.kernels._common import BLOB_ALIGN
from hypic.kernels.operators import operator_bytes, read_operator, write_operator


@pytest.mark.parametrize("dk", [1, 5, 16, 70, 128])
def test_entries_are_off_by_a_254th_of_the_largest_beside_the_diagonal(dk: int) -> None:
    heads, at = 3, 2 * BLOB_ALIGN
    t = torch.randn(heads, dk, dk) * torch.logspace(-30, 3, heads * dk).view(heads, dk, 1)
    t[0, 0] = 0.0
    nbytes = operator_bytes(heads, dk, torch.int8)
    arena = torch.full((at + nbytes + 64,), 0xFF, dtype=torch.uint8)
    write_operator(t, arena, at, torch.int8)
    found = read_operator(arena, at, heads, dk, torch.int8)
    beside = t.masked_fill(torch.eye(dk, dtype=torch.bool), 0.0)
    assert ((found - t).abs() <= 1.001 * INT8 * beside.abs().amax(-1, keepdim=True)).all()
    assert (found[0, 0] == 0).all() and torch.equal(found.diagonal(dim1=1, dim2=2), t.diagonal(dim1=1, dim2=2))
    assert (arena[:at] == 0xFF).all() and (arena[at + nbytes :] == 0xFF).all()
    assert nbytes % BLOB_ALIGN == 0 and nbytes < heads * dk * (dk + 8) + BLOB_ALIGN


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(bad: float) -> None:
    t = torch.eye(8)[None].clone()
    t[0, 3, 5] = bad
    arena = torch.zeros(operator_bytes(1, 8, torch.int8), dtype=torch.uint8)
    write_operator(t, arena, 0, torch.int8)
    found = read_operator(arena, 0, 1, 8, torch.int8)
    assert not found[0, 3].isfinite()[[0, 5]].any() and torch.equal(found[0, 4:], t[0, 4:])
