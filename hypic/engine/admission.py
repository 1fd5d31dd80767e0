"""Hooks that admit a linked request: radix match under its own key, KV slots, presented order, release.

A linked request stays an ordinary SGLang Req. Its interiors are presented as an already-cached prefix, so budgets,
chunked prefill, decode, release and the radix tree are SGLang's own. Three things differ, and each is undone before the
hook returns: the radix key carries marked ids, the fill ids are in presented order while a batch is built, and the KV
slots up to the last interior are reserved in one piece, in natural order (the only scheme that works at any page size
and leaves no holes).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hypic.engine.batch import BatchPlan, CompileRow, LinkRow
from hypic.engine.reporting import settle_report
from hypic.engine.request import Link, LinkState, compile_of, link_of
from hypic.plan import NO_MATCH, LinkLayout, mark_interiors
from hypic.report import BOUGHT


def _array(ids: np.ndarray) -> array:
    return array("q", np.ascontiguousarray(ids, dtype=np.int64).tobytes())


def _keyed(req: Any) -> Link | None:
    """The Link of a request whose radix keys are marked."""
    link = link_of(req)
    return link if link is not None and link.linked else None


def _joining(req: Any) -> Link | None:
    """The Link of a request that joins artifacts in its current prefill."""
    link = _keyed(req)
    return link if link is not None and link.layout is not None and link.state is LinkState.ADMITTED else None


@contextmanager
def _marked(req: Any, attribute: str, link: Link, stop: int | None = None) -> Iterator[None]:
    """`req.<attribute>` (prompt ids, maybe with output) carries marked ids; with `stop`, no match goes beyond it."""
    plain = getattr(req, attribute)
    ids = mark_interiors(plain, link.interiors())
    if stop is not None:
        ids[stop] = NO_MATCH
    setattr(req, attribute, _array(ids))
    try:
        yield
    finally:
        setattr(req, attribute, plain)


# ---------------------------------------------------------------------- radix match


def match_prefix_for_req(
    original: Callable[..., Any], tree_cache: Any, req: Any, token_ids: Any = None, **kwargs: Any
) -> Any:
    """The scheduling policy's match, under the marked key."""
    link = _keyed(req)
    if link is not None:
        token_ids = _array(mark_interiors(token_ids or req.origin_input_ids + req.output_ids, link.interiors()))
    return original(tree_cache, req, token_ids, **kwargs)


def init_next_round_input(
    original: Callable[..., None], req: Any, tree_cache: Any = None, cow_mamba: bool | None = None
) -> None:
    """Match a linked request and lay out what remains to be joined; pass over one whose artifacts are not ready."""
    link = _keyed(req)
    if link is None or tree_cache is None:
        original(req, tree_cache, cow_mamba)
        return
    manager = link.manager
    assert manager is not None
    link.layout = None
    if not manager.poll(req) or link.compile_only:
        req._refresh_fill_ids()
        return
    if not link.linked:
        original(req, tree_cache, cow_mamba)
        return
    _match(original, req, tree_cache, cow_mamba, link)
    hit = len(req.prefix_indices)
    if any(s.artifact is None and s.end > hit for s in link.linked):
        # The radix tree held this segment when the request arrived, and has lost it since.
        _undo_match(req, tree_cache)
        link.state = LinkState.NEW
        if not manager.poll(req):
            return
        _match(original, req, tree_cache, cow_mamba, link)
        hit = len(req.prefix_indices)
    rest = [i for i in link.interiors() if link.segments[i.segment].end > hit]
    if rest:
        req.mamba_branching_seqlen = None
        link.layout = LinkLayout(len(req.full_untruncated_fill_ids), hit, rest)


def _match(original: Callable[..., None], req: Any, tree_cache: Any, cow_mamba: bool | None, link: Link) -> None:
    req._refresh_fill_ids()
    with _marked(req, "full_untruncated_fill_ids", link):
        original(req, tree_cache, cow_mamba)
    hit = len(req.prefix_indices)
    inside = next((i for i in link.interiors() if i.lo < hit < i.hi), None)
    if inside is not None:
        # A hit may end within an interior (attention-only models, page rounding); only its head is of use.
        req.mamba_cow_src_index = None
        with _marked(req, "full_untruncated_fill_ids", link, stop=inside.lo):
            original(req, tree_cache, cow_mamba)


def _undo_match(req: Any, tree_cache: Any) -> None:
    """Give back the state slot that a match took, as SGLang does for a request that is not admitted."""
    req.mamba_cow_src_index, req.mamba_needs_clear = None, False
    if req.mamba_pool_idx is not None:
        tree_cache.req_to_token_pool.mamba_allocator.free(req.mamba_pool_idx.unsqueeze(-1))
        req.mamba_pool_idx = None


# ---------------------------------------------------------------------- admission


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Reserve slots for everything up to the last interior, then let SGLang admit the request."""
    link = _keyed(req)
    if link is None:
        return original(adder, req, *args, **kwargs)
    manager = link.manager
    assert manager is not None
    if link.state is not LinkState.READY or link.compile_only:
        return adder.budget_state()
    if link.layout is None:
        result = original(adder, req, *args, **kwargs)
        if _added(adder, req):
            manager.admitted(req)
        return result
    return _reserve_and_add(original, adder, req, link, args, kwargs)


def _added(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _reserve_and_add(original: Callable[..., Any], adder: Any, req: Any, link: Link, args: Any, kwargs: Any) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    layout = link.layout
    assert layout is not None and link.manager is not None
    allocator = adder.token_to_kv_pool_allocator
    span = layout.reserve_end - layout.hit
    with adder._lock_node(req.last_node):
        want = adder.ceil_paged_tokens(span)
        evict_from_tree_cache(adder.tree_cache, want)
        slots = allocator.alloc(want)
    if slots is None:
        return AddReqResult.NO_TOKEN
    hit_indices = req.prefix_indices
    reserved = slots[:span].to(torch.int64)
    req.prefix_indices = torch.cat([hit_indices.to(torch.int64), reserved[: layout.interior_tokens]])
    # SGLang charges every computed token; those before the last interior have their slots already.
    credit = span - layout.interior_tokens
    _charge(adder, -credit)
    params, ignore_eos = req.sampling_params, req.sampling_params.ignore_eos
    params.ignore_eos = False  # its own admission path asserts an empty prefix when it chunks
    try:
        result = original(adder, req, *args, **kwargs)
    finally:
        params.ignore_eos = ignore_eos
    if _added(adder, req):
        link.reserved = reserved
        _charge(adder, credit - min(credit, req.extend_range.length))
        link.manager.admitted(req)
    else:
        allocator.free(slots)
        req.prefix_indices = hit_indices
        _charge(adder, credit)
    return result


def _charge(adder: Any, tokens: int) -> None:
    adder.rem_total_token_offset += tokens
    adder.cur_rem_token_offset += tokens


# ---------------------------------------------------------------------- building the batch


def prepare_for_extend(original: Callable[..., None], batch: Any) -> None:
    """Build the extend batch with linked rows in presented order, and attach the plan of its rows."""
    special = [(i, r) for i, r in enumerate(batch.reqs) if getattr(r, "hypic", None) is not None]
    batch.hypic = None
    if not special:
        original(batch)
        return
    for _, req in special:
        settle_report(req)
    joining = [(i, r, link) for i, r in special if (link := _joining(r)) is not None]
    natural = {i: r.full_untruncated_fill_ids for i, r, _ in joining}
    begins = {i: len(r.prefix_indices) for i, r in special}
    for _, req, link in joining:
        ids = np.frombuffer(req.full_untruncated_fill_ids, dtype=np.int64)
        assert link.layout is not None
        req.full_untruncated_fill_ids = _array(ids[link.layout.order(0, link.layout.total)])
    try:
        original(batch)
    finally:
        for i, req, _ in joining:
            req.full_untruncated_fill_ids = natural[i]
    plan = BatchPlan()
    for i, req, link in joining:
        plan.links[i] = _link_row(batch, i, req, link, begins[i])
    for i, req in special:
        if (state := compile_of(req)) is not None:
            plan.compiles[i] = CompileRow(state, req.req_pool_idx, begins[i], req.extend_range.end)
            state.passes.append((req.extend_range.end - begins[i], sum(batch.extend_lens), time.perf_counter()))
            _stop_tracking(batch, i, req)
    batch.hypic = plan or None


def _link_row(batch: Any, i: int, req: Any, link: Link, begin: int) -> LinkRow:
    layout = link.layout
    assert layout is not None
    end = req.extend_range.end
    req.kv_committed_len = req.kv.kv_allocated_len
    first = begin == layout.prefix_len
    if first and not req.retracted_stain:
        # Interiors compiled for this request (or waited for) were computed on its behalf.
        bought = sum(i.hi - i.lo for i in layout.interiors if link.segments[i.segment].outcome in BOUGHT)
        req.cached_tokens -= bought
        req.cached_tokens_device -= bought
    _stop_tracking(batch, i, req)
    row = LinkRow(
        link, layout, begin, end, layout.runs(begin, end), layout.order(begin, end), first, end == layout.total
    )
    if row.last and batch.mamba_track_mask is not None:
        row.checkpoint = _checkpoint(batch, req, row)
    return row


def _stop_tracking(batch: Any, i: int, req: Any) -> None:
    """SGLang must not keep a state tracked inside a presented order (extra_buffer strategy)."""
    if batch.mamba_track_mask is not None:
        batch.mamba_track_mask[i] = False
        req.mamba_last_track_seqlen = None


def _checkpoint(batch: Any, req: Any, row: LinkRow) -> tuple[int, int] | None:
    """Where in the prompt to keep a state for the radix tree: the last page boundary that ends inside a run."""
    page = batch.tree_cache.page_size
    for run in reversed(row.runs):
        position = (run.start + run.length) // page * page
        if run.length and run.start < position:
            keep = batch.req_to_token_pool.get_mamba_ping_pong_keep_idx(req)
            req.mamba_last_track_seqlen = position
            return position, int(req.mamba_ping_pong_track_buffer[keep])
    return None


def alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """Give SGLang's allocator the part of each row that has no slots yet: it begins where presented order is natural."""
    rows = [(i, r, link) for i, r in enumerate(batch.reqs) if (link := _joining(r)) is not None]
    if not rows:
        return original(batch)
    fields = ("prefix_lens", "extend_lens", "seq_lens", "seq_lens_cpu", "extend_num_tokens")
    saved = {name: getattr(batch, name) for name in fields}
    prefixes = {i: r.prefix_indices for i, r, _ in rows}
    prefix_lens, ends = list(batch.prefix_lens), batch.seq_lens_cpu.tolist()
    for i, req, link in rows:
        layout = link.layout
        assert layout is not None
        begin = prefix_lens[i]
        prefix_lens[i] = max(begin, layout.reserve_end)
        ends[i] = max(ends[i], layout.reserve_end)
        if begin == layout.prefix_len:
            req.prefix_indices = torch.cat([req.prefix_indices[: layout.hit], link.reserved])
        else:
            req.prefix_indices = _row(batch, req, prefix_lens[i])
    batch.prefix_lens = prefix_lens
    batch.extend_lens = [e - p for e, p in zip(ends, prefix_lens, strict=True)]
    batch.extend_num_tokens = sum(batch.extend_lens)
    batch.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(batch.device, non_blocking=True)
    try:
        fresh, req_pool_indices, req_pool_indices_cpu = original(batch)
        fresh_lens = batch.extend_lens
    finally:
        for name, value in saved.items():
            setattr(batch, name, value)
        for i, req, _ in rows:
            req.prefix_indices = prefixes[i]
    parts = list(fresh.split(fresh_lens))
    for i, req, link in rows:
        begin, end = batch.prefix_lens[i], batch.prefix_lens[i] + batch.extend_lens[i]
        assert link.layout is not None
        if begin < link.layout.reserve_end:
            order = torch.from_numpy(link.layout.order(begin, end)).to(batch.device, non_blocking=True)
            pool = batch.req_to_token_pool.req_to_token
            parts[i] = pool[req.req_pool_idx].index_select(0, order).to(fresh.dtype)
    return torch.cat(parts), req_pool_indices, req_pool_indices_cpu


def _row(batch_or_tree: Any, req: Any, end: int) -> torch.Tensor:
    """Slots of natural positions [0, end) of a request, int64."""
    row = batch_or_tree.req_to_token_pool.req_to_token[req.req_pool_idx, :end]
    return row.to(torch.int64, copy=True)


# ---------------------------------------------------------------------- radix insert and release


def maybe_cache_unfinished_req(original: Callable[..., None], req: Any, tree_cache: Any, **kwargs: Any) -> None:
    """Insert a linked prefill under its marked key; between chunks nothing is inserted."""
    if kwargs.get("chunked") and (_joining(req) is not None or compile_of(req) is not None):
        req.prefix_indices = _row(tree_cache, req, req.extend_range.end)
        return
    link = _keyed(req)
    if link is None:
        original(req, tree_cache, **kwargs)
        return
    with _marked(req, "full_untruncated_fill_ids", link):
        original(req, tree_cache, **kwargs)


def release_kv_cache(original: Callable[..., None], req: Any, tree_cache: Any, is_insert: bool = True) -> None:
    """Release a linked request: into the radix tree under its marked key, and its artifacts to the store."""
    link = _keyed(req)
    if link is None:
        original(req, tree_cache, is_insert)
        return
    with _marked(req, "origin_input_ids", link):
        original(req, tree_cache, is_insert and _prefilled(req, link))
    assert link.manager is not None
    link.manager.finish(req)


def _prefilled(req: Any, link: Link) -> bool:
    """Whether the KV of the whole prompt is there; until then the row has holes."""
    return link.layout is None or (req.extend_range is not None and req.extend_range.end >= len(req.origin_input_ids))
