"""Exact accounting of an idle scheduler (docs/SEMANTICS.md, P5) and a dump of its artifacts (P3).

Both are reached through SGLang's RPC (`Engine.collective_rpc("hypic_audit")`): failures come back as its error.
"""

from __future__ import annotations

from typing import Any

import torch

from hypic.artifact.layout import HeaderError, decode_header, require_header
from hypic.engine.manager import LinkManager


class NotIdle(RuntimeError):
    """The scheduler still works; ask again."""


def audit(scheduler: Any) -> None:
    """Every KV page and state slot is either free or held by the radix tree, exactly once; nothing is locked; and every
    artifact is what it is taken for.

    SGLang's own leak check compares counts, which a double free passes; this compares sets.

    Raises:
        NotIdle: requests are in flight.
        AssertionError: naming what leaked or was freed twice.
    """
    manager: LinkManager = scheduler.hypic
    lent = manager.sharing.lent if manager.sharing is not None else 0
    if not scheduler.is_fully_idle() or (manager.sharing is not None and manager.sharing.busy):
        raise NotIdle("NotIdle: requests are in flight")
    assert manager.held == 0, f"{manager.held} linked requests are still registered"
    assert manager.compiling == 0, f"{manager.compiling} compile requests are still registered"
    locks = manager.store.locked() - lent
    assert locks == 0, f"{locks} artifact locks are held, besides {lent} for other workers"
    manager.store.check_integrity()
    manager.named.check_integrity()
    _own_headers(manager)
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    held = _radix_slots(tree)
    page = allocator.page_size
    pages = torch.cat([allocator.free_pages, allocator.release_pages]).cpu().long()
    _exact("KV pages", pages, torch.unique(held // page) if page > 1 else held, 1, allocator.size // page)
    pool = scheduler.req_to_token_pool
    mamba = getattr(pool, "mamba_allocator", None)
    if mamba is not None:
        states = (
            tree.all_mamba_values_flatten().cpu().long() if tree.supports_mamba() else torch.empty(0, dtype=torch.long)
        )
        free = mamba.free_slots.cpu().long()
        first = int(torch.cat([free, states]).min())
        _exact("state slots", free, states, first, mamba.size)
    assert pool.available_size() == pool.size, f"{pool.size - pool.available_size()} request rows are still taken"
    for name in ("full_protected_size", "protected_size", "mamba_protected_size"):
        if callable(size := getattr(tree, name, None)) and (tree.supports_mamba() or name == "protected_size"):
            total = size()
            total = total[0] if isinstance(total, tuple) else total
            assert total == 0, f"{total} tokens or states are locked in the radix tree ({name})"


def _own_headers(manager: LinkManager) -> None:
    """Every artifact that may be joined says in its blob what the index takes it for."""
    buffer = manager.store.arena.buffer
    for artifact in manager.store.ready():
        expected = decode_header(manager.header_of(artifact))
        try:
            require_header(bytes(buffer[artifact.offset : artifact.base].cpu().numpy()), expected)
        except HeaderError as e:
            raise AssertionError(f"artifact {artifact.key.hex()[:16]}: {e}") from None


def _radix_slots(tree: Any) -> torch.Tensor:
    """KV slots that the radix tree holds (none where there is no radix tree)."""
    root = getattr(tree, "root_node", None)
    # RadixCache (attention-only models) cannot flatten an empty tree.
    if getattr(tree, "disable", False) or (root is not None and not root.children):
        return torch.empty(0, dtype=torch.long)
    return (
        tree.all_values_flatten().cpu().long()
        if hasattr(tree, "all_values_flatten")
        else torch.empty(0, dtype=torch.long)
    )


def _exact(what: str, free: torch.Tensor, held: torch.Tensor, first: int, count: int) -> None:
    everything = torch.cat([free, held])
    unique, times = everything.unique(return_counts=True)
    twice = unique[times > 1].tolist()
    assert not twice, f"{what} {twice[:8]}: owned twice (free {len(free)}, in the radix tree {len(held)})"
    missing = sorted(set(range(first, first + count)) - set(unique.tolist()))
    assert not missing, f"{what} {missing[:8]}: lost ({len(missing)} of {count})"
    assert len(unique) == count, f"{what}: {len(unique)} of {count}"


def dump_artifacts(scheduler: Any, path: str) -> None:
    """Save every ready artifact of this rank to `path`.RANK: {span id: {"T", "S", "conv", "K", "V": float32 tensors}}."""
    from hypic.segment import span_id

    manager: LinkManager = scheduler.hypic
    store, layout = manager.store, manager.layout
    out = {}
    for artifact in store.ready():
        n = max(len(artifact.tokens) - manager.method_of(artifact).seam_window, 0)
        payload = store.arena.buffer[artifact.base : artifact.base + layout.payload_bytes(n)]
        out[span_id(artifact.tokens)] = {
            k: v.to("cpu", torch.float32, copy=True) for k, v in layout.parts(payload, n).items()
        }
    torch.save(out, f"{path}.{scheduler.ps.tp_rank}")
