"""The plan of seam attention: query tiles of a batch, and which part of whose KV each worker goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hypic.kernels._common import IntVector, as_list, to_device
from hypic.kernels._triton import block

MIN_BLOCKS = 4
"""Fewest KV blocks that are worth a worker of their own: below, writing and merging partial results costs more."""
DEFAULT_SMS = 132


class SeamShape(NamedTuple):
    """Heads and dims of a full-attention layer on one rank, and the type of q, K and V."""

    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads


class Tiling(NamedTuple):
    """Launch constants of the main kernel: rows (token x head) of a tile, KV tokens of a block, Triton's stages, warps."""

    rows: int
    columns: int
    stages: int
    warps: int


def default_tiling(shape: SeamShape) -> Tiling:
    """Tiles that fit into the shared memory and registers of sm_90 without spills, one program per SM.

    Blocks of 64 KV tokens would suit 256 dims better, but leave room for two stages only, with which Triton loads a
    block no sooner than the one before is done; and they spill.

    Raises: ValueError on dims above 256 or heads that do not divide.
    """
    dim = max(block(shape.k_dim), block(shape.v_dim))
    if dim > 256:
        raise ValueError(f"head dims {shape.k_dim} and {shape.v_dim}: at most 256")
    if shape.dtype.itemsize == 2:
        chosen = Tiling(128, 32, 4, 8) if dim == 256 else Tiling(128, 64, 3, 8)
    else:
        chosen = Tiling(64, 32, 2, 8) if dim == 256 else Tiling(64, 32, 2, 4)
    if shape.kv_heads <= 0 or shape.q_heads % shape.kv_heads or not 0 < shape.group <= chosen.rows:
        raise ValueError(f"{shape.q_heads} query heads over {shape.kv_heads} KV heads")
    return chosen


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else DEFAULT_SMS


class SeamLists(NamedTuple):
    """Host copies, so that the torch reference never waits for the device: of each request with tokens its index into
    ``rows``, its number of tokens and its largest position."""

    requests: list[int]
    counts: list[int]
    last: list[int]


@dataclass(frozen=True, kw_only=True)
class SeamPlan:
    """What ``seam_attention`` does, the same for every layer; built once per batch by :meth:`build`.

    A tile is a stretch of one request's tokens, ``tiling.rows // group`` of them at most; its KV is positions
    0..largest position. Segments are stretches of a tile's KV, each with one worker (a program per KV head); a tile with
    several has one partial result for each. int64 on the device, M tokens, S segments, N tiles in several segments:

    Attributes:
        rows: [>= requests] rows of req_to_token.
        tok, pos: [M] index in the flattened batch and natural position, request after request, ascending.
        segments: [S, 6] first token (of M) and number of tokens of the tile, index into ``rows``, KV from, KV to,
            partial result (-1: the tile has one segment, written to ``out`` at once).
        worker_ptr: [workers + 1] segments of worker i are worker_ptr[i]:worker_ptr[i+1].
        merges: [N, 4] first token and number of tokens of the tile, first partial result, how many.
        workers, parts, merged: host ints: workers per KV head, partial results per KV head, N.
    """

    shape: SeamShape
    tiling: Tiling
    rows: Tensor
    tok: Tensor
    pos: Tensor
    segments: Tensor
    worker_ptr: Tensor
    merges: Tensor
    workers: int
    parts: int
    merged: int
    lists: SeamLists

    @classmethod
    def build(
        cls,
        *,
        rows: IntVector,
        tokens: Sequence[IntVector],
        positions: Sequence[IntVector],
        requests: Sequence[int] | None = None,
        shape: SeamShape,
        device: torch.device | str,
        workers: int | None = None,
        split: int | None = None,
        tiling: Tiling | None = None,
    ) -> SeamPlan:
        """Plan the computed tokens of linked requests. Host data travels in one asynchronous copy.

        Args:
            rows: rows of req_to_token; may be a device tensor, such as ``req_pool_indices`` of the whole batch.
            tokens: per request its indices in the flattened batch. positions: their natural positions, ascending.
            requests: per request its index into ``rows``. Default: 0, 1, ...
            workers: programs that share the work evenly, over all KV heads. Default: one per SM.
            split: if given, no even shares: tiles are cut into segments of about this many KV tokens, one per program,
                in order of KV position (neighbours in time then share KV in L2, at the price of more partial results).
            tiling: default: :func:`default_tiling`.
        Raises: ValueError on positions that do not ascend or unlike numbers of tokens and positions.
        """
        device, tiles = torch.device(device), tiling or default_tiling(shape)
        index = list(requests) if requests is not None else list(range(len(tokens)))
        if not len(index) == len(tokens) == len(positions):
            raise ValueError(f"{len(index)} requests, {len(tokens)} token lists, {len(positions)} position lists")
        counts = np.asarray([len(t) for t in tokens], np.int64)
        tok, pos = _joined(tokens), _joined(positions)
        _check_positions(counts, pos, [len(p) for p in positions])

        first, count, owner = _tiles(counts, tiles.rows // shape.group)
        kv_len = pos[first + count - 1] + 1
        if split is None:
            shares = max(1, (workers or _multiprocessors(device)) // shape.kv_heads)
            tile, lo, hi, ptr = _even(-(-kv_len // tiles.columns), shares)
        else:
            tile, lo, hi, ptr = _chunks(-(-kv_len // tiles.columns), max(1, split // tiles.columns))
        segments_of = np.bincount(tile, minlength=len(first))
        part_first = np.cumsum(np.where(segments_of > 1, segments_of, 0)) - segments_of
        order = np.lexsort((lo, tile))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(segments_of) - segments_of, segments_of)
        many = np.flatnonzero(segments_of > 1)
        fields = (
            first[tile],
            count[tile],
            np.asarray(index, np.int64)[owner[tile]],
            lo * tiles.columns,
            np.minimum(hi * tiles.columns, kv_len[tile]),
            np.where(segments_of[tile] > 1, part_first[tile] + rank, -1),
        )
        merges = first[many], count[many], part_first[many], segments_of[many]
        on_device = to_device(
            {
                "rows": rows,
                "tok": tok,
                "pos": pos,
                "segments": np.stack(fields, 1),
                "worker_ptr": ptr,
                "merges": np.stack(merges, 1),
            },
            device,
        )
        used = np.flatnonzero(counts)
        return cls(
            **on_device,
            shape=shape,
            tiling=tiles,
            workers=len(ptr) - 1,
            parts=int(segments_of[many].sum()),
            merged=len(many),
            lists=SeamLists([index[r] for r in used], counts[used].tolist(), (pos[counts.cumsum()[used] - 1]).tolist()),
        )


def _joined(vectors: Sequence[IntVector]) -> np.ndarray:
    parts = [np.asarray(as_list(v) if isinstance(v, Tensor) else v, np.int64) for v in vectors]
    return np.concatenate(parts or [np.empty(0, np.int64)])


def _check_positions(counts: np.ndarray, pos: np.ndarray, lengths: list[int]) -> None:
    if counts.tolist() != lengths:
        raise ValueError(f"{counts.tolist()} tokens, but {lengths} positions")
    owner = np.repeat(np.arange(len(counts)), counts)
    if (pos < 0).any() or ((np.diff(pos) <= 0) & (np.diff(owner) == 0)).any():
        raise ValueError("the positions of a request must ascend from 0 or more")


def _tiles(counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests of ``counts`` tokens in tiles of ``size``: first token, number of tokens and request of every tile."""
    per_request = -(-counts // size)
    owner = np.repeat(np.arange(len(counts)), per_request)
    nth = np.arange(len(owner)) - np.repeat(per_request.cumsum() - per_request, per_request)
    return (counts.cumsum() - counts)[owner] + nth * size, np.minimum(counts[owner] - nth * size, size), owner


Cut = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of every segment its tile, first block and end block; and where the segments of each worker begin."""


def _even(blocks: np.ndarray, workers: int) -> Cut:
    """Tiles of ``blocks`` KV blocks in a row, cut into equal shares wherever that falls: at most one more per tile."""
    ends = blocks.cumsum()
    everything = int(blocks.sum())
    share = max(-(-everything // workers), MIN_BLOCKS)
    start = np.unique(np.concatenate([ends - blocks, np.arange(0, everything, share)]))
    tile = np.searchsorted(ends, start, side="right")
    before = (ends - blocks)[tile]
    end = np.append(start[1:], everything)[: len(start)]
    ptr = np.searchsorted(start, np.arange(0, everything + share, share))
    return tile, start - before, end - before, ptr if everything else np.zeros(1, np.int64)


def _chunks(blocks: np.ndarray, size: int) -> Cut:
    """Each tile in near-equal segments of at most ``size`` blocks, a worker for each, in order of KV position."""
    pieces = -(-blocks // size)
    tile = np.repeat(np.arange(len(blocks)), pieces)
    nth = np.arange(len(tile)) - np.repeat(pieces.cumsum() - pieces, pieces)
    lo, hi = nth * blocks[tile] // pieces[tile], (nth + 1) * blocks[tile] // pieces[tile]
    order = np.argsort(lo, kind="stable")
    return tile[order], lo[order], hi[order], np.arange(len(tile) + 1)
