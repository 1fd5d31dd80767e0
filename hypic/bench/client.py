"""Timed requests to an engine in this process: from `generate(input_ids=…)` to the first token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypic.bench.workload import Prompt


class Timed(NamedTuple):
    """One request: ms to its first token, its `cached_tokens`, and tokens per second after the first (0 if there are none)."""

    ttft: float
    cached: int
    decode: float


class Client:
    """Sends prompts to `engine`; to hypic with their segments, to stock SGLang without."""

    def __init__(self, engine: Any, hypic: bool) -> None:
        self._engine, self.hypic = engine, hypic
        self.vocab: int = engine.tokenizer_manager.model_config.vocab_size
        self.longest: int = engine.tokenizer_manager.max_req_input_len - 1
        """Tokens of the longest prompt that the engine takes: of its context, or of what its KV pool holds."""

    def ask(self, prompt: Prompt, new_tokens: int = 1) -> Timed:
        """One request, alone."""
        return self._engine.loop.run_until_complete(self._ask(prompt, new_tokens))

    def ask_together(self, prompts: Sequence[Prompt], new_tokens: int = 1) -> tuple[list[Timed], float]:
        """Requests sent at once: each of them, and the seconds until the last one ended."""

        async def together() -> list[Timed]:
            return await asyncio.gather(*(self._ask(p, new_tokens) for p in prompts))

        began = time.perf_counter()
        answers = self._engine.loop.run_until_complete(together())
        return answers, time.perf_counter() - began

    async def _ask(self, prompt: Prompt, new_tokens: int) -> Timed:
        from sglang.srt.managers.io_struct import GenerateReqInput

        ids, bounds = prompt
        sampling = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
        request: Any = GenerateReqInput(input_ids=ids, sampling_params=sampling, stream=True)
        if self.hypic and bounds:
            request.hypic = {"segments": bounds}
        began = time.perf_counter()
        first = last = began
        first_count = count = cached = 0
        async for chunk in self._engine.tokenizer_manager.generate_request(request, None):
            last, count = time.perf_counter(), chunk["meta_info"]["completion_tokens"]
            if not first_count and count:
                first, first_count, cached = last, count, chunk["meta_info"]["cached_tokens"]
        if not first_count:
            raise RuntimeError("the engine ended a request without a token")
        return Timed(
            (first - began) * 1e3, cached, (count - first_count) / (last - first) if count > first_count else 0.0
        )
