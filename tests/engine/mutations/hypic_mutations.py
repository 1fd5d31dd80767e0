"""Faults for the engine, loaded by SGLang as a plugin of its own: the tests must notice every one of them.

The test process puts this folder on `sys.path`, so that SGLang finds its entry point in the scheduler process, and names
the fault in the environment of that engine. Faults replace names inside hypic's modules; nothing in hypic knows of them.
"""

from __future__ import annotations

import os
from typing import Any

import torch

VARIABLE = "HYPIC_TESTS_FAULT"


def activate() -> None:
    """Entry point of `sglang.srt.plugins`."""
    if fault := os.environ.get(VARIABLE):
        FAULTS[fault]()


def transition_is_identity() -> None:
    """h <- h + S: what earlier segments left in the state is neither decayed nor overwritten."""
    from hypic.engine.families import gdn
    from hypic.kernels._common import blob_view

    original = gdn.gdn_transition_solved

    def transition(chunks: Any, *, arena: Any, t_off: int, plan: Any, **rest: Any) -> None:
        original(chunks, arena=arena, t_off=t_off, plan=plan, **rest)
        heads, dim = chunks.w.shape[1:]
        for blob in plan.lists.blob:
            blob_view(arena, blob + t_off, (heads, dim, dim), torch.float32).copy_(torch.eye(dim))

    gdn.gdn_transition_solved = transition  # type: ignore[assignment]


def end_state_keeps_the_seam() -> None:
    """S is the end state of the compile: the seam, computed again at link, counts twice."""
    from hypic.engine.families import gdn

    original = gdn.gdn_end_states

    def end_states(ssm_pool: Any, seam_states: Any, **rest: Any) -> None:
        original(ssm_pool, torch.zeros_like(seam_states), **rest)

    gdn.gdn_end_states = end_states  # type: ignore[assignment]


def conv_window_stays() -> None:
    """The window of the convolution is not replaced by the artifact's."""
    from hypic.engine import batch

    original = batch._pieces

    def pieces(*args: Any) -> Any:
        for phase, piece in original(*args):
            yield phase, piece._replace(own=0) if isinstance(piece, batch.ChainItem) else piece

    batch._pieces = pieces


def keys_stay_at_local_positions() -> None:
    """Interiors are copied without relocation."""
    from hypic.engine import forward

    class Unmoved:
        @staticmethod
        def build(**fields: Any) -> Any:
            fields.pop("shift", None)
            return original.build(**fields)

    original = forward.InteriorPlan
    forward.InteriorPlan = Unmoved  # type: ignore[assignment,misc]


def seams_hold_other_tokens() -> None:
    """The seam window is computed from tokens that do not stand there."""
    from hypic.engine import admission

    class WrongSeams(admission.LinkLayout):
        def order(self, begin: int, end: int) -> Any:
            order = super().order(begin, end)
            if begin == 0 and end == self.total:  # the tokens of the whole prompt, as they are sent to the model
                for lo, _, _ in self.interiors:
                    order[(order >= lo - 8) & (order < lo)] = 0
            return order

    admission.LinkLayout = WrongSeams  # type: ignore[misc]


def seams_come_from_artifacts() -> None:
    """Only the first token of a segment is recomputed; the rest of its seam is what the isolated compile left."""
    import msgspec

    from hypic.engine import lifecycle

    original = lifecycle.from_env
    lifecycle.from_env = lambda: msgspec.structs.replace(original(), seam_window=1)  # type: ignore[assignment]


def slots_are_freed_twice() -> None:
    """Some slots of a linked request are given back once too often."""
    from hypic.engine import admission

    original = admission._prefilled

    def prefilled(req: Any, link: Any) -> bool:
        scheduler = link.manager.scheduler
        slots = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, :4]
        scheduler.token_to_kv_pool_allocator.free(slots.to(torch.int64))
        return original(req, link)

    admission._prefilled = prefilled


def radix_keys_are_unmarked() -> None:
    """Span boundaries are not part of the radix key."""
    import numpy as np

    from hypic.engine import admission, manager

    def unmarked(ids: Any, interiors: Any) -> Any:
        return np.array(ids, dtype=np.int64)

    admission.mark_interiors = manager.mark_interiors = unmarked


FAULTS = {
    fault.__name__: fault
    for fault in (
        transition_is_identity,
        end_state_keeps_the_seam,
        conv_window_stays,
        keys_stay_at_local_positions,
        seams_hold_other_tokens,
        seams_come_from_artifacts,
        slots_are_freed_twice,
        radix_keys_are_unmarked,
    )
}
