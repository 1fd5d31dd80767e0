"""What is checked and written on SGLang's GenerateReqInput just before it is tokenised and sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from hypic.engine.http.options import BadRequest
from hypic.segment import INTERNAL_RID_PREFIX, RESERVED_PREFIX, RequestSpans, reserved_keys

_CARRIERS = ("sampling_params", "custom_params", "extra_body", "options", "parameters")
"""Objects of a request that hold parameters, not content."""
_UNGUARDED = ("ollama_chat", "ollama_generate")
"""Endpoints that answer 500 to a ValueError."""


def reject_reserved(obj: Any, request: Any = None) -> None:
    """Raises BadRequest if a client uses request ids or fields that belong to the plugin.

    Args:
        obj: SGLang's request. What counts: this goes to the scheduler.
        request: FastAPI's. SGLang drops fields that it does not know without a word; a client that sends ours anywhere
            among its parameters is told instead.
    """
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    for rid in rids:
        if isinstance(rid, str) and rid.startswith(INTERNAL_RID_PREFIX):
            raise BadRequest(f"rid {rid!r}: the prefix {INTERNAL_RID_PREFIX!r} is reserved; choose another request id")
    body = getattr(request, "_json", None)  # parsed by FastAPI; absent where there is no request or no JSON
    sent = body if isinstance(body, dict) else {}
    ours = {"sampling_params": obj.sampling_params}
    for where, fields in chain(_parameters(ours, "the request"), _parameters(sent, "the request")):
        if keys := reserved_keys(fields):
            raise BadRequest(
                f"{where}: the keys {sorted(keys)} are reserved, as are all that begin with {RESERVED_PREFIX!r}; "
                "use the request's own 'hypic' object instead"
            )


def _parameters(fields: dict[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """``fields`` and the objects inside that hold parameters, each with its name."""
    yield where, fields
    for name in _CARRIERS:
        inner = fields.get(name)
        for one in inner if isinstance(inner, list) else (inner,):
            if isinstance(one, dict):
                yield from _parameters(one, name)


def answerable(error: BadRequest, request: Any) -> Exception:
    """The error in the form that the endpoint of ``request`` answers with status 400."""
    endpoint = getattr(request, "scope", {}).get("endpoint")
    if getattr(endpoint, "__name__", "") not in _UNGUARDED:
        return error
    from fastapi import HTTPException

    return HTTPException(400, str(error))


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


def samples(obj: Any) -> int:
    """Outputs that the request will have for each prompt."""
    params = item(obj.sampling_params, 0)
    n = params.get("n", 1) if isinstance(params, dict) else 1
    return n if isinstance(n, int) else 1


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
