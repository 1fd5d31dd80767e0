"""``hypic doctor``: right about the installed SGLang, loud about a hook that does not fit, honest about models."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hypic.bench import families
from hypic.check.coverage import REFUSED, Refused
from hypic.check.tiny_models import NAMES
from hypic.cli import app
from hypic.commands import doctor as commands
from hypic.commands.doctor import _model
from hypic.config import HypicConfig
from hypic.doctor import installation
from hypic.doctor.findings import Findings, ModelFinding
from hypic.doctor.show import size
from hypic.engine import model_classes, plugin
from hypic.engine.hook import SUPPORTED_SGLANG, Hook, HookTable
from hypic.engine.support import REFUSALS, Unsupported, check_methods

SECONDS = 240


def run(code: str, *args: str) -> tuple[int, dict[str, Any]]:
    """Run Python in a fresh process, as plugins are loaded once in each; what it printed must be one JSON object."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HYPIC_")}
    command = [sys.executable, "-c", code, *args]
    out = subprocess.run(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environ, timeout=SECONDS, check=False
    )
    return out.returncode, json.loads(out.stdout)


DOCTOR = "import sys; from hypic.cli import app; app(['doctor', *sys.argv[1:], '--json'])"


@pytest.fixture
def config_only(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model's folder without its weights."""
    source, target = tiny_model("qwen35"), tmp_path / "qwen35"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


def test_everything_fits_the_installed_sglang(config_only: Path) -> None:
    code, found = run(DOCTOR, str(config_only))
    assert code == 0 and found["problems"] == []
    assert {"name": "sglang", "version": SUPPORTED_SGLANG, "problem": None} in found["versions"]
    assert found["platform"]["mode"] == "cpu" and found["platform"]["memory_free"] > 0
    hooks = found["hooks"]
    assert {h["table"] for h in hooks} == {"hypic", "hypic_cpu"}
    targets = {h["target"] for h in hooks}
    assert "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request" in targets, "the HTTP half"
    assert "sglang.srt.model_executor.model_runner.ModelRunner.forward" in targets
    assert all(h["reason"] and h["problem"] is None for h in hooks)
    assert [r["flag"] for r in found["refused_flags"]] == [r.flag for r in REFUSALS]
    assert [f["family"] for f in found["model"]["families"]] == ["gated delta network", "full attention"]
    assert found["model"]["weight_bytes"] == 0


def test_broken_hook_fails_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command in this process, whose plugins are loaded."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(commands, "_quiet", lambda: None)

    def problems() -> list[str]:
        done = CliRunner().invoke(app, ["doctor", "--json"])
        found = json.loads(done.stdout)
        assert done.exit_code == (1 if found["problems"] else 0), done.output
        assert {h["problem"] for h in found["hooks"]} - {None} <= set(found["problems"])
        return list(found["problems"])

    before = problems()  # what other tests have left in this process
    gone = Hook("sglang.srt.managers.scheduler.Scheduler.no_such_method", "after", print, "a test", ("self",))
    table = HookTable("hypic", [*plugin.table().hooks, gone])
    table.register()
    monkeypatch.setattr(plugin, "table", lambda: table)
    (told,) = set(problems()) - set(before)
    assert told.startswith(f"{gone.target}: not found")


def test_hook_with_other_arguments_and_hook_not_applied() -> None:
    target = "sglang.srt.utils.common.is_cuda"
    table = HookTable("test", [Hook(target, "after", len, "a test", ("gadget",)), Hook(target, "after", len, "a test")])
    arguments, unapplied = installation.hook_findings(table)
    assert arguments.problem is not None and "expected arguments (gadget" in arguments.problem
    assert unapplied.problem == f"{target}: not applied"
    assert any("did not run the plugin" in p for p in installation.table_problems(table))


def test_other_sglang_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_version", {"sglang": "0.5.16", "torch": "2.13.0"}.get)
    problems = {v.name: v.problem for v in installation.versions()}
    assert problems["sglang"] == f"hypic supports {SUPPORTED_SGLANG}"
    assert problems["torch"] is None and problems["triton"] is None
    assert "not installed" in str(problems["transformers"])


# ---------------------------------------------------------------------- models


def examine(path: Path | str, *flags: str, memory: int = 0, settings: HypicConfig | None = None) -> ModelFinding:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    model_classes.offer()  # an engine that this process started before took what plugins set in the environment along
    found = Findings(supported_sglang=SUPPORTED_SGLANG, versions=[], refused_flags=installation.refused_flags())
    found.platform = installation.machine(cpu=True)
    config = settings or HypicConfig(enabled=True, memory=memory)
    model = _model(["--model-path", str(path), *flags], str(path), config, found, cpu=True)
    given = [r.flag for r in found.refused_flags if r.given]
    assert given == [flag for flag in flags if flag in given], "flags are marked that were not given"
    assert bool(given) == any("does not work with these flags" in p for p in model.problems)
    return model


KIMI = ("kimi", "kimi_dense")
LINEAR = {"llama": 0, "qwen3": 0, "deepseekv2": 0, "qwen35": 3, "granite4h": 3, "falconh1": 4} | dict.fromkeys(KIMI, 3)
"""Linear layers of the tiny models; the others have two."""
FULL = {"llama": 4, "qwen3": 4, "deepseekv2": 4, "qwen35": 1, "granite4h": 1, "falconh1": 4}
"""Full-attention layers likewise; Falcon-H1's layers are both."""
MAMBA = {"nemotronh": (2, 24), "nemotronh_dense": (2, 24), "granite4h": (1, 32), "falconh1": (2, 32)}
"""Groups and state size; four heads of 32."""


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_are_supported(name: str, tiny_model: Callable[[str], Path]) -> None:
    model = examine(tiny_model(name))
    assert model.problems == [] and model.tested and model.dtype == "float32"
    layers = {f.family: f.layers for f in model.families}
    full, linear = FULL.get(name, 2), LINEAR.get(name, 2)
    titles = dict.fromkeys(MAMBA, "Mamba2") | dict.fromkeys(KIMI, "Kimi delta attention")
    titles |= dict.fromkeys(("ringlinear", "ring25", "minimax"), "Lightning")
    title = titles.get(name, "gated delta network")
    assert layers == {k: n for k, n in {title: linear, "full attention": full}.items() if n}
    heads, d_k, d_v, channels = 4, 32, 16 if name == "qwen35_dk" else 32, 2 * 2 * 32 + 4 * (32, 16)[name == "qwen35_dk"]
    transition, kv_heads, head_dim = d_k * d_k * 4, 1 if name in ("granite4h", "minimax") else 2, 64
    if name in MAMBA:
        groups, d_k = MAMBA[name]
        channels, transition = heads * d_v + 2 * groups * d_k, 4
    if name in KIMI:
        channels = 3 * heads * d_k
    if title == "Lightning":
        heads, channels, transition, d_k, d_v, head_dim = 2 if name == "minimax" else 4, 0, 4, 128, 128, 128
    assert model.transition_bytes == linear * heads * transition
    assert model.state_bytes == linear * heads * d_v * d_k * 4
    assert model.conv_bytes == linear * channels * 3 * 4
    latent = name in (*KIMI, "deepseekv2", "ring25")
    assert model.token_bytes == full * (48 + 16 if latent else 2 * kv_heads * head_dim) * 4
    fixed = model.transition_bytes + model.state_bytes + model.conv_bytes
    for segment in model.segments:
        payload = fixed + (segment.tokens - model.seam_window) * model.token_bytes
        assert payload < segment.bytes < payload + 8 * segment.tokens + 2048, "payload, then ids and a small header"
        assert segment.fit == model.arena_bytes // segment.bytes > 0


SHAPES = Path(__file__).parents[2] / "models" / "shapes"
FAMILIES, BENCHMARKS = ((SHAPES.parents[1] / "docs" / page).read_text() for page in ("FAMILIES.md", "BENCHMARKS.md"))

DENSE = 128**2 + 2 * 128 * 4
"""Bytes of one head's T: int8, and the scale and diagonal entry of each row in float32."""


@pytest.mark.parametrize(
    ("shape", "ranks", "transition", "state", "token"),
    [
        ("nemotron-3-nano-30b-a3b", 1, 23 * 64 * 4, 23 * 64 * 64 * 128 * 2, 6 * 2 * 2 * 128 * 2),
        ("granite-4.0-h-small", 1, 36 * 128 * 4, 36 * 128 * 64 * 128 * 2, 4 * 2 * 8 * 128 * 2),
        ("kimi-linear-48b-a3b", 1, 20 * 32 * DENSE, 20 * 32 * 128**2 * 2, 7 * (512 + 64) * 2),
        ("ring-mini-linear-2.0", 1, 16 * 16 * 4, 16 * 16 * 128 * 128 * 2, 4 * 2 * 4 * 128 * 2),
        ("ring-2.5-1t", 1, 70 * 64 * 4, 70 * 64 * 128**2 * 2, 10 * (512 + 64) * 2),
        ("ring-2.5-1t", 8, 70 * 8 * 4, 70 * 8 * 128**2 * 2, 10 * (512 + 64) * 2),
        ("minimax-m1", 8, 70 * 8 * 4, 70 * 8 * 128**2 * 2, 10 * 2 * 1 * 128 * 2),
        ("qwen3.5-35b-a3b", 1, 30 * 32 * DENSE, 30 * 32 * 128**2 * 2, 10 * 2 * 2 * 256 * 2),
        ("qwen3.5-122b-a10b", 1, 36 * 64 * DENSE, 36 * 64 * 128**2 * 2, 12 * 2 * 2 * 256 * 2),
        ("qwen3.5-122b-a10b", 4, 36 * 16 * DENSE, 36 * 16 * 128**2 * 2, 12 * 2 * 1 * 256 * 2),
        ("qwen3.5-122b-a10b", 8, 36 * 8 * DENSE, 36 * 8 * 128**2 * 2, 12 * 2 * 1 * 256 * 2),
        ("qwen3.5-397b-a17b", 4, 45 * 16 * DENSE, 45 * 16 * 128**2 * 2, 15 * 2 * 1 * 256 * 2),
        ("qwen3.5-397b-a17b", 8, 45 * 8 * DENSE, 45 * 8 * 128**2 * 2, 15 * 2 * 1 * 256 * 2),
    ],
)
def test_artifacts_of_published_shapes(
    shape: str, ranks: int, transition: int, state: int, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of docs/FAMILIES.md. T of Mamba2 and Lightning is one number per head, GDN's a matrix; a rank holds its
    heads' share, at least one KV head, and all of a latent."""
    monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", "bfloat16")  # as `hypic doctor` sets it by the model's type
    model = examine(SHAPES / shape, "--dtype", "bfloat16", "--tp-size", str(ranks), memory=8 << 30)
    assert model.problems == []
    assert (model.transition_bytes, model.state_bytes, model.token_bytes) == (transition, state, token)
    (segment,) = (s for s in model.segments if s.tokens == 2048)
    parts = (model.transition_bytes, model.state_bytes, model.conv_bytes, model.token_bytes, segment.bytes)
    assert f"| {shape} | {ranks} | {' | '.join(map(size, parts))} | {segment.fit} |" in FAMILIES
    if shape in families.SHAPES:
        assert f"\n| {' | '.join(families.size_cells(model))} |" in BENCHMARKS


def test_plan_follows_memory_and_ranks(tiny_model: Callable[[str], Path]) -> None:
    one, two = (examine(tiny_model("qwen3next"), "--tp-size", n, memory=64 << 20) for n in "12")
    assert one.arena_bytes == two.arena_bytes == 64 << 20 and one.arena_source == "--hypic-memory"
    assert (two.transition_bytes, two.token_bytes) == (one.transition_bytes // 2, one.token_bytes // 2)
    assert two.segments[0].fit > one.segments[0].fit
    assert one.weight_bytes == (tiny_model("qwen3next") / "model.safetensors").stat().st_size


def test_dummy_weights_take_as_much_as_files_would(tiny_model: Callable[[str], Path]) -> None:
    file = (tiny_model("qwen3next") / "model.safetensors").stat().st_size
    made = examine(tiny_model("qwen3next"), "--load-format", "dummy", memory=64 << 20).weight_bytes
    assert made == pytest.approx(file, rel=0.03), "the file has a header, too"


def test_an_arena_that_holds_no_segment_is_a_problem() -> None:
    """It says what would hold one; a MiB less does not."""
    shape = SHAPES / "qwen3.5-35b-a3b", "--dtype", "bfloat16"
    (problem,) = examine(*shape, memory=1 << 20).problems
    found = re.search("raise --hypic-memory: one of 64 tokens, the shortest, needs ([0-9]+)MiB", problem)
    assert found is not None, problem
    enough = int(found[1]) << 20
    assert examine(*shape, memory=enough).problems == []
    assert examine(*shape, memory=enough - (1 << 20)).problems == [problem]


def test_refused_flags_are_named(tiny_model: Callable[[str], Path]) -> None:
    model = examine(tiny_model("qwen3"), "--kv-cache-dtype", "fp8_e5m2", "--enable-memory-saver")
    (problem,) = model.problems
    assert "--kv-cache-dtype: " in problem and "--enable-memory-saver: " in problem


def config(tmp_path: Path, kind: str, architecture: str, **fields: Any) -> Path:
    """The folder of a model that has nothing but a config."""
    import transformers

    made = getattr(transformers, kind)(architectures=[architecture], **fields)
    made.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "architecture", "fields", "reason"),
    [
        (
            "Qwen3Config",
            "Qwen3ForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE of type 'dynamic'",
        ),
        ("LlamaConfig", "NoSuchForCausalLM", {}, "no model class NoSuchForCausalLM"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("CausalLM") else "",
)
def test_unsupported_models_are_refused_with_the_reason(
    kind: str, architecture: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = examine(config(tmp_path, kind, architecture, **fields))
    assert any(reason in problem for problem in model.problems), model.problems
    assert model.families == [] and model.segments == []


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.architecture)
def test_the_table_of_refused_models_is_true(row: Refused, tmp_path: Path) -> None:
    # SGLang itself refuses some with torch_native, the CPU's default, and LFM2 with triton.
    flags = ["--attention-backend", "triton"] if row.reason == "sliding-window attention" else []
    model = examine(config(tmp_path, row.config, row.architecture), *flags)
    assert [p.startswith(row.reason) for p in model.problems] == [True], model.problems
    assert row.reason != "sliding-window attention" or "--hypic-off" in model.problems[0]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}), ("Mistral", {"sliding_window": 4096})],
)
def test_windows_that_sglang_does_not_read_are_no_reason(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert examine(config(tmp_path, f"{kind}Config", f"{kind}ForCausalLM", **fields)).problems == []


def test_methods_are_refused_as_by_the_server(tiny_model: Callable[[str], Path]) -> None:
    settings = HypicConfig(enabled=True, methods="seam,legolink-0")
    with pytest.raises(Unsupported) as server:
        check_methods(settings, hybrid=True)
    assert examine(tiny_model("qwen35"), settings=settings).problems == [str(server.value)]
    assert examine(tiny_model("llama"), settings=settings).problems == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no config.json in this folder"),
        ("{bad", "config.json cannot be read"),
        ("[]", "config.json has no JSON object"),
        ('{"architectures": ["LlamaForCausalLM"]}', "config.json has no model_type"),
        ('{"model_type": "llama"}', "config.json has no architectures"),
    ],
)
def test_a_broken_folder_is_named_and_nobody_is_asked(
    config: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path and by a relative name, which Hugging Face would have to be asked about."""

    def asked(*args: Any, **_: Any) -> None:
        pytest.fail(f"asks {args[:2]}")

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "broken"
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(config)
    for path in (folder, "models/broken"):
        (problem,) = examine(path).problems
        assert says in problem
    for path in (tmp_path / "nothing", "./nothing", "models/nothing"):
        (problem,) = examine(path).problems
        assert "there is no such folder" in problem
