"""Write prompts as lists of documents and gaps, and drive a running engine with them."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypic.check.judge import EXACT, Judge
from hypic.check.session import Answer, Prompt, Session, distance

TINY_VOCAB = range(10, 1500)
PATIENCE = 60.0
"""Seconds to wait for something that takes a moment on an idle machine."""


class Document(NamedTuple):
    """Tokens that are cached as one segment."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class Writer:
    """Random prompts, different for every test (``seed``), the same in every run."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def tokens(self, n: int) -> list[int]:
        return [self._rng.choice(TINY_VOCAB) for _ in range(n)]

    def document(self, n: int) -> Document:
        return Document(self.tokens(n))

    def documents(self, count: int, n: int) -> list[Document]:
        return [self.document(n) for _ in range(count)]

    def prompt(self, *parts: int | list[int] | Document, new_tokens: int = 4, tenant: str = "") -> Prompt:
        """A prompt of its parts: a number is that many new plain tokens, a list is these plain tokens."""
        ids: list[int] = []
        segments: list[tuple[int, int]] = []
        for part in parts:
            if isinstance(part, Document):
                segments.append((len(ids), len(ids) + len(part)))
                ids += part.ids
            else:
                ids += self.tokens(part) if isinstance(part, int) else part
        return Prompt(ids, segments, new_tokens, tenant)


class Driver(Session):
    """A session with the engine's raw requests and controls."""

    def generate(self, **request: Any) -> Any:
        """What ``/generate`` answers (:func:`hypic.engine.http.inprocess.build` has the arguments)."""
        return self.run(self.agenerate(**request))

    async def agenerate(self, **request: Any) -> Any:
        from hypic.engine.http.inprocess import agenerate

        return await agenerate(self._engine, **request)

    async def follow(self, prompt: Prompt, rid: str, began: asyncio.Event, new_tokens: int) -> str:
        """Stream an answer, set ``began`` at its first token; the kind of its finish reason."""
        from hypic.engine.http.inprocess import stream

        params = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        segments = [list(s) for s in prompt.segments]
        chunks = stream(self._engine, input_ids=list(prompt.ids), segments=segments, sampling_params=params, rid=rid)
        reason: dict[str, Any] | None = None
        async for chunk in chunks:
            if chunk["output_ids"]:
                began.set()
            reason = chunk["meta_info"]["finish_reason"]
        assert reason is not None
        return str(reason["type"])

    @property
    def named(self) -> Any:
        """The engine's named segments (:class:`hypic.engine.http.segments.Segments`)."""
        from hypic.engine.http.segments import segments_of

        return segments_of(self.manager)

    async def raw(self, **fields: Any) -> Any:
        """The answer to a GenerateReqInput of these fields."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        return await anext(self.manager.generate_request(GenerateReqInput(**fields), None))

    async def register(self, *documents: Document, **fields: Any) -> list[Any]:
        """What ``POST /v1/segments`` does."""
        return list(await self.named.register([array("i", d.ids) for d in documents], **fields))

    @property
    def manager(self) -> Any:
        """SGLang's TokenizerManager."""
        return self._engine.tokenizer_manager

    async def load_adapter(self, name: str, path: str) -> bool:
        """Load a LoRA adapter; whether it worked."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        wanted = LoadLoRAAdapterReqInput(lora_name=name, lora_path=path)
        return bool((await self.manager.load_lora_adapter(wanted)).success)

    async def unload_adapter(self, name: str) -> bool:
        """Unload it once no request of a client uses it any more."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        unwanted = UnloadLoRAAdapterReqInput(lora_name=name)
        return bool((await self.manager.unload_lora_adapter(unwanted)).success)

    async def new_weights(self, path: Path, *, flush: bool = True) -> None:
        """``/update_weights_from_disk``; waits for all requests unless the engine is paused."""
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        update = UpdateWeightFromDiskReqInput(model_path=str(path), flush_cache=flush)
        success, message, _ = await self.manager.update_weights_from_disk(update, None)
        assert success, message

    async def pause(self, mode: str) -> None:
        """``/pause_generation``."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self.manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager.continue_generation(ContinueGenerationReqInput())

    async def load(self) -> Any:
        """What ``/v1/loads`` is made of."""
        (load,) = await self.manager.get_loads(include=["core"])
        return load

    async def until(self, holds: Callable[[Any], bool], what: str) -> Any:
        """Wait until the engine's load is as wanted; the load. Raises AssertionError."""
        deadline = time.monotonic() + PATIENCE
        while not holds(load := await self.load()):
            assert time.monotonic() < deadline, f"never {what}: {load}"
            await asyncio.sleep(0.002)
        return load

    def interior(self, *documents: Document) -> int:
        """Tokens of documents that come from their artifacts."""
        return sum(len(d) - self.config.seam_window for d in documents)


def assert_close(a: Answer, b: Answer) -> None:
    """Two ways to the same answer: equal up to float noise, and a flipped token only where two were as likely."""
    assert a.logprobs.shape == b.logprobs.shape
    assert distance(a, b) <= EXACT
    first = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), None)
    if first is not None:
        top, second = a.logprobs[first].topk(2).values.tolist()
        assert top - second <= 2 * EXACT, f"token {first} flipped by a margin of {top - second:.1e}"


def assert_equals_oracle(judge: Judge, session: Session, prompt: Prompt, answer: Answer, bound: float = EXACT) -> None:
    """The answer means what docs/SEMANTICS.md says it means, given which segments were linked."""
    truth, linked = judge.link(session, prompt._replace(segments=answer.linked), answer.ids)
    assert linked == answer.linked
    assert distance(answer, truth) <= bound


def spans(report: dict[str, Any], kind: str = "segment") -> list[dict[str, Any]]:
    """Spans of a report as JSON, of one kind."""
    return [s for s in report["spans"] if s["kind"] == kind]


def outcomes(report: dict[str, Any]) -> list[str]:
    """What became of each segment of a report as JSON."""
    return [s["outcome"] for s in spans(report)]


def reasons(answer: Answer) -> Sequence[str | None]:
    """Why each segment was declined, or None."""
    return [s.reason for s in answer.report.spans if s.kind == "segment"]
