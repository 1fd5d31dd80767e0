"""One engine, or several servers, in a process of its own: does a Plan, prints progress and, after every run, an EngineReplay."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from hypic.bench.child import launched
from hypic.check.workers import model_facts
from hypic.commands.serve import flag_value
from hypic.traces.engines import read_engine, servers
from hypic.traces.format import read_native
from hypic.traces.play import Target
from hypic.traces.prompts import PromptMaker
from hypic.traces.result import EngineReplay, Plan
from hypic.traces.session import Session
from hypic.traces.targets import EngineTarget

RESULT = "hypic-replay-result "
PROGRESS = "hypic-replay-progress "
"""What such lines begin with; SGLang prints too."""
TICK_EVERY = 0.5
START_SECONDS = 1800.0


class Order(msgspec.Struct, frozen=True):
    """What a child is told.

    Attributes:
        name: of the engine. requests: a file of those of the trace that are used.
        deadline: `time.time()` at which all ends. out: folder for outcomes, or None.
        before: what an earlier child that was cut short has left.
        stagger: several servers load their weights one after the other.
    """

    name: str
    requests: str
    plan: Plan
    deadline: float | None
    out: str | None
    before: EngineReplay | None = None
    stagger: bool = False


class Progress(msgspec.Struct, frozen=True):
    """`done` of `total` requests of what is going on."""

    what: str
    done: int
    total: int


def run(order: Order, argv: list[str]) -> None:
    requests = list(read_native(Path(order.requests)))
    result = order.before or EngineReplay(name=order.name, flags=argv, settings={})
    last = 0.0

    def tick(what: str, done: int, total: int) -> None:
        nonlocal last
        if done in (0, total) or time.monotonic() - last > TICK_EVERY:
            last = time.monotonic()
            print(PROGRESS + msgspec.json.encode(Progress(what, done, total)).decode(), flush=True)

    def session(target: Target, maker: PromptMaker) -> Session:
        return Session(
            target,
            maker,
            requests,
            order.plan,
            result,
            keeps=engine.kind != "none",
            deadline=time.perf_counter() + left(),
            say=lambda line: print(line, flush=True),
            tick=tick,
            keep=lambda found: print(RESULT + msgspec.json.encode(found, enc_hook=str).decode(), flush=True),
            out=Path(order.out) if order.out else None,
        )

    def left() -> float:
        return float("inf") if order.deadline is None else order.deadline - time.time()

    engine = read_engine(order.name)
    if not engine.servers:
        with launched(argv) as (ours, result.settings, result.start_seconds):
            manager = ours.tokenizer_manager
            maker = PromptMaker(manager.model_config.vocab_size, order.plan.seed, manager.tokenizer)
            ours.loop.run_until_complete(session(EngineTarget(ours, engine.hypic), maker).run())
        return
    maker = PromptMaker(model_facts(Path(flag_value(argv, "--model-path") or ""))[0], order.plan.seed)

    async def ask(target: AbstractAsyncContextManager[Target]) -> None:
        async with target as entered:
            await session(entered, maker).run()

    with servers(engine, argv, dict(os.environ), order.stagger, min(left(), START_SECONDS)) as started:
        result.settings, result.start_seconds = started.settings, started.seconds
        asyncio.run(ask(started.target))


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Order), sys.argv[2:])
