"""``hypic serve``: SGLang's own server in this process, with hypic switched on and settings that suit the machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hypic.commands.flags import setting, take_hypic_flags
from hypic.config import STOCK, ConfigError, HypicConfig, from_env
from hypic.platform_cpu import CPU_MODE
from hypic.ports import LOCAL, is_taken

PASS_FLAGS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": True}
_PANEL = "Position-independent caching"
_MODEL_FLAGS = {"--model-path", "--model", "--config"}


def serve(
    args: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [SGLANG FLAGS]", help="Path or name of a model, then any flag of SGLang's server."
        ),
    ] = None,
    seam_window: Annotated[
        int | None,
        typer.Option(
            "--hypic-seam-window",
            metavar="N",
            help="Tokens recomputed at the head of each cached segment: more is closer to full recompute. Default 8.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--hypic-methods",
            metavar="NAMES",
            help="Methods that requests may pick, the default first: seam, seam-N with another seam window, legolink-0. "
            "Default seam.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    min_segment: Annotated[
        int | None,
        typer.Option(
            "--hypic-min-segment",
            metavar="N",
            help="Segments of fewer tokens are computed in place, not cached. Default 64.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--hypic-memory",
            metavar="SIZE",
            help="Memory for cached segments on each GPU, for example 2GiB. By default chosen from what is free.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(
            "--hypic-separator",
            metavar="TEXT",
            help="Cut every prompt at this text, for clients of the official HYPIC fork (<<PIC_SEP>>). Off by default.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--hypic-attention",
            metavar="WAY",
            help="Full attention of linked prompts: seam (our kernel), expanded (the backend's) or auto. Default auto.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    state_dtype: Annotated[
        str | None,
        typer.Option(
            "--hypic-state-dtype",
            metavar="TYPE",
            help="Type of the linear layers' part of artifacts: float32, bfloat16, int8 (T in int8, S in bfloat16), or auto: "
            "int8 unless the model is in float32. Default auto.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    segment_memory: Annotated[
        str | None,
        typer.Option(
            "--hypic-segment-memory",
            metavar="SIZE",
            help="Host memory for the tokens of segments registered with /v1/segments, for example 1GiB. Default 256MiB.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    pin_percent: Annotated[
        int | None,
        typer.Option(
            "--hypic-pin-percent",
            metavar="N",
            help="Share of the memory for cached segments that pinned ones may take. Default 50.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    no_start_check: Annotated[
        bool,
        typer.Option(
            "--hypic-no-start-check",
            help="Serve without first proving on the loaded model that segments can be moved and joined.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    off: Annotated[
        bool,
        typer.Option("--hypic-off", help="Serve stock SGLang, for comparison.", rich_help_panel=_PANEL),
    ] = False,
    sglang_help: Annotated[bool, typer.Option("--sglang-help", help="List SGLang's flags and exit.")] = False,
) -> None:
    """Serve MODEL over SGLang's OpenAI-compatible HTTP API, reusing marked segments wherever they stand in a prompt.

    Flags that are not listed here go to SGLang unchanged. Without a GPU (or with --device cpu) it runs on the CPU,
    in float32, with settings that suit it; what you set yourself is kept. HYPIC_* environment variables set the same
    things as the --hypic-* flags; the flags win.
    """
    argv = ["--help"] if sglang_help else sglang_argv(args or [])
    try:
        if not sglang_help and not _MODEL_FLAGS & {a.split("=")[0] for a in argv}:
            raise ServeError("name a model: hypic serve MODEL")
        config = merge_config(
            from_env(os.environ),
            seam_window=seam_window,
            methods=methods,
            min_segment=min_segment,
            memory=memory,
            separator=separator,
            attention=attention,
            state_dtype=state_dtype,
            segment_memory=segment_memory,
            pin_percent=pin_percent,
            no_start_check=no_start_check,
            off=off,
        )
        argv, config = take_hypic_flags(argv, config)  # any left are not options of ours: an error names them
        if not sglang_help:
            require_port(argv)
        cpu = wants_cpu(argv, os.environ)
        prepare_environment(config, argv, cpu=cpu, environ=os.environ)
        run_server(argv, cpu)
    except (ConfigError, ServeError) as error:
        typer.secho(f"hypic serve: {error}", fg="red", err=True)
        raise typer.Exit(2) from None


class ServeError(RuntimeError):
    """The server cannot start; the text says why and what to do."""


def sglang_argv(args: Sequence[str]) -> list[str]:
    """SGLang's flags: a leading MODEL becomes ``--model-path MODEL``, as ``sglang serve`` has it."""
    if args and not args[0].startswith("-"):
        return ["--model-path", *args]
    return list(args)


def merge_config(
    base: HypicConfig,
    *,
    memory: str | None = None,
    segment_memory: str | None = None,
    no_start_check: bool = False,
    off: bool = False,
    **given: Any,
) -> HypicConfig:
    """The environment's configuration ``base`` with the flags that were given (not None). Raises ConfigError."""
    import msgspec

    for name, size in (("memory", memory), ("segment_memory", segment_memory)):
        given[name] = None if size is None else setting(name, size)
    given["start_check"] = False if no_start_check else None
    return msgspec.structs.replace(base, enabled=not off, **{k: v for k, v in given.items() if v is not None})


def wants_cpu(argv: Sequence[str], environ: MutableMapping[str, str]) -> bool:
    """Whether to run on the CPU: as HYPIC_CPU or ``--device`` say, else if torch sees no accelerator."""
    if CPU_MODE in environ:
        if environ[CPU_MODE] not in ("0", "1"):
            raise ServeError(f"{CPU_MODE}={environ[CPU_MODE]!r}: write 0 or 1")
        return environ[CPU_MODE] == "1"
    if device := flag_value(argv, "--device"):
        return device == "cpu"
    try:
        import torch
    except ImportError:
        raise ServeError(_NO_SGLANG.format(missing="torch")) from None
    return not torch.accelerator.is_available()


def timed_argv(args: list[str]) -> list[str]:
    """:func:`sglang_argv` for an engine that is timed: it must name a model, and its log is quiet. Raises ServeError."""
    argv = sglang_argv(args)
    model = flag_value(argv, "--model-path")
    if model is None or (model.startswith(("/", ".")) and not (Path(model) / "config.json").is_file()):
        raise ServeError(f"MODEL {model or 'is missing'}: name a model, or a folder with a config.json")
    if not any(a.startswith("--log-level") for a in argv):
        argv += ["--log-level", "warning"]
    return argv


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """What `argv` gives as the value of one of SGLang's flags, or None."""
    parts = [part for arg in argv for part in arg.split("=", 1)]
    return parts[parts.index(flag) + 1] if flag in parts[:-1] else None


def require_port(argv: Sequence[str]) -> None:
    """Raises ServeError if a server with these flags could not listen where they say. SGLang would load the model, then hang."""
    host, port = flag_value(argv, "--host") or LOCAL, flag_value(argv, "--port")
    if port is None and flag_value(argv, "--config") is None:
        port = "30000"  # SGLang's default
    if port is not None and port.isdecimal() and is_taken(host, int(port)):
        raise ServeError(f"--port {port}: another process listens there on {host}; stop it or choose another port")


def prepare_environment(config: HypicConfig, argv: Sequence[str], cpu: bool, environ: MutableMapping[str, str]) -> None:
    """Set what SGLang's processes inherit: the configuration and, on a CPU, CPU mode with its settings."""
    environ.update(config.to_env() | ({} if config.enabled else STOCK))
    if cpu:
        from hypic.platform_cpu.defaults import set_environment

        environ[CPU_MODE] = "1"
        set_environment(environ, flag_value(argv, "--dtype"))


def read_server_args(argv: list[str]) -> Any:
    """SGLang's ServerArgs for its flags.

    A server without a tokenizer takes token ids of text alone. A model that could see is then served without its vision tower,
    for which SGLang would want files of an image processor that a folder with nothing but a config.json lacks; its own flag can
    only switch the tower on.
    """
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    if "--skip-tokenizer-init" not in argv or "--enable-multimodal" in argv:
        return prepare_server_args(argv)
    theirs = ServerArgs.add_cli_args

    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        theirs(parser)
        parser.set_defaults(enable_multimodal=False)

    ServerArgs.add_cli_args = staticmethod(add_cli_args)
    try:
        return prepare_server_args(argv)
    finally:
        ServerArgs.add_cli_args = staticmethod(theirs)


def run_server(argv: list[str], cpu: bool) -> None:
    """What ``sglang serve`` does for a language model: load plugins, parse, serve until stopped."""
    if cpu and not {"-h", "--help"} & set(argv):
        from hypic.platform_cpu import fork_server

        fork_server.start()
    try:
        from sglang.launch_server import run_server as run_sglang
        from sglang.srt.plugins import load_plugins
        from sglang.srt.utils import kill_process_tree
    except ModuleNotFoundError as error:
        raise ServeError(_NO_SGLANG.format(missing=error.name)) from error
    from hypic.engine.hook import UnsupportedSGLang
    from hypic.engine.support import Unsupported

    load_plugins()
    try:
        server_args = read_server_args(argv)
    except (UnsupportedSGLang, Unsupported) as error:
        raise ServeError(str(error)) from error
    try:
        run_sglang(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


_NO_SGLANG = (
    "module {missing} is missing, so SGLang cannot run here.\n"
    "  With a GPU: pip install 'hypic[gpu]'. Without one: make setup in a checkout of hypic."
)
