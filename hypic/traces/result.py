"""What is replayed, and what comes of it: the schema of replay.json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from hypic.traces.figures import Figures, Slo
from hypic.traces.summary import Summary


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with a trace on each engine.

    Attributes:
        warmup: requests at the head of the trace that fill the caches, `warmup_at_once` at a time, and are not timed.
        requests: how many behind those are timed at most. seconds: a run stops sending after so many.
        qps, speedup: rate of a plain replay; None and 1 leave the trace's own times.
        timeout: of one request. max_lag: bound on the client's p99 lag.
        find: look for the highest rate that keeps the SLO, from `start_qps`, to within `tolerance`, in `probes` runs at most.
        sweep: shares of segment tokens that are cached, each timed with `sweep_requests` requests, one after the other.
        seed: of token ids.
    """

    warmup: int = 0
    warmup_at_once: int = 4
    requests: int = 200
    seconds: float | None = None
    qps: float | None = None
    speedup: float = 1.0
    timeout: float = 60.0
    max_lag: float = 0.05
    slo: Slo = Slo()
    find: bool = False
    start_qps: float = 1.0
    tolerance: float = 0.1
    probes: int = 12
    sweep: tuple[float, ...] = ()
    sweep_requests: int = 10
    seed: int = 0


class Run(msgspec.Struct, kw_only=True):
    """One run on one engine.

    Attributes:
        kind: a plain replay, a probe of the search, or a point of the sweep.
        qps: the rate asked for, None for the trace's own times. share: of the sweep: tokens of segments that were cached.
        passed: of a probe: kept the SLO; None if that cannot be said, because time ran out or the client could not keep up.
        end: "complete", "slo" (given up, since the SLO was lost) or "budget" (time ran out).
        warmup_seconds: what filling the caches took.
    """

    kind: Literal["replay", "probe", "sweep"]
    figures: Figures
    qps: float | None = None
    share: float | None = None
    passed: bool | None = None
    end: str = "complete"
    warmup_seconds: float = 0.0


class EngineReplay(msgspec.Struct, kw_only=True):
    """All runs on one engine.

    Attributes:
        name: "hypic", "prefix" (stock SGLang), "none" (stock without its radix cache), "cluster:8", "prefix:8" (independent
            servers), or "url".
        highest, failed, search_end: of the search: the highest rate that passed, the lowest that failed, why it ended.
        cut_short: the budget ended before all runs were made.
    """

    name: str
    flags: list[str]
    settings: dict[str, Any]
    start_seconds: float = 0.0
    runs: list[Run] = []
    highest: float | None = None
    failed: float | None = None
    search_end: str | None = None
    cut_short: bool = False


class ReplayResult(msgspec.Struct, kw_only=True):
    """All of one `hypic replay`.

    Attributes:
        trace: its file or spec. digest: of the requests that were used; results with another digest cannot be compared.
        summary: of those requests (`hypic.traces.summary`), warm-up left out.
        selfcheck: entries of `hypic selfcheck --json` under the same flags; empty if it was not run.
    """

    command: list[str]
    versions: dict[str, str]
    machine: dict[str, str]
    trace: str
    digest: str
    summary: Summary
    plan: Plan
    selfcheck: dict[str, Any]
    engines: list[EngineReplay] = []
