"""``hypic eval``: what answers are worth under each way of reusing documents."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hypic.commands.bench import TABLE_WIDTH
from hypic.commands.flags import server_fields, take_hypic_flags
from hypic.commands.serve import ServeError, flag_value, sglang_argv, wants_cpu
from hypic.config import ConfigError, from_env
from hypic.eval.gates import GateError, Verdict, check, check_level, judge, methods_of
from hypic.eval.gates import load as load_gates
from hypic.eval.methods import METHODS, Method, MethodError, choose
from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment

if TYPE_CHECKING:
    from hypic.eval.prompt import Codec
    from hypic.eval.summary import Summary
    from hypic.eval.tasks import Runner


def evaluate(
    args: Annotated[
        list[str], typer.Argument(metavar="MODEL [SGLANG FLAGS]", help="A model's folder, or (reference) a GGUF file.")
    ],
    data: Annotated[
        list[str], typer.Option(help="almanac, longbench:TASK=FILE, foldoc, debian or support; may be given again.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for outcomes.jsonl, eval.json, eval.md and plots.")],
    methods: Annotated[
        str, typer.Option(help="Names, separated by commas, or all (the default); `hypic methods` lists them.")
    ] = "",
    n: Annotated[int, typer.Option(min=1, help="Questions of each data set and seed.")] = 100,
    seeds: Annotated[str, typer.Option(help="Seeds of the data, separated by commas.")] = "0",
    served: Annotated[
        bool,
        typer.Option("--served/--reference", help="On SGLang's engine, or in plain torch, which knows all methods."),
    ] = False,
    gates: Annotated[
        str | None,
        typer.Option(help="almanac (at its hardest level), or a TOML or JSON file: exit with 1 if one is missed."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--plain", help="With the model's chat template (the default if it has one), or not."),
    ] = None,
    min_segment: Annotated[int, typer.Option(min=0, help="Documents of fewer tokens are computed in place.")] = 0,
    probes: Annotated[int, typer.Option(min=0, help="Sets of documents that are looked at layer by layer.")] = 3,
    device: Annotated[str, typer.Option(help="Reference: cpu, or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16. Default: float32; served on a GPU, as SGLang chooses.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print eval.json instead of tables.")] = False,
) -> None:
    """Ask MODEL questions about documents under every method and compare with full recompute.

    Answers are greedy. A run that was cut off goes on where it stopped if it is started again with the same --out.
    """
    from hypic.eval import report
    from hypic.eval.data import DataError
    from hypic.eval.prompt import Codec, PromptError
    from hypic.eval.reference import ModelError
    from hypic.eval.run import RunError, run
    from hypic.eval.served import ServedError
    from hypic.eval.tasks import NotFinite, tasks_of

    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)

    try:
        bounds = load_gates(gates) if gates else ()
        model = model_path(args)
        codec = Codec(model)
        loaded = load_data(data, codec, model, n, numbers(seeds), chat)
        check_level(gates or "", [about for about, _ in loaded])
        tasks = tasks_of([item for _, items in loaded for item in items], codec, min_segment=min_segment)
        names = wanted_methods(methods, methods_of(bounds))
        runner, chosen, settings = make_runner(
            args, model, codec, names, served=served, device=device, dtype=dtype, probes=probes, say=say
        )
        check(bounds, [t.item for t in tasks], chosen)
        results = run(
            tasks,
            chosen,
            runner,
            out,
            model=str(model),
            settings=settings | {"min_segment": min_segment},
            seeds=numbers(seeds),
            say=say,
        )
    except (DataError, GateError, MethodError, ModelError, PromptError, ConfigError, ServeError) as e:
        raise typer.BadParameter(str(e)) from None
    except (RunError, ServedError, NotFinite, OSError) as e:
        console.print(f"hypic eval: {e}", style="red", markup=False)
        raise typer.Exit(1) from None
    meta = msgspec.to_builtins(results.header) | {
        "data": [about for about, _ in loaded],
        "methods": {m.name: f"{m.about} ({m.source})" for m in chosen},
    }
    summary = report.write(results.outcomes, [t.item for t in tasks], out, meta, results.probes)
    try:
        verdicts = judge(bounds, summary)
    except GateError as e:
        raise typer.BadParameter(str(e)) from None
    if bounds:
        (out / "gates.json").write_text(json.dumps(msgspec.to_builtins(verdicts), indent=1) + "\n")
    if as_json:
        print((out / "eval.json").read_text(), end="")
    else:
        terminal = Console()
        terminal.width = max(terminal.width, TABLE_WIDTH)
        show(summary, verdicts, terminal)
    if not all(v.met for v in verdicts):
        console.print(f"hypic eval: {sum(not v.met for v in verdicts)} of {len(verdicts)} gates missed", style="red")
        raise typer.Exit(1)


def model_path(args: list[str]) -> Path:
    """The model among SGLang's flags. Raises ServeError."""
    try:
        argv = sglang_argv(take_hypic_flags(args, from_env())[0])
    except ConfigError as e:
        raise ServeError(str(e)) from None
    path = Path(flag_value(argv, "--model-path") or "")
    if not (path.is_file() and path.suffix == ".gguf") and not (path / "config.json").is_file():
        raise ServeError(f"MODEL {path}: give a folder with a config.json, or a .gguf file")
    return path


def load_data(
    specs: list[str], codec: Codec, model: Path, n: int, seeds: list[int], chat: bool | None = None
) -> list[tuple[dict[str, Any], list[Any]]]:
    """What each data set says of itself, and its items, for each seed. Raises DataError."""
    from hypic.eval.data import Template, load

    try:
        config = json.loads((model / "config.json").read_text())
        context = (config.get("text_config") or config).get("max_position_embeddings")
    except (OSError, ValueError):
        context = None
    template = Template(codec.tokenizer, chat=chat, context=context)
    found: list[tuple[dict[str, Any], list[Any]]] = []
    seen: dict[str, Any] = {}
    for spec in specs:
        for seed in seeds:
            loaded = load(spec, template, n, seed)
            fresh = [i for i in loaded if seen.get(i.id) != i]  # seeds draw some questions twice
            seen |= {i.id: i for i in fresh}
            found.append((loaded.about, fresh))
    return found


def wanted_methods(text: str, needed: list[str]) -> list[str] | None:
    """Names on the command line and those that gates need; None for all."""
    given = [m.strip() for m in text.split(",") if m.strip()]
    return None if not given or given == ["all"] else [*given, *needed]


def make_runner(
    args: list[str],
    model: Path,
    codec: Codec,
    names: list[str] | None,
    *,
    served: bool,
    device: str,
    dtype: str | None,
    probes: int,
    say: Any,
) -> tuple[Runner, list[Method], dict[str, Any]]:
    """Who runs the methods, which, and what else the outcomes depend on."""
    rest, config = take_hypic_flags(args, from_env())
    argv = sglang_argv(rest)
    if not served:
        import torch

        from hypic.eval.by_reference import ByReference
        from hypic.eval.reference import Model, ModelError

        types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        dtype = dtype or "float32"
        if dtype not in types:
            raise ModelError(f"--dtype {dtype}: write {' or '.join(types)}")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ModelError(f"--device {device}: there is no GPU here; leave it out")
        if len(argv) > 2:
            raise ServeError(f"{' '.join(argv[2:])}: SGLang's flags need --served")
        loaded = Model(model, device=device, dtype=types[dtype])
        chosen = choose(names, hybrid=loaded.hybrid)
        return ByReference(loaded, codec, probes=probes), chosen, {"dtype": dtype, "device": device}
    from hypic.eval.served import Served

    if dtype:  # an option of ours too, so it never reached SGLang's flags
        argv += ["--dtype", dtype]
    cpu = wants_cpu(argv, os.environ)
    env = {CPU_MODE: "1"} if cpu else {}
    if cpu:
        os.environ[CPU_MODE] = "1"
        set_environment()
    flags = server_fields(argv)
    flags.pop("model_path", None)
    chosen = choose(names, hybrid=is_hybrid(model), served=True)
    settings = {"flags": {k: str(v) for k, v in flags.items()}, "hypic": config.to_env()}
    return Served(str(model), codec, flags=flags, config=config, env=env, say=say), chosen, settings


def is_hybrid(model: Path) -> bool:
    """The model has linear layers, by its config."""
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config") or config
    return "linear_num_value_heads" in config


def numbers(text: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--seeds {text!r}: whole numbers, separated by commas") from None


def show(summary: Summary, verdicts: list[Verdict], console: Console) -> None:
    """A table per data set and kind, then the gates."""
    for dataset, kind in dict.fromkeys((r.dataset, r.kind) for r in summary.rows):
        rows = [r for r in summary.rows if (r.dataset, r.kind) == (dataset, kind)]
        table = Table(title=f"{dataset} {kind}".rstrip() + f", n = {max(r.n for r in rows)}")
        for column in ("method", rows[0].metric, "95%", "KL", "agreement", "computed"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for r in rows:
            interval = "" if r.score.low is None else f"{r.score.low:.1f} to {r.score.high:.1f}"
            kl = "" if r.kl is None else f"{r.kl.value:.4f}"
            agreement = "" if r.agreement is None else f"{r.agreement.value:.1%}"
            table.add_row(r.method, f"{r.score.value:.1f}", interval, kl, agreement, f"{1 - r.reused:.1%}")
        console.print(table)
    for v in verdicts:
        word = "[green]met   [/]" if v.met else "[red]MISSED[/]"
        console.print(f"{word} {escape(v.gate.name)}: {v.value:.4g}")


def list_methods() -> None:
    """Say which methods ``hypic eval`` knows, what each is, and who runs it."""
    table = Table(title="methods")
    for column in ("name", "what it is", "source", "models", "engine"):
        table.add_column(column)
    for m in METHODS.values():
        table.add_row(m.name, m.about, m.source, m.models, "served, reference" if m.served else "reference")
    terminal = Console()
    terminal.width = max(terminal.width, TABLE_WIDTH)
    terminal.print(table)
