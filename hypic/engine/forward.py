"""The forward pass of a batch with linked or compiling rows: positions, interiors in, artifacts out.

Everything here runs on SGLang's forward stream, once per batch. What differs per layer is in `attention` and `linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hypic.artifact.arena import Arena
from hypic.artifact.layout import ArtifactLayout
from hypic.engine.attention import linked_backend
from hypic.engine.batch import BatchPlan
from hypic.engine.families import family
from hypic.engine.families.base import LinearLayer
from hypic.engine.relocation import Rotary
from hypic.kernels.relocate import InteriorPlan, capture_interiors, relocate_interiors


class ForwardPlan:
    """A BatchPlan together with the rows as SGLang's ForwardBatch has them (decode rows of a mixed batch included)."""

    def __init__(self, batch: BatchPlan, prefix_lens: list[int], extend_lens: list[int]):
        self.batch, self.prefix_lens, self.extend_lens = batch, list(prefix_lens), list(extend_lens)
        self.tokens = np.cumsum([0, *self.extend_lens])

    def attention_rows(self) -> tuple[list[int], list[int], list[int]]:
        """One row per run for the full-attention layers: (row of the batch, natural start, length)."""
        rows, starts, lengths = [], [], []
        for row, (prefix, length) in enumerate(zip(self.prefix_lens, self.extend_lens, strict=True)):
            link = self.batch.links.get(row)
            runs = [(prefix, length)] if link is None else [(r.start, r.length) for r in link.runs if r.length]
            for start, n in runs:
                rows.append(row)
                starts.append(start)
                lengths.append(n)
        return rows, starts, lengths


def attach_plan(result: Any, cls: Any, batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> None:
    """After ForwardBatch.init_new: carry the plan over and give linked tokens their natural positions."""
    plan = getattr(batch, "hypic", None)
    if plan is None or not result.forward_mode.is_extend():
        return
    forward = ForwardPlan(plan, result.extend_prefix_lens_cpu, result.extend_seq_lens_cpu)
    result.hypic = forward
    if plan.links:
        where = np.concatenate([np.arange(forward.tokens[r], forward.tokens[r + 1]) for r in plan.links])
        natural = np.concatenate([link.positions for link in plan.links.values()])
        index, value = torch.from_numpy(np.stack([where, natural])).to(result.positions.device, non_blocking=True)
        result.positions = result.positions.clone().index_copy_(0, index, value.to(result.positions.dtype))
        if result.mrope_positions is not None:
            rows = value.to(result.mrope_positions.dtype).expand(result.mrope_positions.shape[0], -1)
            result.mrope_positions = result.mrope_positions.clone().index_copy_(1, index, rows)


def forward(original: Callable[..., Any], model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward: interiors into their slots, the layers through the run plan, artifacts out."""
    plan = getattr(forward_batch, "hypic", None)
    if plan is None:
        return original(model_runner, forward_batch, *args, **kwargs)
    runtime: LinkRuntime = model_runner.hypic
    runtime.join_interiors(plan)
    native = model_runner.attn_backend
    model_runner.attn_backend = linked_backend(native, runtime, plan)
    try:
        result = original(model_runner, forward_batch, *args, **kwargs)
    finally:
        model_runner.attn_backend = native
    runtime.capture(plan)
    for row in plan.batch.links.values():
        row.link.joined |= row.last
    return result


class LinkRuntime:
    """What the forward pass of one rank needs: arena, blob layout, KV pools and the rotary table.

    Made in two steps: the arena before SGLang sizes its pools (so that its memory plan sees it), the rest after.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        self.layout: ArtifactLayout
        self.rotary: Rotary | None = None
        """None: K does not depend on positions."""
        self.seam_attention = False
        """Full attention of linked rows through our kernel instead of an expanded view."""
        self.solved = False
        """T comes out of what SGLang's pass solves, see engine.solved_chunks."""
        self.off: str | None = None
        """Why PIC is off for this model, or None."""
        self.weights_listeners: list[Callable[[str], None]] = []
        """They are told which checkpoint the new weights came from; "" if from none."""
        self.header: Callable[[Any], bytes]

    def attach(self, model_runner: Any, layout: ArtifactLayout, rotary: Rotary | None) -> None:
        self.layout, self.rotary = layout, rotary
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self._model = model_runner.model
        pool = model_runner.token_to_kv_pool
        layers = layout.full.layer_ids if layout.full is not None else ()
        self.k_pools = [pool.get_key_buffer(i) for i in layers]
        self.v_pools = [pool.get_value_buffer(i) for i in layers if layout.full is not None and layout.full.d_v]

    @cached_property
    def linear_layers(self) -> dict[int, LinearLayer]:
        """By layer id, for families whose layers cannot be read off what SGLang passes to its backend."""
        assert self.layout.linear is not None
        return family(self.layout.linear.family).layers(self._model)

    def join_interiors(self, plan: ForwardPlan) -> None:
        """Copy and relocate the interiors of rows that begin to link (relocate, see docs/SEMANTICS.md)."""
        blobs, counts, locals_, shifts, slots = [], [], [], [], []
        for row in plan.batch.links.values():
            if not row.first:
                continue
            for lo, hi, segment in row.layout.interiors:
                if lo == hi:
                    continue
                artifact = row.link.segments[segment].artifact
                assert artifact is not None
                blobs.append(artifact.base + self.layout.kv_offset)
                counts.append(hi - lo)
                start, dummies = row.link.segments[segment].start, row.link.method.dummies
                locals_.append(lo - start + dummies)
                shifts.append(start - dummies)
                slots.append(row.link.reserved[lo - row.layout.hit : hi - row.layout.hit])
        if blobs and self.k_pools:
            device = self.arena.buffer.device
            interiors = InteriorPlan.build(
                blob_kv=blobs, count=counts, local=locals_, shift=shifts, slots=torch.cat(slots), device=device
            )
            how = self.rotary.arguments() if self.rotary is not None else {"cos_sin": None}
            relocate_interiors(self.arena.buffer, interiors, self.k_pools, self.v_pools, **how)

    def capture(self, plan: ForwardPlan) -> None:
        """Copy K and V of finished compiles out of the pool and write their headers; the linear parts are there already."""
        rows = [c for c in plan.batch.compiles.values() if c.last]
        buffer = self.arena.buffer
        if self.k_pools and (long := [c for c in rows if c.end > c.compile.first]):
            interiors = InteriorPlan.build(
                blob_kv=[c.compile.artifact.base + self.layout.kv_offset for c in long],
                count=[c.end - c.compile.first for c in long],
                slots=torch.cat([self.req_to_token[c.pool_row, c.compile.first : c.end] for c in long]).to(torch.int64),
                device=buffer.device,
            )
            capture_interiors(buffer, interiors, self.k_pools, self.v_pools)
        for c in rows:
            artifact = c.compile.artifact
            header = torch.frombuffer(bytearray(self.header(artifact)), dtype=torch.uint8)
            buffer[artifact.offset : artifact.offset + len(header)].copy_(header, non_blocking=True)
            c.compile.complete = True
