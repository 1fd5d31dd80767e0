"""Attention backends that follow the run plan: the native backend, copied for one forward pass, on an expanded view.

Full attention needs no kernel of ours. Its metadata is built from a view of the batch with one row per run: the runs of
a request share its row of KV slots, and a run's prefix is everything that stands before it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from hypic.engine.gdn import LinkedGdn

if TYPE_CHECKING:
    from hypic.engine.forward import ForwardPlan, LinkRuntime

_INDPTR = ("kv_indptr", "qo_indptr", "mask_indptr", "window_kv_indptr")
"""Buffers that backends size by the request pool; a view may have more rows than that."""


def linked_backend(backend: Any, runtime: LinkRuntime, plan: ForwardPlan) -> Any:
    """A copy of `backend` for one forward pass of a batch with linked or compiling rows."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    if not isinstance(backend, HybridLinearAttnBackend):
        return _specialise(backend, ExpandedAttention, plan, runtime)
    hybrid = copy.copy(backend)
    hybrid.full_attn_backend = _specialise(backend.full_attn_backend, ExpandedAttention, plan, runtime)
    hybrid.linear_attn_backend = _specialise(backend.linear_attn_backend, LinkedGdn, plan, runtime)
    hybrid.attn_backend_list = [hybrid.full_attn_backend, hybrid.linear_attn_backend]
    return hybrid


_classes: dict[tuple[type, type], type] = {}


def _specialise(backend: Any, mixin: type, plan: ForwardPlan, runtime: LinkRuntime) -> Any:
    """A shallow copy whose class puts `mixin` in front of the backend's own."""
    key = (mixin, type(backend))
    if key not in _classes:
        _classes[key] = type(f"{mixin.__name__}{type(backend).__name__}", key, {})
    clone: Any = object.__new__(_classes[key])
    clone.__dict__.update(backend.__dict__)
    clone.hypic_plan, clone.hypic_runtime = plan, runtime
    return clone


def view_rows(fb: Any, rows: list[int], starts: list[int], lengths: list[int]) -> Any:
    """A view of ForwardBatch `fb` whose row j is tokens [starts[j], starts[j] + lengths[j]) of request rows[j]."""
    view = copy.copy(fb)
    device = fb.seq_lens.device
    ends = [s + n for s, n in zip(starts, lengths, strict=True)]
    offsets = [0, *lengths[:-1]]
    for j in range(1, len(offsets)):
        offsets[j] += offsets[j - 1]
    columns = torch.tensor([rows, starts, lengths, ends, offsets]).to(device, non_blocking=True)
    index, prefix, extend, seq, offset = columns
    view.batch_size = len(rows)
    view.req_pool_indices = fb.req_pool_indices[index]
    view.extend_prefix_lens_cpu, view.extend_seq_lens_cpu = starts, lengths
    view.extend_prefix_lens = prefix.to(fb.extend_prefix_lens.dtype)
    view.extend_seq_lens = extend.to(fb.extend_seq_lens.dtype)
    view.extend_start_loc = offset.to(fb.extend_start_loc.dtype)
    view.seq_lens = seq.to(fb.seq_lens.dtype)
    view.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    view.seq_lens_sum = sum(ends)
    view.extend_num_tokens = sum(lengths)
    view._original_batch_size = None
    for name in ("mamba_track_indices", "mamba_track_mask", "mamba_track_seqlens", "orig_seq_lens"):
        if (value := getattr(fb, name, None)) is not None:
            setattr(view, name, value[index])
    return view


class ExpandedAttention:
    """Mixin in front of a full-attention backend: every run of the plan is a row."""

    hypic_plan: ForwardPlan
    hypic_runtime: LinkRuntime

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._view = view_rows(forward_batch, *self.hypic_plan.attention_rows())
        for name in _INDPTR:
            buffer = getattr(self, name, None)
            if isinstance(buffer, torch.Tensor) and buffer.shape[0] <= self._view.batch_size:
                setattr(self, name, buffer.new_zeros(self._view.batch_size + 1))
        super().init_forward_metadata(self._view)  # type: ignore[misc]

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._view.out_cache_loc = forward_batch.out_cache_loc
        return super().forward_extend(q, k, v, layer, self._view, *args, **kwargs)  # type: ignore[misc]
