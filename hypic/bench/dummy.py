"""Dummy weights whose linear layers remember.

`--load-format dummy` draws all weights from -0.001 to 0.001. A head of a gated delta layer then keeps half of its state from one
token to the next: after 30 tokens it has forgotten, its T is zero, and hypic's kernels skip it (kernels.gdn_transition), which no
trained model would grant to all of them. So benchmarks overwrite the decays, on every engine alike, right after SGLang's loader
drew them: the heads of a layer keep e^-0.01 to e^-10 of their state over HORIZON tokens. No head forgets a segment of up to that
length: building T costs the most that it can cost.

The setting travels in an environment variable, as engines are processes of their own; SGLang's plugin entry point puts the hooks
in place, with hypic off, too.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hypic.commands.serve import flag_value
from hypic.engine.hook import Hook, HookTable

if TYPE_CHECKING:  # commands ask for the environment, and torch takes seconds to import
    from torch import Tensor

logger = logging.getLogger(__name__)

DUMMY_HORIZON = "HYPIC_DUMMY_HORIZON"
"""Tokens; set by benchmarks. Read elsewhere than hypic.config, since it is no setting of a server."""
HORIZON = 16_384
SLOWEST, FASTEST = 0.01, 10.0
"""Log decay over the horizon of the heads that keep the most and the least. Far from kernels.gdn_transition.FORGOTTEN, since the
layer's input moves it by a tenth or so."""


def horizon(environ: Mapping[str, str] = os.environ) -> int:
    """Tokens over which heads are to remember; 0: weights are left alone."""
    return int(environ.get(DUMMY_HORIZON) or 0)


def chosen(environ: Mapping[str, str] = os.environ) -> int | None:
    """The horizon of a benchmark whose engines get `environ`; None if their weights are no dummies."""
    return horizon(environ) if DUMMY_HORIZON in environ else None


def environment(
    argv: Sequence[str], tokens: int | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What engines with SGLang's flags `argv` must inherit: `tokens`, or else what `environ` says, or else HORIZON; nothing
    where weights are no dummies.

    Raises:
        ValueError: `tokens` was given, but weights are no dummies; or the variable is no number.
    """
    if flag_value(argv, "--load-format") != "dummy":
        if tokens:
            raise ValueError("only with --load-format dummy: weights that were loaded are not touched")
        return {}
    if tokens is None and DUMMY_HORIZON in environ:
        try:
            tokens = horizon(environ)
        except ValueError:
            raise ValueError(f"{DUMMY_HORIZON}={environ[DUMMY_HORIZON]!r}: write a number of tokens") from None
    return {DUMMY_HORIZON: str(HORIZON if tokens is None else tokens)}


def set_decays(A_log: Tensor, dt_bias: Tensor, tokens: int) -> None:
    """Give the heads of a layer decays from slow to fast: g = -exp(A_log) softplus(a + dt_bias), with a near 0."""
    import torch

    ends = math.log10(SLOWEST), math.log10(FASTEST)
    over_horizon = torch.logspace(*ends, len(A_log), dtype=torch.float32, device=A_log.device)
    with torch.no_grad():
        dt_bias.zero_()
        A_log.copy_((over_horizon / tokens / math.log(2)).log())


def log_decays(A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Log decay of a token in each head, or in each key channel of it, where the layer's input adds nothing."""
    import torch

    with torch.no_grad():
        rate = A_log.float().exp()
        return -(rate if dt_bias.dim() == 1 else rate[:, None]) * torch.nn.functional.softplus(dt_bias.float())


def _layers(model: Any, model_config: Any) -> list[Any]:
    """Those whose T is a matrix, so that what it costs depends on whether heads forget."""
    from hypic.engine.families import family_of_config

    family = family_of_config(model_config)
    return list(family.layers(model).values()) if family is not None and family.operator == "dense" else []


def after_dummy_load(model: Any, _: Any, *, model_config: Any, **__: Any) -> None:
    """After DummyModelLoader.load_model."""
    layers = _layers(model, model_config)
    for layer in layers:
        A_log, dt_bias = layer.gates
        set_decays(A_log, dt_bias, horizon())
    logger.info("hypic: dummy weights of %d linear layers remember over %d tokens", len(layers), horizon())


def after_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """After Scheduler.get_init_info: what the loaded model's decays are now, read from its parameters."""
    runner = scheduler.tp_worker.model_runner
    found: dict[str, Any] = {"horizon": horizon(), "layers": 0}
    decays = [log_decays(*layer.gates) for layer in _layers(runner.model, runner.model_config)]
    if decays:
        over = [horizon() * d for d in decays]
        least, most = max(d.max().item() for d in over), min(d.min().item() for d in over)
        found |= {"layers": len(decays), "least": least, "most": most}
    return info | {"dummy_decays": found}


_table = HookTable(
    "hypic.bench.dummy",
    (
        Hook("sglang.srt.model_loader.loader.DummyModelLoader.load_model", "after", after_dummy_load,
             "dummy weights forget everything at once, which flatters hypic", ("self",)),
        Hook("sglang.srt.managers.scheduler.Scheduler.get_init_info", "after", after_init_info,
             "so that the figures say which weights they are of", ("self",)),
    ),
)  # fmt: skip


def register() -> None:
    """Called where SGLang loads plugins: does nothing unless a horizon is set."""
    if horizon():
        _table.register()


def require_decays(scheduler_info: Mapping[str, Any]) -> dict[str, Any]:
    """What an engine whose weights are dummies says of its decays.

    Raises:
        RuntimeError: it says nothing, or not what was asked for.
    """
    found: dict[str, Any] | None = scheduler_info.get("dummy_decays")
    if found is None or found["horizon"] != horizon():
        raise RuntimeError(f"{DUMMY_HORIZON}={horizon()} had no effect on the engine: {found}; {_table.problems()}")
    if found["layers"] and not -2 * FASTEST < found["most"] < found["least"] < 0:
        raise RuntimeError(f"the dummy weights do not decay as they should: {found}")
    return found


def told(found: Mapping[str, Any]) -> str:
    """One line for people."""
    if not found["layers"]:
        return "dummy weights: no layer of this model has a T whose cost depends on what heads remember"
    return (
        f"dummy weights: the heads of {found['layers']} linear layers remember (log decay of {found['least']:.2g} to "
        f"{found['most']:.2g} over {found['horizon']:,} tokens), so that T costs the most that it can; --dummy-horizon 0 leaves "
        "them as SGLang draws them: all forget, and T costs nothing"
    )
