"""The demo from end to end: model, server, requests, checks."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypic
from hypic.demo import DemoError, pages, scenario
from hypic.demo.checks import TOLERANCE, run_checks
from hypic.demo.server import running, serve_command
from hypic.ports import free_ports

_TINY = "qwen35"
_WEIGHTS = "model.safetensors"
_WHOLE_STREAMS = ("--tool-call-parser", "qwen25")
"""SGLang 0.5.17 drops the logprobs of streamed tokens that add no text (parts of a character), unless it has a parser."""


def run(model: str | None, flags: Sequence[str], say: Callable[[str], None]) -> scenario.DemoResult:
    """Serve ``model`` (None: the trained one of a checkout, else a tiny one with random weights) and ask it everything.

    Args:
        flags: further flags of SGLang's server.
        say: gets a line of progress now and then.
    Raises:
        DemoError: there is no result.
    """
    documents = pages.load_documents()
    trained = _trained_model()
    path = model or trained or _tiny_model(say)
    if not (Path(path) / "config.json").is_file():
        raise DemoError(f"{path} is not the folder of a model (no config.json)")
    handle, name = tempfile.mkstemp(prefix="hypic-demo-", suffix=".log")
    os.close(handle)
    log, (port,) = Path(name), free_ports(1)
    say(f"starting hypic serve {path} on port {port}; its log is {log}")
    with running(serve_command(path, port, [*_WHOLE_STREAMS, *flags]), port, log) as server:
        oracle = _oracle(path)  # loads while the server starts
        server.wait_until_ready(_every(5.0, lambda s: say(f"waiting for the server, {s:.0f} s")))
        say("the server is ready")
        requests, contrast, asked = scenario.run_requests(server.client, documents, say)
        checks = run_checks(server.client, oracle, asked, scenario.MAX_TOKENS, say)
        say("the oracle answers without seams")
        contrast.without_seams = scenario.without_seams(server.client, oracle, documents)
        say("stopping the server")
    log.unlink(missing_ok=True)
    return scenario.DemoResult(
        model=_name(path),
        random_weights=not (model or trained),
        tolerance=TOLERANCE,
        seconds=0.0,
        requests=requests,
        checks=checks,
        contrast=contrast,
    )


def _trained_model() -> str | None:
    """``models/almanac`` of the checkout that hypic runs from; no wheel holds it."""
    checkout = Path(hypic.__file__).resolve().parents[1]
    folder = checkout / "models" / "almanac"
    return str(folder) if (checkout / "pyproject.toml").is_file() and (folder / _WEIGHTS).is_file() else None


def _tiny_model(say: Callable[[str], None]) -> str:
    from hypic.check.tiny_models import build, default_root

    say("no checkout of hypic with its trained model here: a tiny one with random weights, whose answers say nothing")
    if not (default_root() / _TINY).is_dir():
        say(f"making the model {_TINY} in {default_root()}")
    return str(build(_TINY))


def _oracle(path: str) -> Any:
    import torch
    from transformers.utils import logging

    from hypic.check.oracle import Oracle, OracleError

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # the server has the other core
    try:
        return Oracle(path)
    except (OracleError, OSError) as error:
        raise DemoError(f"the oracle cannot judge this model: {error}") from error


def _name(path: str) -> str:
    """What identifies the model to a reader: its architecture and its size."""
    config = json.loads((Path(path) / "config.json").read_text())
    text = config.get("text_config", config)
    kinds = text.get("layer_types", [])
    linear = kinds.count("linear_attention")
    layers = f"{text['num_hidden_layers']} layers" + (f", {linear} of them linear attention" if linear else "")
    return f"{Path(path).name}: {config['architectures'][0]} ({layers}, hidden size {text['hidden_size']})"


def _every(seconds: float, tell: Callable[[float], None]) -> Callable[[float], None]:
    """``tell``, but at most once in so many seconds."""
    last = 0.0

    def maybe(now: float) -> None:
        nonlocal last
        if now - last >= seconds:
            last = now
            tell(now)

    return maybe
