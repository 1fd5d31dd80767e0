"""What a link leaves in the linear layers' states, measured on the oracle: composing, and the last segment alone.

At the first layer a composed state is that of full recompute: its inputs are the tokens themselves. Further up, interiors
were compiled without their prefix, and that difference is what position-independent caching costs. LinearKV
(arXiv 2608.11231) drops what stood before the last segment instead of composing; this says by how much either is off.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hypic.check.oracle import Oracle, OracleError
from hypic.check.oracle_kimi import LatentKV
from hypic.check.oracle_mixers import KV, interior

METHODS = ("composing", "last segment only")


class StateErrors(NamedTuple):
    """Errors against full recompute, means over prompts.

    Attributes:
        layers: ids of the layers with a state.
        states: for each method and layer, |h - h_full| / |h_full| behind the last segment (Frobenius norms).
        kl: for each method, KL divergence of the next token's distribution behind the question, in nats.
        prompts: how many.
    """

    layers: tuple[int, ...]
    states: dict[str, list[float]]
    kl: dict[str, float]
    prompts: int


@torch.inference_mode()
def state_errors(
    model: Path | str, *, segments: int = 4, length: int = 200, w: int = 8, prompts: int = 4, seed: int = 0
) -> StateErrors:
    """Random prompts: a few plain tokens, ``segments`` segments of ``length`` tokens, a question of 20.

    Raises:
        OracleError: a model that the oracle does not know, or one without linear layers.
    """
    oracle = Oracle(model)
    starts = [block.start() for block in oracle._blocks]
    layers = tuple(i for i, s in enumerate(starts) if _linear(s) is not None)
    if not layers:
        raise OracleError(f"{model}: no layer has a recurrent state")
    vocab, rng = oracle._embed.num_embeddings, random.Random(seed)
    states = {m: [0.0] * len(layers) for m in METHODS}
    kl = dict.fromkeys(METHODS, 0.0)
    for _ in range(prompts):
        parts = [[rng.randrange(vocab) for _ in range(n)] for n in (16, *[length] * segments, 20)]
        full = _walk(oracle, parts, w, None)
        for method in METHODS:
            found = _walk(oracle, parts, w, method)
            for at, layer in enumerate(layers):
                h, truth = _linear(found.states[layer]), _linear(full.states[layer])
                assert h is not None and truth is not None
                states[method][at] += float((h - truth).norm() / truth.norm()) / prompts
            kl[method] += float((full.logprobs.exp() * (full.logprobs - found.logprobs)).sum()) / prompts
    return StateErrors(layers, states, kl, prompts)


class _End(NamedTuple):
    """States behind the last segment, and the distribution behind the question."""

    states: list[Any]
    logprobs: torch.Tensor


def _walk(oracle: Oracle, parts: list[list[int]], w: int, method: str | None) -> _End:
    """A prompt [plain, segments ..., question] under a method; None: full recompute."""
    fresh = [block.start() for block in oracle._blocks]
    _, states, _ = oracle._run(parts[0], fresh)
    for segment in parts[1:-1]:
        if method is None:
            _, states, _ = oracle._run(segment, states)
            continue
        _, states, _ = oracle._run(segment[:w], states)
        if method == "last segment only":
            states = [_forget(s, f) for s, f in zip(states, fresh, strict=True)]
        records = oracle._compile(tuple(segment))
        states = [b.replay(s, interior(r, w)) for b, s, r in zip(oracle._blocks, states, records, strict=True)]
    hidden, _, _ = oracle._run(parts[-1], states)
    return _End(states, oracle._logits(hidden).log_softmax(-1))


def _parts(state: Any) -> Iterator[Any]:
    """The states in a layer's state: itself, or several side by side."""
    if hasattr(state, "h") or isinstance(state, KV | LatentKV):
        yield state
    else:
        for part in state:
            yield from _parts(part)


def _linear(state: Any) -> torch.Tensor | None:
    return next((part.h for part in _parts(state) if hasattr(part, "h")), None)


def _forget(state: Any, fresh: Any) -> Any:
    """Recurrent states start anew; K and V stay."""
    if hasattr(state, "h"):
        return fresh
    if isinstance(state, KV | LatentKV):
        return state
    return type(state)(*(_forget(s, f) for s, f in zip(state, fresh, strict=True)))
