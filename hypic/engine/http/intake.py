"""What is checked and written on SGLang's GenerateReqInput just before it is tokenised and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypic.engine.http.options import BadRequest
from hypic.segment import INTERNAL_RID_PREFIX, RequestSpans, reserved_keys


def reject_reserved(obj: Any) -> None:
    """Raises BadRequest if a client uses request ids or ``custom_params`` keys that belong to the plugin."""
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    for rid in rids:
        if isinstance(rid, str) and rid.startswith(INTERNAL_RID_PREFIX):
            raise BadRequest(f"rid {rid!r}: the prefix {INTERNAL_RID_PREFIX!r} is reserved; choose another request id")
    params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    for p in params:
        custom = p.get("custom_params") if isinstance(p, dict) else None
        if isinstance(custom, dict) and (keys := reserved_keys(custom)):
            raise BadRequest(
                f"custom_params: the keys {sorted(keys)} are reserved; use the request's own 'hypic' object instead"
            )


def refusal(manager: Any, obj: Any) -> str | None:
    """Why no segment of this request can be cached whatever its place, or None (see segment.DECLINE_REASONS)."""
    if obj.input_embeds is not None or obj.positional_embed_overrides is not None:
        return "input_embeds"
    if obj.contains_mm_input():
        return "multimodal"
    if obj.session_params:
        return "session"
    if obj.multi_item_delimiter_indices is not None:
        return "input_logprobs"
    states = obj.return_hidden_states
    if any(s and s != "last" for s in (states if isinstance(states, list) else [states])):
        return "hidden_states"
    if obj.return_routed_experts or obj.return_indexer_topk:
        return "routed_experts"
    fields = (obj.bootstrap_host, obj.bootstrap_port, obj.bootstrap_room)
    if manager.server_args.disaggregation_mode != "null" or any(f is not None for f in fields):
        return "disaggregation"
    return None


def late_refusal(manager: Any, obj: Any, i: int, plan: RequestSpans, tokens: int) -> str | None:
    """Why no segment of prompt ``i``, ``tokens`` long, can be cached at the place it has, or None."""
    if not plan.cached:
        return None
    start = item(obj.logprob_start_len, i)
    if item(obj.return_logprob, i) and start is not None and 0 <= start < plan.cached[-1].end:
        return "input_logprobs"
    if manager.allow_auto_truncate and tokens + manager.num_reserved_tokens >= manager.context_len:
        return "truncated"
    return None


def choices(obj: Any, prompts: int) -> int:
    """Outputs that the request will have: one for each prompt and parallel sample."""
    params = item(obj.sampling_params, 0)
    n = params.get("n", 1) if isinstance(params, dict) else 1
    return prompts * n if isinstance(n, int) else prompts


def attach(obj: Any, plans: Sequence[RequestSpans | None]) -> None:
    """Write one plan for each prompt into the request's sampling parameters, which are copied, not changed.

    Raises:
        BadRequest: ``sampling_params`` or ``custom_params`` have a shape that cannot carry a plan.
    """
    if not any(plans):
        return
    given = obj.sampling_params
    if len(plans) == 1 and not isinstance(given, list):
        obj.sampling_params = _with_plan(given, plans[0])
        return
    each = given if isinstance(given, list) else [given] * len(plans)
    if len(each) != len(plans):
        raise BadRequest(f"sampling_params: {len(each)} entries for {len(plans)} prompts; send one object or one each")
    obj.sampling_params = [_with_plan(p, plan) for p, plan in zip(each, plans, strict=True)]


def _with_plan(params: Any, plan: RequestSpans | None) -> dict[str, Any]:
    params = dict(params or {})
    if plan is None:
        return params
    custom = params.get("custom_params")
    if custom is not None and not isinstance(custom, dict):
        raise BadRequest(f"custom_params: must be an object, got {type(custom).__name__}")
    params["custom_params"] = {**(custom or {}), **plan.to_params()}
    return params


def item(value: Any, i: int) -> Any:
    """The value of prompt ``i``, where a request holds one for all or a list; None past its end (SGLang's error)."""
    if not isinstance(value, list):
        return value
    return value[i] if i < len(value) else None
