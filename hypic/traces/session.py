"""What a Plan does on one target: a plain replay, the search for the highest rate, the sweep of the cached share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hypic.traces.figures import Slo, figures
from hypic.traces.format import Span, TraceRequest
from hypic.traces.play import Due, Limits, Outcome, Played, Target, fill, play, scaled
from hypic.traces.prompts import PromptMaker
from hypic.traces.result import EngineReplay, Plan, Run
from hypic.traces.search import highest

FRESH = 1 << 40
"""Numbers of requests that are drawn here and are in no trace."""


class OutOfTime(Exception):
    """The budget has ended."""


class Session:
    """Runs a Plan on one target; results are put into `result` as they come, behind those that an earlier session left there.

    Args:
        requests: warm-up, then those that are timed.
        keeps: the target has caches: it is flushed and warmed before every run.
        deadline: `time.perf_counter()` at which all ends.
        say: gets a line per run. tick: gets (what, done, of how many).
        out: a folder for one JSONL of outcomes per run.
    """

    def __init__(
        self,
        target: Target,
        maker: PromptMaker,
        requests: Sequence[TraceRequest],
        plan: Plan,
        result: EngineReplay,
        *,
        keeps: bool = True,
        deadline: float = float("inf"),
        say: Callable[[str], None] = lambda _: None,
        tick: Callable[[str, int, int], None] = lambda *_: None,
        keep: Callable[[EngineReplay], None] = lambda _: None,
        out: Path | None = None,
    ) -> None:
        self._target, self._maker, self._plan, self.result = target, maker, plan, result
        self._keeps, self._deadline, self._say, self._tick, self._keep, self._out = (
            keeps,
            deadline,
            say,
            tick,
            keep,
            out,
        )
        self._warm = [Due(i, r, 0.0) for i, r in enumerate(requests[: plan.warmup])]
        self._timed = list(requests[plan.warmup : plan.warmup + plan.requests])

    async def run(self) -> None:
        """All of the plan, or as much of it as the deadline allows."""
        plan = self._plan
        try:
            if plan.find:
                found = await highest(
                    self._probe, plan.start_qps, tolerance=plan.tolerance, probes=plan.probes,
                    passed=self.result.highest, failed=self.result.failed,
                )  # fmt: skip
                self.result.highest, self.result.failed, self.result.search_end = found
            elif plan.qps is not None or not plan.sweep:
                await self._timed_run("replay", scaled(self._timed, plan.warmup, qps=plan.qps, speedup=plan.speedup))
            if plan.sweep:
                await self._sweep()
        except OutOfTime:
            pass
        self.result.cut_short = time.perf_counter() > self._deadline
        self._keep(self.result)

    async def _probe(self, qps: float) -> bool | None:
        try:
            run = await self._timed_run("probe", scaled(self._timed, self._plan.warmup, qps=qps), qps)
        except OutOfTime:
            return None
        if run.passed:
            self.result.highest = qps
        elif run.passed is False:
            self.result.failed = qps
        self._keep(self.result)
        return run.passed

    async def _timed_run(self, kind: Literal["replay", "probe"], due: list[Due], qps: float | None = None) -> Run:
        plan = self._plan
        if plan.seconds is not None:
            due = [d for d in due if d.at <= plan.seconds]
        took = await self._ready(self._warm if self._keeps else self._warm[:1])
        slo = plan.slo
        giving_up = kind == "probe" and slo.ttft is not None
        limits = Limits(plan.timeout, self._deadline)
        if giving_up:
            limits = limits._replace(ttft=slo.ttft or 0.0, lost=slo.may_lose(len(due)))
        played = await self._play(f"{qps:.2f} requests/s" if qps else kind, due, limits)
        run = Run(
            kind=kind, figures=figures(played, slo, plan.max_lag), qps=qps or plan.qps, end=played.end, warmup_seconds=took
        )  # fmt: skip
        if kind == "probe":
            run.passed = _verdict(run, slo)
        self._add(run, played)
        return run

    async def _sweep(self) -> None:
        plan = self._plan
        first_turns = [r for r in self._timed if not r.turn and any(not s.plain for s in r.segments)]
        requests = first_turns[: plan.sweep_requests]
        had = {r.share for r in self.result.runs if r.end == "complete"}
        for share in (s for s in plan.sweep if s not in had):
            rng = random.Random(f"{plan.seed}:sweep")  # the same order of choice for every share
            mixed = [share_cached(r, share, rng, f"{share}.{i}") for i, r in enumerate(requests)]
            warm = holding([r for r, _ in mixed], [kept for _, kept in mixed], rng)
            took = await self._ready(warm if self._keeps else [])
            outcomes: list[Outcome] = []
            ended = "complete"
            for i, (request, _) in enumerate(mixed):
                limits = Limits(plan.timeout, self._deadline)
                one = await self._play(f"{100 * share:.0f}% cached", [Due(FRESH + i, request, 0.0)], limits)
                outcomes += one.outcomes
                ended = one.end if one.end != "complete" else ended
                if ended != "complete":
                    break
            played = Played(outcomes, ended)
            run = Run(
                kind="sweep", figures=figures(played, plan.slo, plan.max_lag), share=share, end=ended, warmup_seconds=took
            )  # fmt: skip
            self._add(run, played)

    async def _ready(self, warm: Sequence[Due]) -> float:
        """Bring the caches into the state that every run begins with; the seconds it took. Raises OutOfTime."""
        began = time.perf_counter()
        if began > self._deadline:
            raise OutOfTime
        await self._target.flush()
        self._tick("warm-up", 0, len(warm))
        if not await fill(warm, self._target, self._maker, at_once=self._plan.warmup_at_once, deadline=self._deadline):
            raise OutOfTime
        return time.perf_counter() - began

    async def _play(self, what: str, due: list[Due], limits: Limits) -> Played:
        ended = 0

        def done(_: Outcome) -> None:
            nonlocal ended
            ended += 1
            self._tick(what, ended, len(due))

        self._tick(what, 0, len(due))
        return await play(due, self._target, self._maker, limits, done)

    def _add(self, run: Run, played: Played) -> None:
        number = len(self.result.runs)
        self.result.runs.append(run)
        self._say(f"{self.result.name}: {line(run)}")
        if self._out:
            encoder = msgspec.json.Encoder()
            lines = [encoder.encode(o) for o in played.outcomes]
            (self._out / f"{self.result.name.replace(':', '-')}-{number}.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        self._keep(self.result)


def _verdict(run: Run, slo: Slo) -> bool | None:
    """Losing the SLO is certain however a run ended, unless it was the client's fault; keeping it needs the whole run."""
    if not run.figures.kept_up or run.end == "budget":
        return None
    return run.end == "complete" and run.figures.met >= slo.share - 1e-9


def share_cached(
    request: TraceRequest, share: float, rng: random.Random, name: str
) -> tuple[TraceRequest, set[str | int]]:
    """`request` with about `share` of its segment tokens as they are, and other segments in place of the rest.

    Returns the ids of those that stay. The choice for a larger share contains that for a smaller one, if `rng` begins alike.
    """
    marked = list({s.id: s for s in request.segments if not s.plain}.values())
    rng.shuffle(marked)
    wanted, kept, held = share * sum(s.len for s in marked), set[str | int](), 0
    for span in marked:
        if held + span.len / 2 <= wanted:
            kept.add(span.id)
            held += span.len
    spans = [s if s.plain or s.id in kept else Span(f"{s.id} anew {name}", s.len) for s in request.segments]
    return msgspec.structs.replace(request, segments=spans, hash_ids=None), kept


def holding(requests: Sequence[TraceRequest], kept: Sequence[set[str | int]], rng: random.Random) -> list[Due]:
    """Requests that bring the `kept` segments of `requests` into a cache, in another order and with another question."""
    found = []
    for i, (request, ids) in enumerate(zip(requests, kept, strict=True)):
        spans = [s for s in request.segments if s.id in ids]
        rng.shuffle(spans)
        size = sum(s.len for s in spans) + 1
        one = msgspec.structs.replace(request, segments=spans, input_length=size, output_length=1, hash_ids=None)
        found.append(Due(2 * FRESH + i, one, 0.0))
    return [d for d in found if d.request.segments]


def line(run: Run) -> str:
    """A run in a line of text."""
    f = run.figures
    what = f"{run.qps:.2f} requests/s" if run.qps else f"{100 * run.share:.0f}% cached" if run.share is not None else ""
    p95 = "failed" if f.ttft["p95"] is None else f"{f.ttft['p95']:.3f} s"
    verdict = {True: "kept the SLO", False: "lost the SLO", None: ""}[run.passed]
    more = [f"{f.errors} errors"] * bool(f.errors) + [f"{f.timeouts} timeouts"] * bool(f.timeouts)
    more += [f"{f.cut} cut ({run.end})"] * bool(f.cut) + ["THE CLIENT COULD NOT KEEP UP"] * (not f.kept_up)
    parts = (
        f"{run.kind} {what}".strip(),
        f"p95 TTFT {p95}",
        f"n = {f.requests}",
        f"{100 * f.cached:.0f}% cached",
        verdict,
    )
    return ", ".join([p for p in parts if p] + more)
