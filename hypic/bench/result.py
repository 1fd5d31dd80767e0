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
        values: every repetition, in order.
        unit: of the values: "ms" or "tok/s".
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


class BenchResult(msgspec.Struct, kw_only=True):
    """All of one `hypic bench`.

    Attributes:
        versions, machine: of what ran, and where.
        workload: of the ttft and concurrency suites; the seed of all. seam_window: of the hypic engine.
        selfcheck: entries of `hypic selfcheck --json` under the same flags; empty if it was not run.
        fit: coefficients of the scale suite (`hypic.bench.report.fit`), or None.
        artifact_share: what building and capturing artifacts takes, by the kernels suite, of hypic's cold TTFT.
        scatter: the scatter suite's runs and costs (`hypic.bench.scatter`), or None.
    """

    command: list[str]
    versions: dict[str, str]
    machine: dict[str, str]
    workload: dict[str, int]
    seam_window: int
    selfcheck: dict[str, Any]
    engines: list[EngineRun]
    fit: dict[str, float] | None = None
    artifact_share: float | None = None
    scatter: ScatterResult | None = None
