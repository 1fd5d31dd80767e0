"""What the scatter suite does and yields: a part of the schema of bench.json."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from hypic.router.costs import Costs

SIGNAL = 3.0
"""How many times the tolerance another document must change an answer, or that two answers agree says nothing."""


class Scatter(msgspec.Struct, frozen=True, kw_only=True):
    """What the suite does.

    Attributes:
        workers: numbers of workers. counts: numbers of segments, one length of prompt each; () is the workload's.
        stock: time stock SGLang too. tp: and once more on so many GPUs; 0 is not.
        budget: seconds for all of it; what does not fit is left out and named. None is no bound.
        stagger: load weights in one worker after the other.
    """

    workers: tuple[int, ...] = (1, 2)
    counts: tuple[int, ...] = ()
    stock: bool = False
    tp: int = 0
    budget: float | None = None
    stagger: bool = False


class Sample(msgspec.Struct, kw_only=True):
    """One cold prompt, in milliseconds.

    Attributes:
        ttft: at the client. forwarded: until the router let it go to its worker.
        compile: from the first compile's begin to the last one's end. exposed: from then to the last artifact's arrival. link:
            from then to the first token at the router.
        workers: how many compiled for it.
        timeline: as in its report.
    """

    ttft: float
    forwarded: float
    compile: float
    exposed: float
    link: float
    workers: int
    timeline: dict[str, Any]


class ScatterRun(msgspec.Struct, kw_only=True):
    """One number of workers and one policy at one workload.

    Attributes:
        predicted: TTFT in ms by the simulation from this benchmark's own costs.
        ideal: T_compile / N + T_link, both of one worker; None without that.
        makespan_bound: no schedule compiles sooner, by the speed of one worker.
    """

    workers: int
    policy: str
    workload: str
    segments: list[int]
    samples: list[Sample]
    predicted: float | None = None
    ideal: float | None = None
    makespan_bound: float | None = None

    def median(self, field: str) -> float:
        return statistics.median(getattr(s, field) for s in self.samples)

    @property
    def gb_per_s(self) -> float | None:
        """Median rate of single transfers; several at a time share a pipe."""
        lines = [x for s in self.samples for x in s.timeline["segments"] if x["arrived"] is not None]
        rates = [x["nbytes"] / 1e6 / (x["arrived"] - x["sent"]) for x in lines if x["arrived"] > x["sent"]]
        return statistics.median(rates) if rates else None


class StockRun(msgspec.Struct, kw_only=True):
    """Stock SGLang at one workload, on `gpus` GPUs: TTFT in ms of each repetition."""

    gpus: int
    workload: str
    segments: list[int]
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Agreement(msgspec.Struct, kw_only=True):
    """Whether several workers answer as one does.

    Attributes:
        prompts: how many were compared. split: how many of them several workers compiled. same_tokens: how many answers
            were the same.
        worst: largest difference of logprobs. tolerance: bound on it.
        signal: what another first segment changes. A model whose answer hardly depends on it (random weights) shows nothing.
        noise: what one worker's answer changes by when its segments are compiled one by one; None in float32.
    """

    prompts: int
    split: int
    same_tokens: int
    worst: float
    tolerance: float
    signal: float
    noise: float | None = None

    @property
    def passed(self) -> bool | None:
        """None: the comparison could not have failed."""
        if self.worst > self.tolerance or (self.noise is None and self.same_tokens < self.prompts):
            return False
        return True if self.signal > SIGNAL * self.tolerance else None


class ScatterResult(msgspec.Struct, kw_only=True):
    """All of it, and the costs that were measured on the way: a file for `hypic simulate` and `hypic launch --costs`.

    Attributes:
        left_out: what the budget did not suffice for, and what failed.
    """

    runs: list[ScatterRun] = []
    costs: Costs | None = None
    stock: list[StockRun] = []
    agreement: Agreement | None = None
    left_out: list[str] = []
