"""What a benchmark yields: the schema of its JSON."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from hypic.bench.scatter_result import ScatterResult


class Timing(msgspec.Struct, kw_only=True):
    """Repetitions of one case on one engine.

    Attributes:
        suite, case: what was timed (`hypic.bench.suites`).
        values: every repetition, in order; of an error, every head.
        unit: of the values: "ms", "tok/s", or "of |h|", an error relative to a state.
        cached: `cached_tokens` of every repetition, where it has a meaning.
        shape: numbers that say which point of a sweep this is (segments, segment_tokens, computed, pairs, together).
    """

    suite: str
    case: str
    values: list[float]
    unit: str = "ms"
    cached: list[int] = []
    shape: dict[str, int] = {}

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class EngineRun(msgspec.Struct, kw_only=True):
    """One engine and what it was timed at.

    Attributes:
        name: "stock", "hypic", or "stock FLAGS" for a further baseline.
        flags: SGLang's command line. settings: what SGLang made of them, where it matters to the figures.
        start_seconds: until the engine was ready.
    """

    name: str
    flags: list[str]
    settings: dict[str, Any]
    start_seconds: float
    timings: list[Timing]


class ArtifactCost(msgspec.Struct, kw_only=True):
    """Milliseconds that building the artifacts of the workload's segments takes (`hypic.bench.artifact_cost`).

    Attributes:
        per_layer: of each kernel, for what one forward pass compiles, in one linear layer. layers: how many there are.
        passes: forward passes in which a cold prompt's segments are compiled.
        once: for all segments and layers together.
        cold, warm: TTFT of hypic in the same run; None if it was not timed.
    """

    per_layer: dict[str, float] = {}
    layers: int = 0
    passes: int = 0
    once: dict[str, float] = {}
    cold: float | None = None
    warm: float | None = None

    @property
    def total(self) -> float:
        return self.passes * self.layers * sum(self.per_layer.values()) + sum(self.once.values())

    @property
    def share(self) -> float | None:
        """Of what a cold prompt takes longer than a warm one; None where that is nothing, or unknown."""
        if self.cold is None or self.warm is None or self.cold <= self.warm:
            return None
        return self.total / (self.cold - self.warm)


class BenchResult(msgspec.Struct, kw_only=True):
    """All of one `hypic bench`.

    Attributes:
        versions, machine: of what ran, and where.
        workload: of the ttft and concurrency suites; the seed of all. seam_window: of the hypic engine.
        dummy_horizon: tokens that dummy weights are made to remember on all engines and servers (`hypic.bench.dummy`); 0: they
            are as SGLang draws them; None: there are no dummies. What engines found in their parameters is in their settings.
        selfcheck: entries of `hypic selfcheck --json` under the same flags; empty if it was not run.
        fit: coefficients of the scale suite (`hypic.bench.report.fit`), or None.
        artifact_cost: what building and capturing artifacts takes, by the kernels suite, or None. artifact_share: of what hypic's
            cold TTFT is longer than its warm one.
        scatter: the scatter suite's runs and costs (`hypic.bench.scatter`), or None.
    """

    command: list[str]
    versions: dict[str, str]
    machine: dict[str, str]
    workload: dict[str, int]
    seam_window: int
    dummy_horizon: int | None = None
    selfcheck: dict[str, Any]
    engines: list[EngineRun]
    fit: dict[str, float] | None = None
    artifact_cost: ArtifactCost | None = None
    artifact_share: float | None = None
    scatter: ScatterResult | None = None
