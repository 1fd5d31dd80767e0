"""Attention backends that follow the run plan: the native backend, copied for one forward pass.

Two ways through a full-attention layer, both exact:

* expanded: the backend's own kernel on a view of the batch with one row per run. The runs of a request share its row of
  KV slots, and a run's prefix is everything that stands before it. Works with any backend that saves KV before it
  attends; but a prompt of n seams reads its prefix n times.
* seam: linked rows go through our split-KV kernel, which reads the prefix once per tile of queries; the other rows are an
  ordinary batch for the backend.

`--hypic-attention auto` takes seam on a GPU and expanded on a CPU.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hypic.engine.families import family
from hypic.kernels.seam_attention import seam_attention, seam_scratch
from hypic.kernels.seam_plan import SeamPlan, SeamShape

if TYPE_CHECKING:
    from hypic.engine.forward import ForwardPlan, LinkRuntime

_INDPTR = ("kv_indptr", "qo_indptr", "mask_indptr", "window_kv_indptr")
"""Buffers that backends size by the request pool; a view may have more rows than that."""


def linked_backend(backend: Any, runtime: LinkRuntime, plan: ForwardPlan) -> Any:
    """A copy of `backend` for one forward pass of a batch with linked or compiling rows."""
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

    full = SeamAttention if runtime.seam_attention and plan.batch.links else ExpandedAttention
    if not isinstance(backend, HybridLinearAttnBackend):
        return _specialise(backend, full, plan, runtime)
    hybrid = copy.copy(backend)
    hybrid.full_attn_backend = _specialise(backend.full_attn_backend, full, plan, runtime)
    assert runtime.layout.linear is not None
    mixin = family(runtime.layout.linear.family).mixin
    hybrid.linear_attn_backend = _specialise(backend.linear_attn_backend, mixin, plan, runtime)
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


class SeamAttention:
    """Mixin in front of a full-attention backend: linked rows through our kernel, the others through the backend."""

    hypic_plan: ForwardPlan
    hypic_runtime: LinkRuntime

    def init_forward_metadata(self, forward_batch: Any) -> None:
        plan = self.hypic_plan
        self._rows, self._seams = forward_batch.req_pool_indices, dict[SeamShape, tuple[SeamPlan, torch.Tensor]]()
        native = [r for r in range(len(plan.extend_lens)) if r not in plan.batch.links]
        self._native: Any = None
        if native:
            starts, lengths = ([of[r] for r in native] for of in (plan.prefix_lens, plan.extend_lens))
            self._native = view_rows(forward_batch, native, starts, lengths)
            where = np.concatenate([np.arange(plan.tokens[r], plan.tokens[r + 1]) for r in native])
            self._native_tokens = torch.from_numpy(where).to(self._rows.device, non_blocking=True)
            super().init_forward_metadata(self._native)  # type: ignore[misc]

    def _seam(self, shape: SeamShape) -> tuple[SeamPlan, torch.Tensor]:
        """The plan for layers of this shape, made at the first of them, and scratch that they share."""
        if shape not in self._seams:
            links, offsets = self.hypic_plan.batch.links, self.hypic_plan.tokens
            seam = SeamPlan.build(
                rows=self._rows,
                tokens=[np.arange(offsets[r], offsets[r + 1]) for r in links],
                positions=[link.positions for link in links.values()],
                requests=list(links),
                shape=shape,
                device=self._rows.device,
            )
            scratch = torch.empty(seam_scratch(seam), dtype=torch.float32, device=self._rows.device)
            self._seams[shape] = seam, scratch
        return self._seams[shape]

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        if kwargs:
            raise NotImplementedError(
                f"linked prompts with {sorted(kwargs)}: start the server with --hypic-attention expanded"
            )
        pool = self.token_to_kv_pool  # type: ignore[attr-defined]
        if save_kv_cache:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        heads, dim = layer.tp_q_head_num, layer.v_head_dim
        out = q.new_empty(q.shape[0], heads * dim)
        shape = SeamShape(heads, layer.tp_k_head_num, layer.qk_head_dim, dim, q.dtype)
        plan, scratch = self._seam(shape)
        seam_attention(
            q.reshape(-1, heads, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,  # type: ignore[attr-defined]
            plan=plan,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            out=out.view(-1, heads, dim),
            scratch=scratch,
        )
        if self._native is not None:
            t = self._native_tokens
            self._native.out_cache_loc = forward_batch.out_cache_loc[t]
            part = super().forward_extend(q[t], k[t], v[t], layer, self._native, save_kv_cache=False)  # type: ignore[misc]
            out.index_copy_(0, t, part.reshape(len(t), -1))
        return out
