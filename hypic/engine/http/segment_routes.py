"""``/v1/segments``: segments that clients register once and then name by id (docs/API.md)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator

from hypic.engine.http import from_router
from hypic.engine.http.options import Options
from hypic.engine.http.registry import RegistryFull
from hypic.engine.http.segments import PinRefused, Segments, View, segments_of
from hypic.engine.named import State
from hypic.segment import span_id

DEFAULT_TTL = 3600.0
MOST = 1024
"""Segments of one request, and of one page of the list."""
_NAMED = 3
"""Faults of one request that are named."""


class SegmentContent(BaseModel):
    """A text or token ids."""

    model_config = ConfigDict(extra="forbid")
    text: str | None = Field(None, description="Tokenised by itself, as a marked text in a prompt is.")
    input_ids: list[Annotated[int, Field(strict=True)]] | None = None

    @model_validator(mode="after")
    def one_of_them(self) -> SegmentContent:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("send either text or input_ids")
        return self


class RegisterSegments(BaseModel):
    """Segments to register and compile."""

    model_config = ConfigDict(extra="forbid")
    segments: list[SegmentContent] = Field(min_length=1, max_length=MOST)
    cache_salt: str | None = Field(None, description="The tenant: only requests with the same salt may use the ids.")
    model: str | None = Field(None, description="BASE:ADAPTER compiles under that LoRA adapter.")
    method: str | None = Field(None, description="The caching method to compile for; the server's default without it.")
    ttl: float | None = Field(
        DEFAULT_TTL,
        gt=0,
        strict=True,
        allow_inf_nan=False,
        description="Seconds they live after this and each use; null for ever.",
    )
    pin: bool = Field(False, strict=True, description="Never evict the artifacts.")


class Segment(BaseModel):
    """A registered segment."""

    id: str
    object: Literal["segment"] = "segment"
    tokens: int
    span: str = Field(description="What reports call the segment: the digest of its token ids.")
    status: State = Field(description="Of its artifact; one that is absent is compiled when the segment is used.")
    reason: str | None = Field(description="Why no artifact was made when that was last tried.")
    bytes: int = Field(description="Of its artifact, on each rank; 0 if there is none now.")
    hits: int = Field(description="How often requests joined its artifact, by id or by text.")
    pinned: bool
    created: int = Field(description="Unix time.")
    age: float = Field(description="Seconds since then.")
    ttl: float | None
    expires_in: float | None = Field(description="Seconds, unless it is used; null for never.")

    @classmethod
    def of(cls, view: View) -> Segment:
        record, look = view.record, view.look
        return cls(
            id=record.id,
            tokens=len(record.tokens),
            span=span_id(record.tokens),
            status=look.state,
            reason=record.reason if look.state == "absent" else None,
            bytes=look.nbytes,
            hits=look.hits,
            pinned=look.pinned,
            created=int(record.created),
            age=max(time.time() - record.created, 0.0),
            ttl=record.ttl,
            expires_in=view.left,
        )


class SegmentList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Segment]
    has_more: bool = False


class SegmentDeleted(BaseModel):
    id: str
    object: Literal["segment"] = "segment"
    deleted: Literal[True] = True


class Problem(BaseModel):
    """SGLang's error body."""

    object: str
    message: str
    type: str
    code: int


def _segments() -> Segments:
    from sglang.srt.entrypoints.http_server import get_global_state

    return segments_of(get_global_state().tokenizer_manager)


def _tenant(
    x_cache_salt: Annotated[str, Header(description="The cache_salt they were registered with, if any.")] = "",
) -> str:
    return x_cache_salt


@asynccontextmanager
async def _answered() -> AsyncIterator[None]:
    """Errors as HTTP has them."""
    try:
        yield
    except (RegistryFull, PinRefused) as e:
        raise HTTPException(507, str(e)) from None
    except ValueError as e:
        raise HTTPException(getattr(e, "status_code", 400), str(e)) from None


class _Route(APIRoute):
    """Says what is wrong with a request; SGLang's own handler repeats all that was sent, and names files of the server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as e:
                raise HTTPException(400, _faults(e.errors())) from None

        return answer


def _faults(errors: Sequence[Any]) -> str:
    """Where and why, of the first few."""
    said = [f"{_place(*e['loc'])}: {e['msg'].removeprefix('Value error, ')}" for e in errors[:_NAMED]]
    if len(errors) > _NAMED:
        said.append(f"and {len(errors) - _NAMED} more")
    return (
        "; ".join(said).encode(errors="backslashreplace").decode()
    )  # a place may be a key of the client's, no Unicode


def _place(part: str, *inner: str | int) -> str:
    """``("body", "segments", 0, "text")`` -> ``segments[0].text``"""
    path = "".join(f"[{i}]" if isinstance(i, int) else f".{i:.40}" for i in inner)
    return path.removeprefix(".") if path.startswith(".") else f"{part}{path}"


_NO_SUCH: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "Unknown, expired, deleted, or another tenant's."}
}
_NO_ROOM: dict[int | str, dict[str, Any]] = {
    507: {"model": Problem, "description": "No room: --hypic-segment-memory or --hypic-pin-percent."}
}
Held = Annotated[Segments, Depends(_segments)]
Tenant = Annotated[str, Depends(_tenant)]

router = APIRouter(prefix="/v1/segments", tags=["segments"], route_class=_Route)


@router.post("", responses={400: {"model": Problem}, **_NO_ROOM})
async def register(body: RegisterSegments, held: Held, request: Request) -> SegmentList:
    """Register segments and compile them; answers when their artifacts are there, in the order of the request.

    The same content (and tenant, and adapter) always has the same id. What is known already gets the new ttl.
    """
    base, adapter = request.app.state.openai_serving_chat._parse_model_parameter(body.model or "")
    async with _answered():
        held.check_base(base)
        method = Options(method=body.method).method_of(held.methods)
        contents = [
            held.contents(c.input_ids or [] if c.text is None else c.text, f"segments[{i}]")
            for i, c in enumerate(body.segments)
        ]
        views = await held.register(
            contents,
            tenant=body.cache_salt or "",
            adapter=adapter or "",
            method=method,
            ttl=body.ttl,
            pin=body.pin,
            request=request,
        )
    return SegmentList(data=[Segment.of(v) for v in views])


@router.get("")
async def listing(
    held: Held,
    tenant: Tenant,
    limit: Annotated[int, Query(ge=1, le=MOST)] = 100,
    after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
) -> SegmentList:
    """The tenant's segments, the oldest first."""
    async with _answered():
        records = held.registry.of(tenant)
        if after is not None:
            held.registry.get(tenant, after)
            records = records[[r.id for r in records].index(after) + 1 :]
        views = await held.views(records[:limit])
    return SegmentList(data=[Segment.of(v) for v in views], has_more=len(records) > limit)


@router.get("/{segment_id}", responses=_NO_SUCH)
async def retrieve(segment_id: str, held: Held, tenant: Tenant) -> Segment:
    """A segment; looking is no use."""
    async with _answered():
        (view,) = await held.views([held.registry.get(tenant, segment_id)])
    return Segment.of(view)


@router.delete("/{segment_id}", responses=_NO_SUCH)
async def delete(segment_id: str, held: Held, tenant: Tenant) -> SegmentDeleted:
    """Forget a segment and drop its artifact. Requests that use it already are not disturbed."""
    async with _answered():
        await held.delete(tenant, segment_id)
    return SegmentDeleted(id=segment_id)


@router.post("/{segment_id}/pin", responses={**_NO_SUCH, **_NO_ROOM})
async def pin(segment_id: str, held: Held, tenant: Tenant, request: Request) -> Segment:
    """Never evict its artifact; it is compiled if it is absent."""
    async with _answered():
        return Segment.of(await held.pin(tenant, segment_id, request))


@router.post("/{segment_id}/unpin", responses=_NO_SUCH)
async def unpin(segment_id: str, held: Held, tenant: Tenant) -> Segment:
    """Its artifact may be evicted again."""
    async with _answered():
        return Segment.of(await held.unpin(tenant, segment_id))


def serve() -> None:
    """Have SGLang's server serve these routes: it includes the router of `/v1/loads`, and ours with it.

    Call before the server's module is imported. Safe to call again.
    """
    from sglang.srt.entrypoints.v1_loads import router as included

    if not any(getattr(r, "endpoint", None) is register for r in included.routes):
        included.include_router(router)
        included.include_router(from_router.router)
