"""Plans of a compile's GDN operations: which tokens of a batch are interiors, and which end-states are due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import BLOB_ALIGN, IntVector, to_device
from hypic.kernels.wy import CHUNK


class TransitionLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    cu: list[int]
    blob: list[int]
    first: list[bool]


@dataclass(frozen=True, kw_only=True)
class TransitionPlan:
    """Interiors of compiling rows, the same for every layer; built once per batch by :meth:`build`; int64 on the device.

    Attributes:
        tok: [N] token of the batch at which interior i begins. before: [N] tokens of its row in front of it in this batch.
        slot: [N] pool slot of its row. fresh: [N] 1: a zero window precedes the row, whatever the slot holds.
        cu: [N+1] rows cu[i]:cu[i+1] of k, g and beta belong to interior i (none is fine).
        blob: [N] byte offset in the arena of the artifact under construction.
        first: [N] 1: T starts as the identity; 0: go on from what the blob holds.
        chunk_seq, chunk_row: [C] interior and first row of every chunk of up to CHUNK rows.
        chunk_ptr: [N+1] chunks of interior i.
        total: rows in all.
    """

    tok: Tensor
    before: Tensor
    slot: Tensor
    fresh: Tensor
    cu: Tensor
    blob: Tensor
    first: Tensor
    chunk_seq: Tensor
    chunk_row: Tensor
    chunk_ptr: Tensor
    total: int
    lists: TransitionLists

    @property
    def chunks(self) -> int:
        return len(self.chunk_seq)

    @classmethod
    def build(
        cls,
        *,
        seq_tok: Sequence[int],
        seq_len: Sequence[int],
        seq_skip: Sequence[int],
        seq_slot: IntVector,
        seq_fresh: Sequence[bool],
        blob: Sequence[int],
        first: Sequence[bool],
        device: torch.device | str,
    ) -> TransitionPlan:
        """Plan rows of ``seq_len`` tokens that start at token ``seq_tok`` of the batch; all host data travels in one copy.

        Args:
            seq_skip: leading tokens (the seam) that feed the convolution and are no part of the interior.
            seq_slot: pool slots; may be a device tensor.
        Raises: ValueError if a skip exceeds its length or a blob is not aligned to BLOB_ALIGN bytes.
        """
        if any(offset % BLOB_ALIGN for offset in blob):
            raise ValueError(f"blob {list(blob)}: must be multiples of {BLOB_ALIGN} bytes")
        skip = np.asarray(seq_skip, np.int64)
        lengths = np.asarray(seq_len, np.int64) - skip
        if (lengths < 0).any():
            raise ValueError(f"seq_skip {skip.tolist()} exceeds seq_len {list(seq_len)}")
        cu = np.concatenate([[0], lengths.cumsum()])
        chunks = -(-lengths // CHUNK)
        chunk_seq = np.repeat(np.arange(len(lengths)), chunks)
        chunk_ptr = np.concatenate([[0], chunks.cumsum()])
        chunk_row = cu[chunk_seq] + (np.arange(len(chunk_seq)) - chunk_ptr[chunk_seq]) * CHUNK
        on_device = to_device(
            {
                "tok": np.asarray(seq_tok, np.int64) + skip,
                "before": skip,
                "slot": seq_slot,
                "fresh": np.asarray(seq_fresh, np.int64),
                "cu": cu,
                "blob": blob,
                "first": np.asarray(first, np.int64),
                "chunk_seq": chunk_seq,
                "chunk_row": chunk_row,
                "chunk_ptr": chunk_ptr,
            },
            device,
        )
        return cls(**on_device, total=int(cu[-1]), lists=TransitionLists([int(n) for n in cu], list(blob), list(first)))


NO_STATE, IN_BLOB = -1, -2
"""Where a seam's state stands if not in the scratch pool: nowhere (it is zero), or in the blob's S region."""


class EndStateLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    seam: list[int]
    ends: list[bool]
    blob: list[int]


@dataclass(frozen=True, kw_only=True)
class EndStatesPlan:
    """Which S regions ``gdn_end_states`` writes, the same for every layer; int64 on the device.

    Attributes:
        slot: [N] pool slot that holds the row's state after this batch.
        seam: [N] row of the scratch pool with the state after the seam, or NO_STATE or IN_BLOB.
        ends: [N] 1: the row's last token is in this batch. 0: the seam's state itself goes into the S region, where it
            waits; with NO_STATE that is the zero of an empty interior.
        blob: [N] byte offset in the arena of the artifact.
    """

    slot: Tensor
    seam: Tensor
    ends: Tensor
    blob: Tensor
    lists: EndStateLists

    @classmethod
    def build(
        cls,
        *,
        slot: IntVector,
        seam: Sequence[int],
        ends: Sequence[bool],
        blob: Sequence[int],
        device: torch.device | str,
    ) -> EndStatesPlan:
        """``slot`` may be a device tensor; the rest is host data and travels in one copy.

        Raises: ValueError if a blob is not aligned to BLOB_ALIGN bytes.
        """
        if any(offset % BLOB_ALIGN for offset in blob):
            raise ValueError(f"blob {list(blob)}: must be multiples of {BLOB_ALIGN} bytes")
        on_device = to_device({"slot": slot, "seam": seam, "ends": np.asarray(ends, np.int64), "blob": blob}, device)
        return cls(**on_device, lists=EndStateLists(list(seam), list(ends), list(blob)))
