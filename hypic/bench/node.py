"""``python -m hypic.bench.node MODEL --out DIR --workers 8``: all that a node of several GPUs has to show, in one bounded run.

Servers are started three times: a cluster of N workers (cold prompts on 1 to N of them, agreement, a trace), N independent stock
servers (cold on one of them, the same trace), and one stock server on N GPUs (cold). Each stage has a share of what is left of
the budget, and one that fails leaves the others alone. scripts/gpu/node.sh has the flags for GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch

from hypic.bench import dummy, node_report
from hypic.bench.agreement import compare
from hypic.bench.provenance import machine, versions
from hypic.bench.result import BenchResult
from hypic.bench.runner import kept_flags, tiny_kind
from hypic.bench.scatter import Bench, stock_alone, time_all
from hypic.bench.scatter_report import reckon
from hypic.bench.scatter_result import Agreement, Scatter, ScatterResult
from hypic.bench.workload import Workload
from hypic.check.tiny_models import build
from hypic.check.workers import check_workers, model_facts
from hypic.commands.flags import take_hypic_flags
from hypic.commands.serve import flag_value, timed_argv, wants_cpu
from hypic.config import from_env
from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment
from hypic.processes import end
from hypic.router.launch.running import log_end, running
from hypic.router.launch.stock import stock_servers
from hypic.traces.engines import cluster_target, prefix_target, read_engine, settings
from hypic.traces.figures import Slo
from hypic.traces.generate import generate
from hypic.traces.placement import PLACEMENTS
from hypic.traces.prompts import PromptMaker
from hypic.traces.result import EngineReplay, Plan
from hypic.traces.runner import new_result
from hypic.traces.session import Session
from hypic.traces.spec import read_spec

STAGES = {"transfers": 3, "cluster": 10, "stock": 6, "tp": 4, "answers": 4}
"""In their order, and the weight of each among those that are left."""
LOG_SHOWN = 8000
GRACE = 15
"""Seconds after its time before a stage is broken off; it should have ended by itself."""
FIRST_POLICY = 0.65
"""Share of the time for a trace on stock servers that the better way of placing prompts gets."""


SMALL = (
    "--mem-fraction-static", "0.15", "--max-total-tokens", "60000", "--context-length", "8192", "--max-running-requests", "16",
    "--cuda-graph-max-bs-prefill", "512", "--hypic-memory", "2GiB",
)  # fmt: skip
"""Flags for a tiny model on a GPU: it starts sooner. Artifacts come out of SGLang's share of the memory, too."""
ROUNDS, LAYOUTS = 2, 8
"""Prompts of P3 and P4: kernels are compiled anew for a tiny model, and for lengths that were not seen before."""
LATE = 5
"""Seconds after the budget before the last stage is broken off; its servers may take longer to end."""


class Overtime(KeyboardInterrupt):
    """A stage did not end by itself. Like Ctrl-C, it is nothing that an event loop or `except Exception` may keep."""


class Node:
    """One run. Stages get the `time.monotonic()` at which they should have ended."""

    def __init__(self, args: argparse.Namespace, flags: Sequence[str]) -> None:
        argv, config = take_hypic_flags(timed_argv([args.model, *flags]), from_env())
        self._argv, self._config = argv, msgspec.structs.replace(config, enabled=True)
        self._cpu = wants_cpu(argv, os.environ)
        _look_around(0 if self._cpu else args.workers)
        os.environ.update(self._config.to_env() | ({CPU_MODE: "1"} if self._cpu else {}))
        os.environ.update(inherited := dummy.environment(argv, environ=os.environ))
        made_to_remember = dummy.chosen(inherited)
        if self._cpu:
            set_environment(os.environ, flag_value(argv, "--dtype"))
        self._args, self.out = args, Path(args.out)
        self._model = Path(flag_value(argv, "--model-path") or "")
        self._vocab, _ = model_facts(self._model)
        counts = tuple(int(n) for n in args.segments.split(","))
        work = Workload(segments=counts[0], segment_tokens=args.segment_tokens, reps=args.reps)
        workers = tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if n < args.workers)
        plan = Scatter(workers=(*workers, args.workers), counts=counts, stagger=args.stagger)
        self.scatter = Bench(work, plan, self._vocab, _say, self._keep_scatter)
        self.found = node_report.NodeResult(workers=args.workers, budget=args.budget)
        trace = Plan(
            warmup=args.warmup, warmup_at_once=2 * args.workers, requests=args.requests, seconds=args.seconds, timeout=30.0,
            max_lag=args.max_lag, slo=Slo(args.slo_ttft), find=True, start_qps=args.start_qps * args.workers, tolerance=0.15,
        )  # fmt: skip
        self._used = list(islice(generate(read_spec(Path(args.spec))), args.warmup + args.requests))
        self.replay = new_result(self._used, trace, args.spec, None, self._config.min_segment)
        self.bench = BenchResult(
            command=sys.argv, versions=versions(), machine=machine(), workload=msgspec.to_builtins(work),
            seam_window=self._config.seam_window, selfcheck={}, engines=[], scatter=self.scatter.result,
            dummy_horizon=made_to_remember,
        )  # fmt: skip
        self._end = 0.0
        self.stages: dict[str, Callable[[float], None]] = {
            "transfers": self._transfers,
            "cluster": self._cluster,
            "stock": self._stock,
            "tp": self._tp,
            "answers": self._answers,
        }

    def run(self) -> None:
        """The stages, as far as the budget goes."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._end = time.monotonic() + self._args.budget
        for name in self._args.stages:
            began = time.monotonic()
            seconds = self._share(name)
            _say(f"--- {name}: {seconds:.0f} s of {self._end - began:.0f} left")
            try:
                with _at_most(self._limit(began + seconds)):
                    self.stages[name](began + seconds)
            except (Exception, Overtime) as e:
                self.found.failed[name] = f"{type(e).__name__}: {e}"
                _say(f"{name} failed: {type(e).__name__}: {e}")
            finally:
                self.found.seconds[name] = time.monotonic() - began
                self._write()

    def _share(self, name: str) -> float:
        """Seconds of those that are left, for a stage that begins now."""
        names = self._args.stages
        weights = [STAGES[n] for n in names[names.index(name) :]]
        return (self._end - time.monotonic()) * weights[0] / sum(weights)

    def _limit(self, deadline: float) -> float:
        """Seconds from now until a stage is broken off."""
        return min(deadline + GRACE, self._end + LATE) - time.monotonic()

    def _started(self, name: str, began: float, deadline: float) -> float:
        """Servers are up: the deadline, or a later one if that took most of the time, as where kernels are compiled."""
        now = time.monotonic()
        if deadline - now > now - began:
            return deadline
        deadline = max(deadline, now + self._share(name))
        signal.setitimer(signal.ITIMER_REAL, self._limit(deadline))
        return deadline

    # ------------------------------------------------------------------ stages

    def _transfers(self, deadline: float) -> None:
        size = ("--device", "cpu", "--mib", "8", "--reps", "2") if self._cpu else ("--device", "cuda", "--reps", "5")
        command = [sys.executable, "-m", "hypic.router.transport.measure", *size]
        lines = _output(command, deadline).splitlines()
        if not lines:
            raise RuntimeError("nothing was measured: see the log above")
        self.found.transfers = json.loads(lines[-1])["ways"]
        if failed := [f"{way}: {told['failed']}" for way, told in self.found.transfers.items() if "failed" in told]:
            raise RuntimeError("; ".join(failed))

    def _cluster(self, deadline: float) -> None:
        log, known = Path(tempfile.mkdtemp(prefix="hypic-node-")) / "cluster.log", len(self.scatter.result.left_out)
        well = False
        try:
            self._on_cluster(log, deadline)
            well = len(self.scatter.result.left_out) == known
        finally:
            if not well:
                _say(f"--- the cluster's log ends with\n{log_end(log, LOG_SHOWN)}")

    def _on_cluster(self, log: Path, deadline: float) -> None:
        n, stagger, began = self._args.workers, self._args.stagger, time.monotonic()
        with running(self._argv, n, stagger=stagger, start_seconds=deadline - began, log=log) as url:
            deadline = self._started("cluster", began, deadline)
            left = deadline - time.monotonic()
            time_all(self.scatter, url, time.monotonic() + 0.6 * left, self._compare)
            name = f"cluster:{n}"
            self._trace(name, cluster_target(url), settings(url, read_engine(name)), deadline)

    def _compare(self, url: str) -> Agreement:
        return compare(url, self.scatter.work, self.scatter.plan, self._model, self._config)

    def _stock(self, deadline: float) -> None:
        n, began = self._args.workers, time.monotonic()
        how: dict[str, Any] = {"cpu": self._cpu, "stagger": self._args.stagger, "start_seconds": deadline - began}
        with stock_servers(self._argv, n, **how) as urls:
            deadline = self._started("stock", began, deadline)
            self.scatter.stock(urls[0], 1, time.monotonic() + 0.4 * (deadline - time.monotonic()))
            for i, policy in enumerate(PLACEMENTS):
                name = f"prefix:{n}:{policy}"
                found = settings(urls[0], read_engine(name))
                left = (deadline - time.monotonic()) * (1.0 if i else FIRST_POLICY)
                self._trace(name, prefix_target(urls, policy, found), found, time.monotonic() + left)

    def _tp(self, deadline: float) -> None:
        stock_alone(self.scatter, self._argv, self._args.workers, self._cpu, deadline - time.monotonic())

    def _answers(self, deadline: float) -> None:
        """P3 and P4 across workers, of a tiny model of the same kind with weights that mean something, under the same flags."""
        small = () if self._cpu else SMALL
        kind = tiny_kind(self._model)
        found = check_workers(
            kind, build(kind), [*kept_flags(self._argv), *small], self._config, self._args.workers, seed=0,
            progress=lambda what, *_: _say(what), rounds=ROUNDS, layouts=LAYOUTS,
            start_seconds=deadline - time.monotonic(),
        )  # fmt: skip
        for result in found:
            self.found.answers[result.name] = msgspec.to_builtins(result)
            _say(f"{result.name}: {result.status}, {result.detail}")
        if bad := [name for name, entry in self.found.answers.items() if not entry["passed"]]:
            raise RuntimeError(f"{', '.join(bad)} of a tiny model on several workers: see node.json")

    # ------------------------------------------------------------------ helpers

    def _trace(
        self, name: str, target: AbstractAsyncContextManager[Any], told: dict[str, Any], deadline: float
    ) -> None:
        found = EngineReplay(name=name, flags=self._argv, settings=told)
        self.replay.engines.append(found)
        maker, left = PromptMaker(self._vocab, self.replay.plan.seed), deadline - time.monotonic()

        async def run() -> None:
            async with target as entered:
                end = time.perf_counter() + left
                plan = self.replay.plan
                await Session(entered, maker, self._used, plan, found, deadline=end, say=_say).run()

        asyncio.run(run())

    def _keep_scatter(self, result: ScatterResult) -> None:
        reckon(result, self.scatter.work)

    def _write(self) -> None:
        reckon(self.scatter.result, self.scatter.work)
        node_report.write(self.out, self.found, self.bench, self.replay)


def _look_around(gpus: int) -> None:
    """What would otherwise be found after minutes. Raises SystemExit."""
    if not entry_points(group="sglang.srt.plugins", name="hypic"):
        raise SystemExit("SGLang would not find hypic's plugin: pip install -e ., or have hypic.egg-info beside hypic/")
    if gpus and (there := torch.cuda.device_count()) < gpus:
        raise SystemExit(f"--workers {gpus}: there are {there} GPUs")


def _output(command: Sequence[str], deadline: float) -> str:
    """What a command prints. Raises RuntimeError if it takes too long."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        return process.communicate(timeout=deadline - time.monotonic())[0]
    except subprocess.TimeoutExpired:
        raise Overtime(f"{command[2]} took too long") from None
    finally:
        end([process])


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Break the block off after so many seconds, with what it started ended as it is left."""

    def over(*_: Any) -> None:
        raise Overtime(f"broken off after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_arguments(args: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and the flags that are SGLang's and hypic's."""
    parser = argparse.ArgumentParser(prog="python -m hypic.bench.node", description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--out", required=True, help="folder for node.json, bench.json, replay.json, plots, summary.md")
    parser.add_argument("--workers", type=int, default=8, help="workers, and GPUs of the TP group")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all of it")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--segments", default="16,50", help="numbers of segments, one length of prompt each")
    parser.add_argument("--segment-tokens", type=int, default=2048)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--stagger", action="store_true", help="load weights in one worker at a time (host memory)")
    parser.add_argument("--spec", default="traces/rag-production.toml", help="of the trace")
    parser.add_argument("--warmup", type=int, default=64)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=12.0, help="of one run of the trace")
    parser.add_argument("--slo-ttft", type=float, default=1.0)
    parser.add_argument("--start-qps", type=float, default=2.0, help="the first rate to try, for each worker")
    parser.add_argument("--max-lag", type=float, default=0.1)
    found, flags = parser.parse_known_args(args)
    found.stages = found.stages.split(",")
    if unknown := [name for name in found.stages if name not in STAGES]:
        parser.error(f"--stages {unknown[0]}: known are {', '.join(STAGES)}")
    return found, flags


def main(args: Sequence[str] | None = None) -> int:
    node = Node(*read_arguments(args))
    node.run()
    with contextlib.suppress(OSError):
        print((node.out / "summary.md").read_text())
    return 1 if node.found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
