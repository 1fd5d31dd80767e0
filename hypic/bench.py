"""TTFT of linked prompts against stock SGLang: the same token ids, side by side, one engine after the other.

Every figure is the time from `generate(input_ids=…)` to the first token, batch 1, in process: no tokenising, no HTTP.
Stock runs are SGLang with the plugin off. `hypic bench` drives this module in one child process per engine, since SGLang
loads plugins once per process::

    stock    cold         a prompt never seen, full recompute
             prefix hit   the same documents in the same order, a new query: SGLang's own prefix cache
    hypic    cold         every segment is compiled, then linked
             warm         every segment is in the store; order shuffled, query new
             turn         the next turn: the same documents in the same order, a new query
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

FIRST_TOKEN = 1000
"""Ids below are left out: they may be special tokens."""


class Workload(msgspec.Struct, frozen=True):
    """One shape of prompt: system tokens, segments, query tokens."""

    system: int = 32
    segments: int = 16
    segment_tokens: int = 2048
    query: int = 64
    reps: int = 5
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.system + self.segments * self.segment_tokens + self.query


class Timing(msgspec.Struct):
    """TTFT of one case.

    Attributes:
        engine: "stock" or "hypic". case: see the module's docstring.
        ms: every repetition, in order. cached: `cached_tokens` of every repetition.
    """

    engine: str
    case: str
    ms: list[float]
    cached: list[int]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


class _Prompts:
    """Prompts of one workload, drawn from a seed."""

    def __init__(self, workload: Workload, vocab: int):
        self.workload, self._vocab = workload, vocab
        self._rng = random.Random(workload.seed)
        self._system = self.tokens(workload.system)

    def tokens(self, n: int) -> list[int]:
        first = min(FIRST_TOKEN, self._vocab // 2)
        return [self._rng.randrange(first, self._vocab) for _ in range(n)]

    def documents(self) -> list[list[int]]:
        return [self.tokens(self.workload.segment_tokens) for _ in range(self.workload.segments)]

    def shuffled(self, documents: list[list[int]]) -> list[list[int]]:
        return self._rng.sample(documents, len(documents))

    def prompt(self, documents: Sequence[list[int]]) -> tuple[list[int], list[list[int]]]:
        """Token ids and segment bounds of system, documents, and a new query."""
        ids, bounds = list(self._system), []
        for document in documents:
            bounds.append([len(ids), len(ids) + len(document)])
            ids += document
        return ids + self.tokens(self.workload.query), bounds


def measure(engine: Any, name: str, workload: Workload, say: Callable[[str], None]) -> list[Timing]:
    """All cases of one engine. `say` gets a line of progress per case.

    Args:
        engine: a running sglang.Engine.
        name: "stock" or "hypic"; the latter marks segments.
    """
    prompts = _Prompts(workload, engine.tokenizer_manager.model_config.vocab_size)

    def ttft(ids: list[int], bounds: list[list[int]]) -> tuple[float, int]:
        from sglang.srt.managers import io_struct

        request = io_struct.GenerateReqInput(
            input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        )
        if name == "hypic":
            request.hypic = {"segments": bounds}
        began = time.perf_counter()
        answer = engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(request, None).__anext__())
        return (time.perf_counter() - began) * 1e3, answer["meta_info"]["cached_tokens"]

    def case(label: str, draw: Callable[[], tuple[list[int], list[list[int]]]]) -> Timing:
        runs = [ttft(*draw()) for _ in range(workload.reps + 1)][1:]  # the first one warms up
        timing = Timing(name, label, [ms for ms, _ in runs], [cached for _, cached in runs])
        say(f"{name} {label}: {timing.median:.1f} ms (n={len(runs)}, cached {timing.cached[0]} of {workload.tokens})")
        return timing

    fixed = prompts.documents()
    out = [case("cold", lambda: prompts.prompt(prompts.documents()))]
    if name == "stock":
        ttft(*prompts.prompt(fixed))
        out.append(case("prefix hit", lambda: prompts.prompt(fixed)))
    else:
        ttft(*prompts.prompt(fixed))
        out.append(case("warm", lambda: prompts.prompt(prompts.shuffled(fixed))))
        out.append(case("turn", lambda: prompts.prompt(fixed)))
    return out
