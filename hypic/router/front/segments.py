"""Named segments of a cluster: the registry is the front's, and every worker knows all names.

A name's tokens are put into prompts here, so workers see segments like any others. They know the names to count hits, to pin
and to drop: each does that for the artifacts that it has now or gets later. Who compiles is for placement to say.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from hypic.config import HypicConfig
from hypic.engine.control import NamedSegmentsReq, NamedSegmentsReqOutput
from hypic.engine.http.from_router import PATH
from hypic.engine.http.registry import Record
from hypic.engine.http.segments import Segments
from hypic.engine.named import UNKNOWN, Look

if TYPE_CHECKING:
    from hypic.router.front.manager import RouterManager

logger = logging.getLogger(__name__)

_BEST_FIRST = ("ready", "compiling", "absent")


class RoutedSegments(Segments):
    """Args: the front's tokenizer manager, and the plugin's settings."""

    def __init__(self, manager: RouterManager, config: HypicConfig):
        super().__init__(manager, config)
        self._front = manager
        self._pins: set[str] = set()

    async def introduce(self, http: str) -> bool:
        """Have a worker that will be used from now on know all names and no others. False if it does not answer.

        What changes meanwhile, which it is not told, is told once more; nothing can change between that and our return.
        """
        told = None
        while told != (now := ([r.id for r in self.registry.all()], set(self._pins))):
            told = now
            orders = [_naming("reset", self.registry.all()), NamedSegmentsReq(action="pin", names=sorted(self._pins))]
            for order in orders:
                if (answer := (await self._all({"": http}, order)).get("")) is None:
                    return False
                if answer.refused:
                    logger.warning("named segments of the worker at %s are not pinned: %s", http, answer.refused)
        return True

    async def ask(self, request: NamedSegmentsReq) -> NamedSegmentsReqOutput:
        """Have all workers do it. What there is of a name is what there is anywhere; pins are refused if one refuses."""
        names, before = set(request.names), set(self._pins)
        if request.action == "pin":
            self._pins |= names
        elif request.action in ("unpin", "forget", "drop"):
            self._pins -= names
        answers = list((await self._all(self._front.alive(), request)).values())
        refused = next((a.refused for a in answers if a.refused), "")
        if refused:
            self._pins -= (new := names - before)
            await self._all(self._front.alive(), NamedSegmentsReq(action="unpin", names=sorted(new)))
        looks = [_anywhere(of_one) for of_one in zip(*(a.looks() for a in answers), strict=True)]
        looks = looks or [UNKNOWN] * len(request.names)
        states, nbytes, hits, pinned = (
            (list(column) for column in zip(*looks, strict=True)) if looks else ([], [], [], [])
        )
        return NamedSegmentsReqOutput(states=states, nbytes=nbytes, hits=hits, pinned=pinned, refused=refused)

    async def _compile(self, records: dict[str, Record], request: Any) -> None:
        await self._all(self._front.alive(), _naming("learn", records.values()))
        await super()._compile(records, request)

    async def _all(self, workers: Mapping[str, str], request: NamedSegmentsReq) -> dict[str, NamedSegmentsReqOutput]:
        """The answers of those that answer. Who does not is as good as lost, and is told all when it comes back."""
        body, out = msgspec.msgpack.encode(request), {}
        for name, (status, answer) in (await self._front.workers.ask_all(workers, "POST", PATH, body)).items():
            if status == 200:
                out[name] = msgspec.convert(answer, NamedSegmentsReqOutput)
            else:
                logger.warning("worker %s did not %s named segments: %s %s", name, request.action, status, answer)
        return out


def _naming(action: str, records: Iterable[Record]) -> NamedSegmentsReq:
    rows = list(records)
    return NamedSegmentsReq(
        action=action,
        names=[r.id for r in rows],
        tenants=[r.tenant for r in rows],
        adapters=[r.adapter for r in rows],
        methods=[r.method for r in rows],
        tokens=[array("q", r.tokens).tobytes() for r in rows],
    )


def _anywhere(looks: Iterable[Look]) -> Look:
    """What there is of one name on all workers together."""
    states, nbytes, hits, pinned = zip(*looks, strict=True)
    return Look(min(states, key=_BEST_FIRST.index), max(nbytes), sum(hits), any(pinned))
