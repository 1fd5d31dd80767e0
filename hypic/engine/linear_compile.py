"""The linear part of artifacts: what a compiling row leaves behind in each linear layer, whatever its family.

SGLang's own kernel computes compiling rows whole, in their slots. Around it, per layer and in this order:

1. before it, while the slots still hold the rows' earlier states and windows: T of the interiors, and the states h_w
   after the seams, which run once more through the chain kernel on scratch slots;
2. after it: T instead, where that pass leaves what T is made of (engine.solved_chunks); S = h_end - h_w T and the conv
   window of every row that ends. Where a segment takes several forward passes, h_w waits in the blob's S region.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape
from hypic.engine.families.base import Inputs, LinearLayer, Memory
from hypic.kernels._common import to_device
from hypic.kernels.chain_plans import ChainItem, ChainPlan
from hypic.kernels.compile_plans import IN_BLOB, NO_STATE, EndStatesPlan, TransitionPlan
from hypic.kernels.gdn_solved import SolvedChunks, SolvedPlan

if TYPE_CHECKING:
    from hypic.engine.batch import CompileRow


class CompileStep:
    """The compiling rows of a batch on the device, the same for every layer.

    Args:
        rows: the rows. tokens: where each begins in the batch. slots: their state slots, on the device.
        linear: shapes of a layer.
        native: where each row begins among the tokens of the native kernel's pass, if T is made of what that solves.
    """

    def __init__(
        self,
        rows: list[CompileRow],
        tokens: list[int],
        slots: Tensor,
        linear: LinearShape,
        native: list[int] | None = None,
    ):
        device = slots.device
        last = [i for i, c in enumerate(rows) if c.last]
        self._tails: tuple[Tensor, Tensor] | None = None
        if last and linear.conv_width:
            self._tails = slots[on_device(last, device)], self._tail_places([rows[i] for i in last], linear, device)
        length, skip = [c.end - c.begin for c in rows], [seam_tokens(c) for c in rows]
        blob, first = [c.compile.artifact.base for c in rows], [c.begin <= c.compile.seam_window for c in rows]
        self._transition: TransitionPlan | None = None
        self._solved: SolvedPlan | None = None
        if native is not None:
            self._solved = SolvedPlan.build(tok=native, length=length, skip=skip, blob=blob, first=first, device=device)
        else:
            self._transition = TransitionPlan.build(
                seq_tok=tokens,
                seq_len=length,
                seq_skip=skip,
                seq_slot=slots,
                seq_fresh=[c.begin == 0 for c in rows],
                blob=blob,
                first=first,
                device=device,
            )
        self._plan_seams(rows, tokens, slots, linear)
        self._plan_end_states(rows, slots)

    def _plan_seams(self, rows: list[CompileRow], tokens: list[int], slots: Tensor, linear: LinearShape) -> None:
        """Scratch slots for the seams that this batch completes; those it begins go on from the row's slot next time."""
        device = slots.device
        seams = [i for i, c in enumerate(rows) if completes_seam(c)]
        self._scratch_of = {i: at for at, i in enumerate(seams)}
        self._seams = ChainPlan.build(
            rows=[[ChainItem(tokens[i], rows[i].compile.seam_window - rows[i].begin)] for i in seams],
            slot=range(len(seams)),
            fresh=[rows[i].begin == 0 for i in seams],
            conv_width=linear.conv_width + 1,
            device=device,
        )
        begun = [i for i in seams if rows[i].begin]
        self._begun: tuple[Tensor, Tensor] | None = None
        if begun:
            self._begun = slots[on_device(begun, device)], on_device([self._scratch_of[i] for i in begun], device)
        self._windows = torch.empty(len(seams), *linear.window, dtype=getattr(torch, linear.conv_dtype), device=device)
        self._states = torch.empty(len(seams), linear.heads, linear.d_v, linear.d_k, device=device)

    def _plan_end_states(self, rows: list[CompileRow], slots: Tensor) -> None:
        where, seam, ends = [], [], []
        for i, c in enumerate(rows):
            if c.compile.length <= c.compile.seam_window:  # an empty interior: S is zero
                source, is_end, due = NO_STATE, False, c.last
            elif c.compile.seam_window == 0:
                source, is_end, due = NO_STATE, c.last, c.last
            else:
                source, is_end = self._scratch_of.get(i, IN_BLOB), c.last
                due = c.last or source != IN_BLOB
            if due:
                where.append(i)
                seam.append(source)
                ends.append(is_end)
        self._end_states = EndStatesPlan.build(
            slot=slots[on_device(where, slots.device)],
            seam=seam,
            ends=ends,
            blob=[rows[i].compile.artifact.base for i in where],
            device=slots.device,
        )

    def before(self, layer: LinearLayer, inputs: Inputs, at: Memory, out: Tensor) -> None:
        """Before the native kernel moves states and windows on.

        Args:
            out: [T, H, V]; the chain's outputs of seam tokens land there, for the native kernel to overwrite.
        """
        if self._transition is not None:
            layer.transition(inputs, at, self._transition)
        scratch = replace(at, conv=self._windows if at.conv is not None else None, state=self._states)
        if self._begun is not None:
            source, target = self._begun
            self._states[target] = at.state[source].float()
            if at.conv is not None:
                self._windows[target] = at.conv[source]
        layer.chain(inputs, scratch, self._seams, out)

    def after(self, layer: LinearLayer, at: Memory, chunks: SolvedChunks | None = None) -> None:
        """After the native kernel left end states and windows in the slots, and ``chunks``, if that is what T is made of."""
        if self._solved is not None:
            assert chunks is not None
            layer.transition_solved(chunks, at, self._solved)
        layer.end_states(self._states, at, self._end_states)
        if self._tails is not None:
            assert at.conv is not None
            slots, places = self._tails
            words = at.arena[at.c_off :]
            size = at.conv.element_size()
            words[: len(words) // size * size].view(at.conv.dtype)[places] = at.conv[slots].flatten(1)

    @staticmethod
    def _tail_places(rows: list[CompileRow], linear: LinearShape, device: torch.device) -> Tensor:
        """Where the windows of finished rows go, counted in their elements from where the first blob's would: [rows, D (W-1)]."""
        size = getattr(torch, linear.conv_dtype).itemsize
        first = on_device([c.compile.artifact.base // size for c in rows], device)
        return first[:, None] + torch.arange(math.prod(linear.window), device=device)


def on_device(rows: list[int], device: torch.device) -> Tensor:
    """An index on the device; unlike indexing with a list, making it does not wait for the stream."""
    return to_device({"rows": rows}, device)["rows"]


def seam_tokens(row: CompileRow) -> int:
    """Leading tokens of this batch's part of the row that belong to its seam."""
    return min(max(row.compile.seam_window - row.begin, 0), row.end - row.begin)


def completes_seam(row: CompileRow) -> bool:
    """Whether this batch computes the last token of the row's seam, and an interior follows (now or later)."""
    w = row.compile.seam_window
    return row.begin < w <= row.end and w < row.compile.length
