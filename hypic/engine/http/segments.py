"""Named segments of one server: registered, compiled, looked at, pinned, forgotten.

The registry here knows the tokens, the schedulers the artifacts. A segment is compiled by a request of the tokenizer
manager's that ends as soon as its artifact is there (``RequestSpans.name``): queue limits, aborts, adapters and waiting for
memory are those of every request.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.entrypoints.openai.protocol import DEFAULT_MODEL_NAME
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.utils import TypeBasedDispatcher

from hypic.config import HypicConfig, from_env
from hypic.engine.control import Action, NamedSegmentsReq, NamedSegmentsReqOutput
from hypic.engine.http.models import GenerateReqInput
from hypic.engine.http.options import BadRequest
from hypic.engine.http.registry import Record, Registry, Wanted
from hypic.engine.named import Look
from hypic.method import parse_methods
from hypic.segment import Bounds, RequestSpans, SegmentTokenizer

_TICK = 0.01
"""Shortest time between looks for what has expired."""


class PinRefused(Exception):
    """More than may be pinned."""


class View(NamedTuple):
    """A named segment as clients see it; ``left``: seconds until it expires without a use, None for never."""

    record: Record
    look: Look
    left: float | None


class Segments:
    """Args: SGLang's tokenizer manager, and the plugin's settings."""

    def __init__(self, manager: Any, config: HypicConfig):
        self.registry = Registry(config.segment_memory)
        self.methods = parse_methods(config.methods, config.seam_window)
        self._manager = manager
        self._control: FanOutCommunicator[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def contents(self, content: str | list[int], where: str) -> array[int]:
        """Token ids of a segment; of a text by itself, as where a prompt marks it. Raises BadRequest, which says ``where``."""
        if not isinstance(content, str):
            vocab = self._manager.model_config.vocab_size
            if not all(0 <= i < vocab for i in content):
                raise BadRequest(f"{where}.input_ids: must be at least 0 and less than {vocab}")
            return array("i", content)
        if self._manager.tokenizer is None:
            raise BadRequest(f"{where}.text: this server has no tokenizer (--skip-tokenizer-init); send input_ids")
        try:
            content.encode()
        except UnicodeEncodeError as e:  # JSON can hold it; tokenizers raise errors that do not say so
            raise BadRequest(f"{where}.text: character {e.start} is a lone surrogate; send Unicode text") from None
        return array("i", SegmentTokenizer(self._manager.tokenizer, 0).plain_ids(content))

    def check_base(self, model: str) -> None:
        """Raise BadRequest if ``model``, without an adapter, is another one; "" is this server's."""
        own = self._manager.served_model_name
        if model not in ("", own, self._manager.model_path, DEFAULT_MODEL_NAME):
            raise BadRequest(
                f"model {model!r:.80}: this server has {own!r}; leave it out, or name an adapter: {DEFAULT_MODEL_NAME}:ADAPTER"
            )

    def use(self, tenant: str, name: str) -> array[int]:
        """The tokens of a segment in a prompt. Raises UnknownSegment."""
        return self.registry.use(tenant, name)

    async def register(
        self,
        contents: Sequence[array[int]],
        *,
        tenant: str = "",
        adapter: str = "",
        method: str = "",
        ttl: float | None = None,
        pin: bool = False,
        request: Any = None,
    ) -> list[View]:
        """Remember segments and compile those that are not; returns when all artifacts are there.

        Args:
            contents: token ids of each.
            tenant: the ``cache_salt``.
            adapter: name of a LoRA adapter.
            method: name of a caching method.
            ttl: seconds that they live after this, and after each use; None for ever.
            pin: keep the artifacts in the arena; without it, what is pinned stays so.
            request: FastAPI's; if its client leaves, so does the request.

        Raises:
            BadRequest: empty, or longer than any prompt.
            RegistryFull, PinRefused: no room. The segments are registered in the latter case.
        """
        for i, ids in enumerate(contents):
            self._check(f"segments[{i}]", ids)
        records = self.registry.put(Wanted(tenant, adapter, method, ids, ttl) for ids in contents)
        self._arm()
        await self._compile({r.id: r for r in records}, request)
        if pin:
            await self._pin([r.id for r in records])
        return await self.views(records)

    async def views(self, records: Sequence[Record]) -> list[View]:
        looks = (await self._tell("look", [r.id for r in records])).looks() if records else []
        return [View(r, look, self.registry.left(r)) for r, look in zip(records, looks, strict=True)]

    async def pin(self, tenant: str, name: str, request: Any = None) -> View:
        """Keep its artifact in the arena, compiled anew if it is gone. Raises UnknownSegment, PinRefused."""
        record = self.registry.get(tenant, name)
        await self._compile({name: record}, request)
        await self._pin([name])
        return (await self.views([record]))[0]

    async def unpin(self, tenant: str, name: str) -> View:
        """Raises UnknownSegment."""
        record = self.registry.get(tenant, name)
        await self._tell("unpin", [name])
        return (await self.views([record]))[0]

    async def delete(self, tenant: str, name: str) -> None:
        """Forget it and its artifact. Raises UnknownSegment."""
        self.registry.get(tenant, name)
        self.registry.drop([name])
        await self._tell("drop", [name])

    # ------------------------------------------------------------------ parts

    def _check(self, where: str, ids: array[int]) -> None:
        longest = self._manager.max_req_input_len or self._manager.context_len
        if not ids:
            raise BadRequest(f"{where}: is empty")
        if len(ids) >= longest:
            raise BadRequest(f"{where}: {len(ids)} tokens do not fit into a prompt of less than {longest}; cut it")

    async def _compile(self, records: dict[str, Record], request: Any) -> None:
        obj = GenerateReqInput(
            input_ids=[list(r.tokens) for r in records.values()],
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
            lora_path=next(iter(records.values())).adapter or None,
        )
        obj.plans = [
            RequestSpans(cached=(Bounds(0, len(r.tokens)),), salt=r.tenant, report=True, name=r.id, method=r.method)
            for r in records.values()
        ]
        answers = await anext(self._manager.generate_request(obj, request))
        for record, answer in zip(records.values(), answers, strict=True):
            report = answer["meta_info"].get("hypic")  # none where it was aborted
            span = report["spans"][0] if report else {"reason": "aborted"}
            record.reason = span["reason"] or ("too_short" if span["outcome"] == "too_short" else None)
        if gone := [name for name in records if name not in self.registry]:  # deleted before the schedulers knew them
            await self._tell("forget", gone)

    async def _pin(self, names: list[str]) -> None:
        if refused := (await self._tell("pin", names)).refused:
            raise PinRefused(refused)

    async def _tell(self, action: Action, names: list[str]) -> NamedSegmentsReqOutput:
        return await self.ask(NamedSegmentsReq(action=action, names=names))

    async def ask(self, request: NamedSegmentsReq) -> NamedSegmentsReqOutput:
        """Have the schedulers do it."""
        if self._control is None:
            self._manager.auto_create_handle_loop()
            self._control = FanOutCommunicator(self._manager._dispatch_to_scheduler, 1)
            self._manager._result_dispatcher += TypeBasedDispatcher(
                [(NamedSegmentsReqOutput, self._control.handle_recv)]
            )
        (answer,) = await self._control(request)
        return answer

    def _arm(self) -> None:
        """Look again when the next segment expires, if nobody uses it before."""
        if self._timer is not None:
            self._timer.cancel()
        left = self.registry.next_expiry()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(left, _TICK), self._expire) if left is not None else None

    def _expire(self) -> None:
        if gone := self.registry.expired():
            self.registry.drop(gone)
            task = asyncio.get_running_loop().create_task(self._tell("forget", gone))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._arm()


def attach(_: Any, manager: Any, *__: Any, **___: Any) -> None:
    """After TokenizerManager.__init__: its server's settings are in the environment."""
    manager.hypic_segments = Segments(manager, from_env())


def segments_of(manager: Any) -> Segments:
    """The segments of the server whose tokenizer manager this is, which may be older than our hooks."""
    if "hypic_segments" not in vars(manager):
        attach(None, manager)
    found: Segments = manager.hypic_segments
    return found
