"""How far a method is from full recompute inside the model: layer by layer, and by distance from the seam."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hypic.eval.items import Probe
from hypic.eval.methods import FULL, Method
from hypic.eval.prompt import Prompt
from hypic.eval.reference.runner import Head, Reference

SPAN = 64


@torch.inference_mode()
def probe(
    reference: Reference,
    item: str,
    prompt: Prompt,
    methods: Sequence[Method],
    *,
    span: int = SPAN,
    only: Sequence[int] | None = None,
) -> list[Probe]:
    """One probe for each method.

    Args:
        prompt: with at least one segment.
        span: ``distance`` reaches so many tokens into documents, or as far as the longest of them.
        only: layers that ``distance`` is the mean over; all by default.
    """
    full = reference.head(FULL, prompt, trace=True)
    full_outputs = reference.tail_outputs(full, prompt)
    kinds = tuple(mixer.kind for _, mixer in reference.model.layers)
    span = min(span, max(end - start for start, end in prompt.segments))
    inside = torch.tensor([i for start, end in prompt.segments for i in range(start, end)])
    found = []
    for method in methods:
        head = reference.head(method, prompt, trace=True)
        outputs = reference.tail_outputs(head, prompt)
        kept = []
        for kind, mine, truth in zip(kinds, head.layers, full.layers, strict=True):
            rows = inside if kind == "attention" else slice(None)
            kept.append(_error(mine.kept[rows], truth.kept[rows]))
        found.append(
            Probe(
                item=item,
                method=method.name,
                layers=kinds,
                hidden=tuple(_error(a, b) for a, b in zip(outputs, full_outputs, strict=True)),
                kept=tuple(kept),
                distance=_by_distance(head, full, prompt, span, range(len(kinds)) if only is None else only),
            )
        )
    return found


def _error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def _by_distance(head: Head, full: Head, prompt: Prompt, span: int, layers: Sequence[int]) -> tuple[float, ...]:
    """Mean relative error of values over layers and documents, for each place in a document up to ``span``."""
    total = torch.zeros(span, dtype=torch.float64)
    count = torch.zeros(span, dtype=torch.float64)
    for i in layers:
        mine, truth = head.layers[i].values, full.layers[i].values
        error = ((mine - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(1e-12)).double().cpu()
        for start, end in prompt.segments:
            n = min(span, end - start)
            total[:n] += error[start : start + n]
            count[:n] += 1
    return tuple((total / count.clamp_min(1)).tolist())
