"""What a request that arrives asks of artifacts: its Link, and which of its segments no artifact can serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypic.engine import keys
from hypic.engine.request import Link, Segment, link_of
from hypic.segment import MalformedSpans, RequestSpans

if TYPE_CHECKING:
    from hypic.engine.manager import LinkManager

logger = logging.getLogger(__name__)

NATIVE_REASONS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("input_embeds", lambda r: r.input_embeds is not None),
    ("multimodal", lambda r: r.multimodal_inputs is not None),
    ("embed_overrides", lambda r: r.positional_embed_overrides is not None),
    ("session", lambda r: r.session is not None or r.session_id is not None),
    ("routed_experts", lambda r: r.return_routed_experts or r.return_indexer_topk),
    ("hidden_states", lambda r: bool(r.return_hidden_states)),
)
"""Requests that SGLang must serve alone: what they return or take is defined token by token over the whole prompt."""


def plan(manager: LinkManager, req: Any) -> Link | None:
    """The request's Link; made on first sight from what the frontend wrote into `custom_params`."""
    if hasattr(req, "hypic"):
        return link_of(req)
    req.hypic = None
    try:
        spans = RequestSpans.from_params(req.sampling_params.custom_params, len(req.origin_input_ids))
        if spans is not None and spans.method and spans.method not in manager.methods:
            raise MalformedSpans(f"custom_params: no method {spans.method!r} here")
    except MalformedSpans as e:
        if req.finished_reason is None and req.to_finish is None:
            logger.warning("request %s served natively: %s", req.rid, e)
            manager.metrics.fallback("malformed")
        return None
    if spans is None or req.finished_reason is not None or req.to_finish is not None:
        return None
    adapter, method = req.lora_id or "", manager.methods[spans.method or manager.default.name]
    segments = []
    for start, end in spans.cached:
        tokens = req.origin_input_ids[start:end]
        segments.append(Segment(start, end, tokens, manager.key(spans.salt, adapter, tokens, method)))
    link = Link(spans, segments, method, manager)
    _settle(manager, link, req)
    if link.linked:
        req.extra_key = keys.link_namespace(req.extra_key, spans.salt, method.seam_window, method.kind)
    req.hypic = link
    return link


def _settle(manager: LinkManager, link: Link, req: Any) -> None:
    """Segments that no artifact can serve become plain, with the reason."""
    native = manager.off or next((name for name, applies in NATIVE_REASONS if applies(req)), None)
    if (
        native is None
        and req.return_logprob
        and 0 <= req.logprob_start_len < max((s.end for s in link.segments), default=0)
    ):
        native = "input_logprobs"
    total = len(req.origin_input_ids)
    for s in link.segments:
        if native is not None:
            s.make_plain("declined", native)
        elif s.end == total and not link.compile_only:
            s.make_plain("declined", "prompt_end")
        elif not manager.config.force_link and (s.length <= link.seam_window or s.length < manager.config.min_segment):
            s.make_plain("too_short")
