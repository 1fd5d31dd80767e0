"""One engine in a process of its own (SGLang loads plugins once per process): times a Plan, prints an EngineRun."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from hypic.bench.client import Client
from hypic.bench.result import EngineRun
from hypic.bench.suites import SUITES, Plan, require_warm
from hypic.platform_cpu import cpu_mode, fork_server

RESULT = "hypic-bench-result "
"""What the line with the result begins with; SGLang prints too."""
SETTINGS = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "linear_attn_backend", "dtype",
    "load_format", "page_size", "chunked_prefill_size", "max_prefill_tokens", "context_length", "tp_size",
    "mem_fraction_static", "max_running_requests", "max_total_tokens", "mamba_radix_cache_strategy",
    "cuda_graph_backend_prefill", "disable_overlap_schedule", "dummy_decays",
)  # fmt: skip


@contextmanager
def launched(argv: list[str]) -> Iterator[tuple[Any, dict[str, Any], float]]:
    """A running engine with the flags `argv`, what SGLang made of them (SETTINGS), and the seconds it took to start."""
    from sglang.srt.plugins import load_plugins

    from hypic.bench import dummy  # torch, which the command's help does without

    load_plugins()
    if cpu_mode():
        fork_server.inherit()
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="hypic bench")
    ServerArgs.add_cli_args(parser)
    flags = parser.parse_args(argv)
    flags.enable_multimodal = False  # prompts are token ids of text; a vision tower would only take memory
    server_args: Any = ServerArgs.from_cli_args(flags)
    began = time.perf_counter()
    engine = Engine(server_args=server_args)
    try:
        ready = time.perf_counter() - began
        settings = {k: getattr(engine.server_args, k) for k in SETTINGS if hasattr(engine.server_args, k)}
        if dummy.horizon():
            told = engine._scheduler_init_result.scheduler_infos[
                0
            ]  # get_server_info() has it, among all else it asks for
            settings["dummy_decays"] = dummy.require_decays(told)
            print(dummy.told(settings["dummy_decays"]), flush=True)
        yield engine, settings, ready
    finally:
        engine.shutdown()


def run(name: str, plan: Plan, argv: list[str]) -> Iterator[EngineRun]:
    """Start the engine of `argv`, time the plan; yields what there is after each case, so that nothing timed is lost."""
    with launched(argv) as (engine, settings, ready):
        client, timings = Client(engine, name == "hypic"), []
        for suite in (s for s in plan.suites if s in SUITES):
            for timing in SUITES[suite](client, plan):
                require_warm(timing, plan)
                print(
                    f"{name} {suite} {timing.case}: {timing.median:.1f} {timing.unit} {timing.cached[-1:]}", flush=True
                )
                timings.append(timing)
                yield EngineRun(name=name, flags=argv, settings=settings, start_seconds=ready, timings=timings)


if __name__ == "__main__":
    for found in run(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Plan), sys.argv[3:]):
        print(RESULT + msgspec.json.encode(found, enc_hook=str).decode(), flush=True)
