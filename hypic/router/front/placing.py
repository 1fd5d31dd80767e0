"""What the router must know of a prompt to place it: segments that workers may compile for each other, and its beginning."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from hypic.engine.keys import artifact_key
from hypic.method import Method
from hypic.router.actions import Prompt
from hypic.router.costs import Costs
from hypic.router.prefixes import digests
from hypic.segment import RequestSpans


def plan_of(tokenized: Any) -> RequestSpans:
    """The plan of what SGLang would send to its scheduler; an empty one if it has none."""
    params = tokenized.sampling_params.custom_params
    return RequestSpans.from_params(params, len(tokenized.input_ids)) or RequestSpans()


def unshared(tokenized: Any, plan: RequestSpans, adapter: str) -> str | None:
    """Why no other worker may compile or send the prompt's segments, or None.

    `adapter` is what workers call its adapter: "" for one that they cannot name (:func:`hypic.engine.keys.adapter_name`).
    """
    return "adapter" if plan.cached and tokenized.lora_id and not adapter else None


def segments(
    tokenized: Any,
    plan: RequestSpans,
    identity: bytes,
    methods: Mapping[str, Method],
    min_segment: int,
    costs: Costs,
    adapter: str = "",
) -> list[Prompt]:
    """The segments that a worker will link, or compile for their names, as it names them.

    Args:
        methods: of the server, its default first.
        adapter: as in :func:`unshared`.
    """
    ids: array[int] = tokenized.input_ids
    default = next(iter(methods.values()))
    method = methods[plan.method or default.name]
    w, tag, out = method.seam_window, method.tag(default), []
    for start, end in plan.cached:
        n = end - start
        if (end < len(ids) or plan.name) and n > w and n >= min_segment:
            tokens = ids[start:end]
            key = artifact_key(identity, plan.salt, adapter, tokens, tag)
            out.append(Prompt(key, plan.salt, adapter, tokens.tobytes(), costs.artifact_nbytes(n, w), plan.method))
    return out


def beginning(tokenized: Any, plan: RequestSpans, adapter: str | None) -> list[bytes]:
    """Digests of its blocks; none of a prompt that is only compiled, which no radix tree will hold."""
    if plan.name:
        return []
    space = repr((tokenized.extra_key, adapter, plan.method, plan.salt if plan.cached else None))
    return digests(tokenized.input_ids, space, plan.cached)
