"""Messages about named segments between the HTTP process and the schedulers, on SGLang's own control channel.

Rank 0 receives a request and hands it to all ranks as it does with every other; its answer goes back to the tokenizer
manager, which waits in a communicator of SGLang's.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.utils import TypeBasedDispatcher

from hypic.engine.named import Look, PinRefused, State

if TYPE_CHECKING:
    from hypic.engine.manager import LinkManager


Action = Literal["look", "learn", "reset", "pin", "unpin", "forget", "drop"]
"""drop: forget, and the artifacts too. learn: know these from now on. reset: these and no others, none of them pinned."""


class NamedSegmentsReq(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """`action` is one of :data:`Action`. The other columns are what is to be learned of each name; `adapters` holds SGLang's
    ids of them, `tokens` arrays of int64 as bytes."""

    action: str
    names: list[str]
    tenants: list[str] = msgspec.field(default_factory=list)
    adapters: list[str] = msgspec.field(default_factory=list)
    methods: list[str] = msgspec.field(default_factory=list)
    tokens: list[bytes] = msgspec.field(default_factory=list)


class NamedSegmentsReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """What there is of each name now, as columns; `refused` says why nothing was pinned."""

    states: list[State]
    nbytes: list[int]
    hits: list[int]
    pinned: list[bool]
    refused: str = ""

    def looks(self) -> list[Look]:
        return [Look(*row) for row in zip(self.states, self.nbytes, self.hits, self.pinned, strict=True)]


hook_custom_types(NamedSegmentsReq, NamedSegmentsReqOutput)  # SGLang's msgpack transport reads what it knows


def serve(scheduler: Any, manager: LinkManager) -> None:
    """Have the scheduler answer these messages."""

    def answer(request: NamedSegmentsReq) -> NamedSegmentsReqOutput:
        return act(manager, request)

    scheduler._request_dispatcher += TypeBasedDispatcher([(NamedSegmentsReq, answer)])


def act(manager: LinkManager, request: NamedSegmentsReq) -> NamedSegmentsReqOutput:
    """Do what is asked, the same on all ranks."""
    named, refused = manager.named, ""
    if request.action in ("learn", "reset"):
        if request.action == "reset":
            named.clear()
        columns = request.names, request.tenants, request.adapters, request.methods, request.tokens
        for name, tenant, adapter, method, tokens in zip(*columns, strict=True):
            if (known := manager.methods.get(method or manager.default.name)) is not None:
                named.learn(name, tenant, adapter, array("q", tokens), known)
    elif request.action == "pin":
        try:
            named.pin(request.names)
        except PinRefused as e:
            refused = str(e)
    elif request.action == "unpin":
        named.unpin(request.names)
    elif request.action in ("forget", "drop"):
        named.forget(request.names, drop=request.action == "drop")
    looks = named.look(request.names)
    return NamedSegmentsReqOutput(
        states=[x.state for x in looks],
        nbytes=[x.nbytes for x in looks],
        hits=[x.hits for x in looks],
        pinned=[x.pinned for x in looks],
        refused=refused,
    )
