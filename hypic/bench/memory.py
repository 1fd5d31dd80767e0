"""``python -m hypic.bench.memory MODEL --out DIR [FLAGS]``: what `hypic doctor` plans beside what the server then has.

With SGLang's default memory flags, on the whole GPU and on one that is made to look like one of 80 GB: a process holds the rest
of its memory while the server starts and runs, and a `nvidia-smi` in front of the real one tells the smaller total, where SGLang
reads it (`get_nvgpu_memory_capacity`) to choose chunk size, graphs and --mem-fraction-static. All else it takes from what is
free. Each server answers a linked prompt cold, and once more with its segments shuffled; one that refuses says why.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from hypic.bench.scatter import get_json
from hypic.bench.workload import Prompts, Workload
from hypic.check.workers import model_facts
from hypic.commands.serve import flag_value
from hypic.demo.server import ServerError, running
from hypic.ports import free_ports

H100_MIB, H100_FREE_MIB = 81_559, 81_000
"""What nvidia-smi says of an H100 of 80 GB, and what is free there before anything runs."""
RAISED = ["--mem-fraction-static", "0.92"]
MIB = 1 << 20
_FATAL = "hypic serve|Unsupported|ValueError|OutOfMemoryError|RuntimeError|AssertionError"
"""Errors whose text says why a server ended."""


class Case(msgspec.Struct, kw_only=True):
    """One server.

    Attributes:
        total_mib: of the GPU, as SGLang is to see it; None is all there is. flags: on top of those given.
        plan: `hypic doctor --json` of the model, under the same limit. failed: why the server did not come up or answer.
        arena_bytes, kv_tokens: of the server; fit: segments of the workload that its arena holds, by the doctor's bytes of one.
        cold, warm: cached tokens of the prompt. log: where the server's is.
    """

    name: str
    total_mib: int | None
    flags: list[str]
    plan: dict[str, Any] = {}
    failed: str = ""
    arena_bytes: int = 0
    kv_tokens: int = 0
    fit: int = 0
    cold: int | None = None
    warm: int | None = None
    log: str = ""


def cases(cpu: bool) -> dict[str, Case]:
    """By the name that --cases has."""
    found = {"whole": Case(name="whole GPU", total_mib=None, flags=[])}
    if cpu:
        return found
    raised = Case(name=f"80 GB, {' '.join(RAISED)}", total_mib=H100_MIB, flags=RAISED)
    return found | {"80gb": Case(name="80 GB", total_mib=H100_MIB, flags=[]), "80gb-raised": raised}


def run(case: Case, argv: list[str], work: Workload, log: Path) -> None:
    """Fill in the case; the server's log goes to `log`."""
    flags = [*argv, *case.flags]
    case.log = str(log)
    with limited(case.total_mib):
        case.plan = doctor(flags)
        command = [sys.executable, "-m", "hypic", "serve", *flags, "--host", "127.0.0.1"]
        try:
            (port,) = free_ports(1)
            with running([*command, "--port", str(port)], port, log) as server:
                server.wait_until_ready()
                case.arena_bytes = arena_bytes(log.read_text())
                ask_all(case, f"http://127.0.0.1:{port}", flags[0], work)
        except urllib.error.HTTPError as e:
            case.failed = f"the server answered {e.code}: {e.read()[:500].decode(errors='replace')}"
        except (ServerError, OSError, ValueError) as e:
            reasons = re.findall(f"^.*(?:{_FATAL}): .*$", log.read_text(), re.M)
            case.failed = f"the server did not serve: {reasons[0].strip() if reasons else e}"


def ask_all(case: Case, url: str, model: str, work: Workload) -> None:
    """A prompt whose segments are all new, then they again in another order, and what the server says of itself."""
    sizes = {s["tokens"]: s["bytes"] for s in case.plan.get("segments", [])}
    if (one := sizes.get(work.segment_tokens)) is not None:
        case.fit = case.arena_bytes // one
    case.kv_tokens = (get_json(f"{url}/server_info", timeout=60) or {}).get("max_total_num_tokens", 0)
    prompts = Prompts(work, model_facts(Path(model))[0])
    documents = prompts.documents()
    case.cold = _cached(url, prompts.prompt(documents))
    case.warm = _cached(url, prompts.prompt(prompts.shuffled(documents)))


def arena_bytes(log: str) -> int:
    """As the server says when it takes it; metrics would need a package more."""
    found = re.search(r"hypic: artifact arena of ([0-9.]+) MiB", log)
    return int(float(found[1]) * MIB) if found else 0


def _cached(url: str, prompt: tuple[list[int], list[list[int]]]) -> int:
    ids, bounds = prompt
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "hypic": {"segments": bounds}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        found: int = json.load(response)["meta_info"]["cached_tokens"]
    return found


def doctor(flags: Sequence[str]) -> dict[str, Any]:
    """The plan for a model; its problems are a part of it."""
    command = [sys.executable, "-m", "hypic", "doctor", *flags, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    plan: dict[str, Any] = json.loads(done.stdout)["model"]
    return plan


@contextmanager
def limited(total_mib: int | None) -> Iterator[None]:
    """Within the block the first GPU looks like one of that size to processes that start there; None: as it is."""
    if total_mib is None:
        yield
        return
    command = [sys.executable, "-m", "hypic.bench.ballast", str(H100_FREE_MIB * total_mib // H100_MIB)]
    path = os.environ["PATH"]
    folder = Path(tempfile.mkdtemp(prefix="hypic-memory-"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ballast:
        assert ballast.stdin is not None and ballast.stdout is not None
        try:
            if not ballast.stdout.readline():
                raise RuntimeError("the memory of this GPU could not be taken; see above")
            front_nvidia_smi(folder, total_mib)
            os.environ["PATH"] = f"{folder}:{path}"
            yield
        finally:
            os.environ["PATH"] = path
            shutil.rmtree(folder)
            with contextlib.suppress(BrokenPipeError):
                ballast.stdin.close()  # on which it ends


def front_nvidia_smi(folder: Path, total_mib: int) -> None:
    """A `nvidia-smi` that answers for the total memory, and passes everything else on to the real one."""
    real = shutil.which("nvidia-smi") or "/usr/bin/nvidia-smi"
    script = folder / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *query-gpu=memory.total*) echo {total_mib};; *) exec {real} "$@";; esac\n'
    )
    script.chmod(0o755)


def table(found: Sequence[Case], work: Workload) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"# A prompt of {work.tokens:,} tokens in {work.segments} segments, by default memory flags\n"
    yield "| | arena, MiB: planned | server's | segments that fit: planned | server's | KV tokens | cached: cold | warm |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for case in found:
        plan = case.plan
        fits = next((s["fit"] for s in plan.get("segments", []) if s["tokens"] == work.segment_tokens), "")
        planned = f"{plan['arena_bytes'] / MIB:,.0f}" if plan.get("arena_bytes") else ""
        server = (
            [f"{case.arena_bytes / MIB:,.0f}", fits, case.fit, f"{case.kv_tokens:,}"]
            if case.kv_tokens
            else ["", fits, "", ""]
        )
        cells = [planned, *server, *("" if n is None else n for n in (case.cold, case.warm))]
        yield f"| {case.name} | " + " | ".join(str(c) for c in cells) + " |"
    yield ""
    for case in found:
        if case.plan.get("arena_source"):
            yield f"* {case.name}: {case.plan['arena_source']}"
        for problem in case.plan.get("problems", []):
            yield f"* {case.name}, hypic doctor: {problem}"
        if case.failed:
            yield f"* {case.name}: {case.failed}"


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hypic.bench.memory", description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--out", required=True, help="folder for memory.md, memory.json and logs")
    parser.add_argument("--segments", type=int, default=16)
    parser.add_argument(
        "--segment-tokens", type=int, default=2048, help="of those that `hypic doctor` knows: 512, 2048, 8192"
    )
    parser.add_argument("--cases", default="", help="of whole, 80gb and 80gb-raised; all by default")
    told, flags = parser.parse_known_args(args)
    out, work = Path(told.out), Workload(segments=told.segments, segment_tokens=told.segment_tokens)
    out.mkdir(parents=True, exist_ok=True)
    known = cases(flag_value(flags, "--device") == "cpu")
    names = told.cases.split(",") if told.cases else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--cases {unknown[0]}: known are {', '.join(known)}")
    found: list[Case] = []
    for name in names:
        print(f"{known[name].name} ...", file=sys.stderr, flush=True)
        run(known[name], [told.model, *flags], work, out / f"{name}.log")
        found.append(known[name])
        text = "\n".join(table(found, work)) + "\n"
        (out / "memory.md").write_text(text)
        (out / "memory.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
