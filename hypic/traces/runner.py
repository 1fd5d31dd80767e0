"""Replays a trace on one engine after the other, each in a process of its own, or on a server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from hypic.bench import dummy
from hypic.bench.provenance import machine, versions
from hypic.bench.runner import check_first
from hypic.commands.serve import flag_value
from hypic.config import STOCK, HypicConfig
from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment
from hypic.processes import end_group
from hypic.traces.child import PROGRESS, RESULT, Order, Progress
from hypic.traces.engines import read_engine
from hypic.traces.format import TraceRequest, write
from hypic.traces.prompts import PromptMaker
from hypic.traces.result import EngineReplay, Plan, ReplayResult
from hypic.traces.session import Session
from hypic.traces.summary import Capacity, summarise
from hypic.traces.targets import HttpTarget

NO_CACHE = "--disable-radix-cache"
STOP_SECONDS = 20
"""How long before the end of the budget an engine has to stop, and how long after that it is killed."""
END_SECONDS = 45
"""For several servers to end once they are told to."""

Say = Callable[[str], None]
Tick = Callable[[str, Progress], None]
Keep = Callable[[ReplayResult], None]


class ReplayError(RuntimeError):
    """No figures can be given; the text says why."""


def new_result(
    requests: Sequence[TraceRequest], plan: Plan, trace: str, capacity: Capacity | None, min_segment: int
) -> ReplayResult:
    """A result without engines. Raises ReplayError: the trace is shorter than its warm-up."""
    if len(requests) <= plan.warmup:
        raise ReplayError(f"{trace}: {len(requests)} requests, and the warm-up alone takes {plan.warmup} (--warmup)")
    encoder = msgspec.json.Encoder()
    digest = hashlib.blake2b(encoder.encode([requests, plan]), digest_size=8).hexdigest()
    found = summarise(requests, warmup=plan.warmup, capacity=capacity, min_segment=min_segment)
    return ReplayResult(
        command=sys.argv,
        versions=versions(),
        machine=machine(),
        trace=trace,
        digest=digest,
        summary=found,
        plan=plan,
        selfcheck={},
    )


def replay(
    result: ReplayResult,
    requests: Sequence[TraceRequest],
    argv: list[str],
    config: HypicConfig,
    *,
    engines: Sequence[str],
    cpu: bool,
    selfcheck: bool,
    stagger: bool,
    deadline: float | None,
    out: Path | None,
    say: Say,
    tick: Tick,
    keep: Keep,
) -> None:
    """Fill `result.engines`; of those that are there already, an engine that was cut short goes on if it is asked for.

    Args:
        engines: names (`hypic.traces.engines`). stagger: several servers load their weights one after the other.
        deadline: `time.time()` at which all must have ended; each engine gets an equal share of what is left when it starts.
        keep: gets the result after every run.

    Raises:
        BenchError, ReplayError: the self-check failed, or an engine ended without a result.
    """
    environ = dict(os.environ) | ({CPU_MODE: "1"} if cpu else {}) | dummy.environment(argv)
    if cpu:
        set_environment(environ, flag_value(argv, "--dtype"))
    before = {e.name: e for e in result.engines}
    todo = [name for name in engines if name not in before or before[name].cut_short]
    if selfcheck and any(read_engine(name).hypic for name in todo):
        result.selfcheck = check_first(argv, environ | config.to_env(), say)
    with tempfile.TemporaryDirectory(prefix="hypic-replay-") as scratch:
        file = Path(scratch) / "requests.jsonl"
        write(requests, file)
        for i, name in enumerate(todo):
            end = None
            if deadline is not None:
                end = time.time() + (deadline - time.time()) / (len(todo) - i)
            stop, folder = end and end - STOP_SECONDS, str(out) if out else None
            order = Order(name, str(file), result.plan, stop, folder, before.get(name), stagger)
            env = environ | (config.to_env() if read_engine(name).hypic else STOCK)
            flags = [*argv, NO_CACHE] if name == "none" and NO_CACHE not in argv else argv
            _engine(order, flags, env, end, result, say, tick, keep)


def _engine(
    order: Order,
    argv: list[str],
    env: Mapping[str, str],
    end: float | None,
    result: ReplayResult,
    say: Say,
    tick: Tick,
    keep: Keep,
) -> None:
    say(f"{order.name}: starting {shlex.join(argv)}")
    command = [sys.executable, "-m", "hypic.traces.child", msgspec.json.encode(order).decode(), *argv]
    child = subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, text=True, start_new_session=True)
    watch = threading.Timer(max(0.0, end + STOP_SECONDS - time.time()) if end else 0.0, _kill, (child,))
    if end:
        watch.start()
    found = None
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(RESULT):
                found = msgspec.json.decode(line[len(RESULT) :], type=EngineReplay)
                result.engines = [*(e for e in result.engines if e.name != order.name), found]
                keep(result)
            elif line.startswith(PROGRESS):
                tick(order.name, msgspec.json.decode(line[len(PROGRESS) :], type=Progress))
            else:
                say(line.rstrip())
        code = child.wait()
    finally:
        watch.cancel()
        _kill(child)
    if found is None:
        late = end is not None and time.time() >= end - STOP_SECONDS
        why = "its share of --budget ended first" if late else "see its log above"
        raise ReplayError(f"the engine {order.name!r} ended with exit code {code} and without a result; {why}")
    if code:
        found.cut_short = True
        keep(result)


def _kill(child: subprocess.Popen[str]) -> None:
    """End the child and the processes of its engine; servers that it started it ends itself, as they may hold GPUs."""
    end_group(child, END_SECONDS)


def replay_url(
    result: ReplayResult,
    requests: Sequence[TraceRequest],
    url: str,
    *,
    hypic: bool,
    model: str,
    key: str | None,
    vocab: int,
    deadline: float | None,
    flush: bool,
    out: Path | None,
    say: Say,
    tick: Tick,
    keep: Keep,
) -> None:
    """Replay on a server. Without `flush` its caches are left as they are, and so is the warm-up.

    Raises:
        RuntimeError: the caches cannot be flushed, or the warm-up failed.
    """
    found = EngineReplay(name="url", flags=[url], settings={"segments": hypic, "model": model})
    result.engines.append(found)
    left = float("inf") if deadline is None else deadline - time.time()

    async def ask() -> None:
        async with HttpTarget(url, hypic=hypic, model=model, key=key) as target:
            if not flush:
                target.flush = _nothing  # type: ignore[method-assign]
            await Session(
                target,
                PromptMaker(vocab, result.plan.seed),
                requests,
                result.plan,
                found,
                deadline=time.perf_counter() + left,
                say=say,
                tick=lambda what, done, total: tick("url", Progress(what, done, total)),
                keep=lambda _: keep(result),
                out=out,
            ).run()

    asyncio.run(ask())


async def _nothing() -> None:
    return
