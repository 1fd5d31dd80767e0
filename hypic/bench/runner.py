"""Runs a benchmark: the self-check first, then one engine after the other, each in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hypic.bench import dummy
from hypic.bench.artifact_cost import artifact_cost
from hypic.bench.child import RESULT
from hypic.bench.provenance import machine, versions
from hypic.bench.report import fit
from hypic.bench.result import BenchResult, EngineRun
from hypic.bench.scatter import Bench, run_scatter
from hypic.bench.scatter_report import reckon
from hypic.bench.scatter_result import ScatterResult
from hypic.bench.suites import KERNELS, SCATTER, Plan
from hypic.commands.serve import flag_value
from hypic.config import STOCK, HypicConfig
from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment

CHECKED = "P1,P4"
KEPT_FLAGS = (
    "--dtype", "--attention-backend", "--prefill-attention-backend", "--decode-attention-backend", "--linear-attn-backend",
    "--sampling-backend", "--grammar-backend", "--page-size", "--cuda-graph-backend-prefill", "--device",
    "--cuda-graph-max-bs-decode", "--moe-runner-backend", "--log-level",
)  # fmt: skip
"""Flags that decide how a link is computed, and some that make engines start faster: the self-check gets them too."""
BARE_FLAGS = ("--disable-flashinfer-autotune",)


class BenchError(RuntimeError):
    """No figures can be given; the text says why."""


def run_bench(
    plan: Plan,
    argv: list[str],
    config: HypicConfig,
    *,
    engines: list[str],
    baselines: list[str],
    cpu: bool,
    selfcheck: bool,
    say: Callable[[str], None],
    keep: Callable[[BenchResult], None] = lambda _: None,
    inherited: Mapping[str, str] | None = None,
) -> BenchResult:
    """Time `plan` on every engine.

    Args:
        argv: SGLang's flags. config: hypic's settings, for the hypic engine.
        engines: of "stock" and "hypic". baselines: flags on top of `argv`, each for one more stock engine.
        cpu: use CPU mode. selfcheck: refuse to time a hypic whose self-check fails.
        say: gets lines of progress. keep: gets what there is after each engine, so that nothing timed is lost.
        inherited: more environment variables of all engines (`hypic.bench.dummy.environment`).

    Raises:
        BenchError: the self-check failed, or an engine ended without a result.
    """
    environ = dict(os.environ) | ({CPU_MODE: "1"} if cpu else {}) | dict(inherited or {})
    if cpu:
        set_environment(environ, flag_value(argv, "--dtype"))
    checks = check_first(argv, environ | config.to_env(), say) if selfcheck and "hypic" in engines else {}
    ours, stock = environ | config.to_env(), environ | STOCK
    todo = [(f"stock {more}", [*argv, *shlex.split(more)], stock) for more in baselines]
    todo += [(name, argv, ours if name == "hypic" else stock) for name in engines]
    result = BenchResult(
        command=sys.argv,
        versions=versions(),
        machine=machine(),
        workload=msgspec.to_builtins(plan.workload),
        seam_window=plan.seam_window,
        dummy_horizon=dummy.chosen(inherited or {}),
        selfcheck=checks,
        engines=[],
    )
    if set(plan.suites) <= {KERNELS, SCATTER}:
        todo = []
    for name, flags, env in todo:
        say(f"{name}: starting {shlex.join(flags)}")
        role = "hypic" if name == "hypic" else "stock"
        command = ["hypic.bench.child", role, msgspec.json.encode(plan).decode()]
        for found in _child(name, [*command, *flags], env, say):
            result.engines = [*(e for e in result.engines if e.name != name), found]
            result.fit = fit([t for e in result.engines for t in e.timings if t.suite == "scale"])
            keep(result)
    if KERNELS in plan.suites:
        say(f"kernels: {shlex.join(argv)}")
        command = ["hypic.bench.kernels", msgspec.json.encode(plan).decode(), msgspec.json.encode(config).decode()]
        timed = list(result.engines)
        for found in _child("kernels", [*command, *argv], ours, say):
            result.engines = [*timed, found]
            keep(result)
        result.artifact_cost = cost = artifact_cost(result.engines[-1].timings, timed)
        result.artifact_share = cost.share if cost else None
        keep(result)
    if SCATTER in plan.suites:
        if "stock" in engines:
            plan = msgspec.structs.replace(plan, scatter=msgspec.structs.replace(plan.scatter, stock=True))

        def kept(found: ScatterResult) -> None:
            result.scatter = found
            keep(result)

        _scatter(plan, argv, config, ours, cpu, say, kept)
    return result


def _scatter(
    plan: Plan,
    argv: list[str],
    config: HypicConfig,
    env: Mapping[str, str],
    cpu: bool,
    say: Callable[[str], None],
    keep: Callable[[ScatterResult], None],
) -> None:
    """Raises BenchError: the cluster did not come up. What it had timed until then is kept."""
    from hypic.bench.agreement import compare
    from hypic.check.workers import model_facts
    from hypic.router.launch.plan import LaunchError

    model, work = Path(flag_value(argv, "--model-path") or ""), plan.workload

    def kept(found: ScatterResult) -> None:
        reckon(found, work)
        keep(found)

    before = dict(os.environ)
    os.environ.update(env)
    try:
        bench = Bench(work, plan.scatter, model_facts(model)[0], say, kept)
        run_scatter(bench, argv, cpu, lambda url: compare(url, work, plan.scatter, model, config))
        kept(bench.result)
    except (LaunchError, RuntimeError, OSError, ValueError) as e:
        raise BenchError(f"scatter: {e}") from None
    finally:
        os.environ.clear()
        os.environ.update(before)


def _child(name: str, module: list[str], env: Mapping[str, str], say: Callable[[str], None]) -> Iterator[EngineRun]:
    """Run a module with its arguments, pass its lines on, and yield the results among them, each with more than the last."""
    with subprocess.Popen([sys.executable, "-m", *module], env=dict(env), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(RESULT):
                found = msgspec.json.decode(line[len(RESULT) :], type=EngineRun)
                yield msgspec.structs.replace(found, name=name)
            else:
                say(line.rstrip())
    if child.returncode:
        raise BenchError(
            f"{name!r} ended with exit code {child.returncode}; see its log above. What it had timed is kept with --out"
        )


def check_first(argv: list[str], env: Mapping[str, str], say: Callable[[str], None]) -> dict[str, Any]:
    """`hypic selfcheck` on a tiny model of the same kind, under the flags that decide how a link is computed."""
    from hypic.check.tiny_models import IN_16_BITS, build

    kind = tiny_kind(Path(flag_value(argv, "--model-path") or ""))
    exact = (flag_value(argv, "--dtype") or ("float32" if env.get(CPU_MODE) == "1" else "auto")) == "float32"
    model = build(kind if exact else IN_16_BITS.get(kind, kind))
    command = ["selfcheck", str(model), "--checks", CHECKED, "--json", *kept_flags(argv)]
    say(f"hypic {shlex.join(command)}")
    done = subprocess.run([sys.executable, "-m", "hypic", *command], env=dict(env), stdout=subprocess.PIPE, text=True)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise BenchError(f"hypic selfcheck ended with exit code {done.returncode} and without a result") from None
    for name, entry in found["checks"].items():
        worst, bound = (f"{x:.1e}" if x is not None else "-" for x in (entry["worst_error"], entry["tolerance"]))
        say(f"{name}: {entry['status']}, worst error {worst}, tolerance {bound}; {entry['detail']}")
    if not found["passed"]:
        raise BenchError("hypic selfcheck failed under these flags: a wrong answer has no speed. See the lines above")
    return found["checks"]


def kept_flags(argv: list[str]) -> list[str]:
    """The flags of `argv` that the self-check gets too."""
    kept = []
    for i, arg in enumerate(argv):
        name, equals, _ = arg.partition("=")
        if name in BARE_FLAGS or (name in KEPT_FLAGS and equals):
            kept.append(arg)
        elif name in KEPT_FLAGS:
            kept += argv[i : i + 2]
    return kept


def tiny_kind(model: Path) -> str:
    """Name of the tiny model (`hypic.check.tiny_models`) that is most like `model`, a folder with a config.json."""
    from hypic.check.coverage import COVERAGE
    from hypic.check.tiny_models import NAMES

    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        config = {}
    kind = str(config.get("model_type", "")).removesuffix("_text").replace("_", "")
    same = [row.model for row in COVERAGE if row.architecture in config.get("architectures", ())]
    return next((name for name in (*same, kind, kind.removesuffix("moe")) if name in NAMES), "qwen35")
