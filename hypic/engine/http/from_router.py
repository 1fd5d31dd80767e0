"""What the router of this server's cluster asks of it about named segments, whose registry is the router's.

``POST /hypic/segments``, for the router alone: to others there is no such path. In goes a NamedSegmentsReq as msgpack, its
adapters by name; out comes a NamedSegmentsReqOutput as JSON.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Request
from starlette.responses import Response

from hypic.engine.control import NamedSegmentsReq
from hypic.engine.http.segments import segments_of
from hypic.engine.http.trusted import is_router

PATH = "/hypic/segments"


def _router_only(request: Request) -> None:
    if not is_router(request):
        raise HTTPException(404, "Not Found")


router = APIRouter(dependencies=[Depends(_router_only)])


@router.post(PATH, include_in_schema=False)
async def obey(request: Request) -> Response:
    """Do what the router says. Names under an adapter that is not loaded here are not learned."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    try:
        told = msgspec.msgpack.decode(await request.body(), type=NamedSegmentsReq)
    except msgspec.MsgspecError as e:
        raise HTTPException(400, str(e)) from None
    done = await segments_of(manager).ask(_here(told, manager) if told.tokens else told)
    return Response(msgspec.json.encode(done), media_type="application/json")


def _here(told: NamedSegmentsReq, manager: Any) -> NamedSegmentsReq:
    """The same with this server's ids of adapters."""
    loaded = manager.lora_registry.get_all_adapters() if manager.server_args.enable_lora else {}
    ids = {"": "", **{name: ref.lora_id for name, ref in loaded.items()}}
    known = [i for i, adapter in enumerate(told.adapters) if adapter in ids]

    def of_known(column: list[Any]) -> list[Any]:
        return [column[i] for i in known]

    return msgspec.structs.replace(
        told,
        names=of_known(told.names),
        tenants=of_known(told.tenants),
        adapters=[ids[adapter] for adapter in of_known(told.adapters)],
        methods=of_known(told.methods),
        tokens=of_known(told.tokens),
    )
