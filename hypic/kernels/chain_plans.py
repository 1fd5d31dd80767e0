"""Plans of the GDN operations: which tokens of a batch belong to what, the same for every layer.

The convolution of a run looks back over the last W-1 inputs of its *stream*: the window its row starts with, then runs
and the own inputs of artifacts in natural order. Where each of these inputs stands does not depend on the layer, so a
plan holds it as window codes and all tokens of a batch are convolved in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import BLOB_ALIGN, IntVector, to_device

ZERO, TOKEN, POOL, ARTIFACT = range(4)


def window_code(kind: int, value: int = 0) -> int:
    """Where one input of a conv window stands, as one integer.

    ``value`` is the token of the flattened batch (TOKEN), the column of the row's pool window (POOL), or
    ``blob_offset * (W-1) + column`` (ARTIFACT).
    """
    return value << 2 | kind


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where M tokens of R rows stand, and the windows before them; all int64 on the device.

    A row is what owns a pool slot; its items are stretches of tokens that are contiguous in the batch.

    Attributes:
        slot: [R] pool slot of each row. item_row: [I] row of each item.
        item_tok: [I] first token of each item in the flattened batch.
        item_win: [I, W-1] window codes of the window before that token.
        run_tok: [M] token of the batch, run_item: [M] its item.
        total: M.
    """

    slot: Tensor
    item_row: Tensor
    item_tok: Tensor
    item_win: Tensor
    run_tok: Tensor
    run_item: Tensor
    total: int


def flatten_runs(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of ``counts`` tokens from ``first`` -> (run, token of the batch) of every token, run by run."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.repeat(first - (counts.cumsum() - counts), counts) + np.arange(len(run))


NO_ARTIFACT = -1


class ChainItem(NamedTuple):
    """A run of ``length`` tokens from ``tok`` of the batch, then the artifact at byte ``art`` (NO_ARTIFACT: none).

    ``length`` may be 0: only an artifact. ``own``: how many of the W-1 window inputs at the artifact's end are its own,
    min(W-1, L-w); the rest comes from the window before it. ``shift``: tokens between where the artifact was compiled and
    where it joins, for families whose states know positions.
    """

    tok: int
    length: int
    art: int = NO_ARTIFACT
    own: int = 0
    shift: int = 0


class ChainLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    rows: list[list[ChainItem]]
    fresh: list[bool]


@dataclass(frozen=True, kw_only=True)
class ChainPlan(Runs):
    """What ``gdn_chain`` does, the same for every layer; built once per batch by :meth:`build`.

    Rows never share a slot, which is one of both the conv and the state pool. int64 on the device:

    Attributes:
        row_ptr: [R+1] items of row r are row_ptr[r]:row_ptr[r+1], in natural order.
        fresh: [R] 1: start from a zero state and a zero window, ignore what the slot holds.
        item_len, item_art, item_own, item_shift: [I] the fields of :class:`ChainItem`.
        item_run: [I] index of the item's first token among the M.
        row_win: [R, W-1] window codes of the window each row ends with.
        max_items, max_len: host ints: most items in a row, longest run.
    """

    row_ptr: Tensor
    fresh: Tensor
    item_len: Tensor
    item_art: Tensor
    item_own: Tensor
    item_shift: Tensor
    item_run: Tensor
    row_win: Tensor
    max_items: int
    max_len: int
    lists: ChainLists

    @classmethod
    def build(
        cls,
        *,
        rows: Sequence[Sequence[ChainItem]],
        slot: IntVector,
        fresh: Sequence[bool],
        conv_width: int,
        device: torch.device | str,
    ) -> ChainPlan:
        """Plan the batch. ``slot`` may be a device tensor; the rest is host data and travels in one copy.

        Raises: ValueError on a negative length, ``own`` out of 0..W-1, a blob that is not aligned to BLOB_ALIGN.
        """
        back = conv_width - 1
        items = [item for row in rows for item in row]
        for item in items:
            if item.length < 0 or not 0 <= item.own <= back:
                raise ValueError(f"{item}: length must be >= 0 and own within 0..{back}")
            if item.art != NO_ARTIFACT and item.art % BLOB_ALIGN:
                raise ValueError(f"{item}: art must be a multiple of {BLOB_ALIGN} bytes")
        lengths = np.asarray([item.length for item in items], np.int64)
        first = np.asarray([item.tok for item in items], np.int64)
        run_item, run_tok = flatten_runs(first, lengths)
        item_win, row_win = _windows(rows, fresh, back)
        counts = [len(row) for row in rows]
        on_device = to_device(
            {
                "row_ptr": np.cumsum([0, *counts]),
                "slot": slot,
                "fresh": np.asarray(fresh, np.int64),
                "item_tok": first,
                "item_len": lengths,
                "item_art": [item.art for item in items],
                "item_own": [item.own for item in items],
                "item_shift": [item.shift for item in items],
                "item_row": np.repeat(np.arange(len(rows)), counts),
                "item_run": lengths.cumsum() - lengths,
                "item_win": np.asarray(item_win, np.int64).reshape(len(items), back),
                "row_win": np.asarray(row_win, np.int64).reshape(len(rows), back),
                "run_tok": run_tok,
                "run_item": run_item,
            },
            device,
        )
        return cls(
            **on_device,
            max_items=max(counts, default=0),
            max_len=int(lengths.max(initial=0)),
            total=len(run_tok),
            lists=ChainLists([list(row) for row in rows], list(fresh)),
        )


def _windows(
    rows: Sequence[Sequence[ChainItem]], fresh: Sequence[bool], back: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Window codes at the start of every item and at the end of every row."""
    item_win, row_win = [], []
    for row, is_fresh in zip(rows, fresh, strict=True):
        window = [window_code(ZERO) if is_fresh else window_code(POOL, c) for c in range(back)]
        for item in row:
            item_win.append(window)
            last = range(item.tok + max(item.length - back, 0), item.tok + item.length)
            window = window + [window_code(TOKEN, t) for t in last]
            if item.art != NO_ARTIFACT:
                window = window + [window_code(ARTIFACT, item.art * back + c) for c in range(back - item.own, back)]
            window = window[len(window) - back :]
        row_win.append(window)
    return item_win, row_win
