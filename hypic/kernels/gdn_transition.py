"""Transition operator T and zero-start end-state S of many subsequences of one GDN layer, in one pass.

T and S are rows of one stacked state [K + V, K]: T's start as the identity and meet no values, S's start at zero and
meet v (see wy.py). Chunked prefill calls this once per chunk; a call that continues reads the rows from the artifact
blob and moves them on, which is the monoid's composition (T1 T2, S1 T2 + S2). HYPIC, arXiv 2607.01299.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import Impl, blob_view, pick_impl, to_device
from hypic.kernels.gdn_inputs import InputsPlan, gdn_inputs
from hypic.kernels.wy import CHUNK, advance_rows, wy_transform

__all__ = ["InputsPlan", "TransitionPlan", "gdn_inputs", "gdn_transition"]


class TransitionLists(NamedTuple):
    """Host copies of plan fields, so that the torch reference never waits for the device."""

    cu: list[int]
    blob: list[int]
    first: list[bool]


@dataclass(frozen=True, kw_only=True)
class TransitionPlan:
    """N subsequences, the same for every layer; built once per batch by :meth:`build`; int64 on the device.

    Attributes:
        cu: [N+1] rows cu[i]:cu[i+1] of k, v, g, beta belong to subsequence i (none is fine).
        blob: [N] byte offset in the arena of the artifact under construction.
        first: [N] 1: start from (identity, 0); 0: go on from what the blob holds.
        chunk_seq, chunk_row: [C] subsequence and first row of every chunk of up to CHUNK rows.
        chunk_ptr: [N+1] chunks of subsequence i.
    """

    cu: Tensor
    blob: Tensor
    first: Tensor
    chunk_seq: Tensor
    chunk_row: Tensor
    chunk_ptr: Tensor
    lists: TransitionLists

    @classmethod
    def build(
        cls, *, cu: Sequence[int], blob: Sequence[int], first: Sequence[bool], device: torch.device | str
    ) -> TransitionPlan:
        """Plan the subsequences; all host data travels in one copy. Raises ValueError if ``cu`` decreases."""
        edges = np.asarray(cu, np.int64)
        starts, lengths = edges[:-1], edges[1:] - edges[:-1]
        if (lengths < 0).any():
            raise ValueError(f"cu {list(cu)} decreases")
        chunks = -(-lengths // CHUNK)
        chunk_seq = np.repeat(np.arange(len(lengths)), chunks)
        chunk_ptr = np.concatenate([[0], chunks.cumsum()])
        chunk_row = starts[chunk_seq] + (np.arange(len(chunk_seq)) - chunk_ptr[chunk_seq]) * CHUNK
        on_device = to_device(
            {
                "cu": cu,
                "blob": blob,
                "first": np.asarray(first, np.int64),
                "chunk_seq": chunk_seq,
                "chunk_row": chunk_row,
                "chunk_ptr": chunk_ptr,
            },
            device,
        )
        return cls(**on_device, lists=TransitionLists(list(cu), list(blob), list(first)))


def gdn_transition(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    arena: Tensor,
    t_off: int,
    s_off: int,
    plan: TransitionPlan,
    impl: Impl | None = None,
) -> None:
    """Write T and S of every subsequence into its blob.

    Args:
        k: fp32 [M, HK, K], l2-normalised. v: fp32 [M, HV, V]. g (log decay), beta: fp32 [M, HV]. See gdn_inputs.
        arena: uint8 [bytes]. t_off, s_off: byte offsets inside a blob of this layer's fp32 T [HV, K, K], S [HV, V, K].
    Raises: ValueError if shapes disagree.
    """
    if v.shape[1] % k.shape[1] or not k.shape[0] == v.shape[0] == g.shape[0] == beta.shape[0]:
        raise ValueError(
            f"k {tuple(k.shape)}, v {tuple(v.shape)}, g {tuple(g.shape)}, beta {tuple(beta.shape)} disagree"
        )
    if pick_impl(impl, k) == "triton":
        raise NotImplementedError("gdn_transition: the Triton kernel is not there yet")
    _gdn_transition_torch(k, v, g, beta, arena, t_off, s_off, plan)


# ---------------------------------------------------------------- torch reference


def _gdn_transition_torch(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, arena: Tensor, t_off: int, s_off: int, plan: TransitionPlan
) -> None:
    hv, dk, dv = v.shape[1], k.shape[2], v.shape[2]
    cu, blobs, first = plan.lists
    for i, blob in enumerate(blobs):
        t = blob_view(arena, blob + t_off, (hv, dk, dk), torch.float32)
        s = blob_view(arena, blob + s_off, (hv, dv, dk), torch.float32)
        if first[i]:
            t.copy_(torch.eye(dk, device=k.device))
            s.zero_()
        if cu[i + 1] == cu[i]:
            continue
        rows = torch.cat([t, s], 1)
        part = slice(cu[i], cu[i + 1])
        for chunk_k, chunk_v, chunk_g, chunk_beta in zip(*(_chunks(x[part]) for x in (k, v, g, beta)), strict=True):
            chunk = wy_transform(chunk_k.repeat_interleave(hv // k.shape[1], 0), chunk_v, chunk_g, chunk_beta)
            no_values = chunk.u.new_zeros(*chunk.u.shape[:-1], dk)
            rows = advance_rows(chunk, rows, torch.cat([no_values, chunk.u], -1))
        t.copy_(rows[:, :dk])
        s.copy_(rows[:, dk:])


def _chunks(x: Tensor) -> list[Tensor]:
    """[n, H, ...] -> [H, <= CHUNK, ...] pieces in order."""
    return [piece.transpose(0, 1) for piece in x.split(CHUNK)]
