"""What building artifacts costs of a cold prompt, added up from the times of the kernels that do it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hypic.bench.result import ArtifactCost, EngineRun, Timing

_COMPILE, _LAYER, _ALL = "compile: ", ", one layer", ", all layers"
_SOLVED, _INSTEAD_OF = "T out of SGLang's pass", ("keys and gates", "T")
"""What makes T where SGLang's own pass has solved its systems, and what does elsewhere."""


def artifact_cost(kernels: Sequence[Timing], engines: Sequence[EngineRun]) -> ArtifactCost | None:
    """From the kernels suite's cases, held against hypic's cold and warm TTFT of the same run; None without such cases.

    What the sum leaves out: plans and copies of conv windows, which are of the engine; launches, which a GPU that is busy with
    a prefill hides.
    """
    cost = ArtifactCost()
    for t in kernels:
        if not t.case.startswith(_COMPILE):
            continue
        name = t.case.removeprefix(_COMPILE)
        if name.endswith(_LAYER):
            cost.per_layer[name.removesuffix(_LAYER)] = t.median
            cost.passes, cost.layers = t.shape["passes"], t.shape["layers"]
        else:
            cost.once[name.removesuffix(_ALL)] = t.median
    if not cost.per_layer and not cost.once:
        return None
    if _SOLVED in cost.per_layer:
        cost.per_layer = {name: ms for name, ms in cost.per_layer.items() if name not in _INSTEAD_OF}
    timed = {t.case: t.median for e in engines if e.name == "hypic" for t in e.timings if t.suite == "ttft"}
    return msgspec.structs.replace(cost, cold=timed.get("cold"), warm=timed.get("warm"))


def arithmetic(cost: ArtifactCost) -> str:
    """One line that can be checked by hand."""
    terms = []
    if cost.per_layer:
        kernels = " + ".join(f"{ms:.3f} {name}" for name, ms in cost.per_layer.items())
        terms.append(f"{cost.passes} forward pass{'es' * (cost.passes != 1)} x {cost.layers} layers x ({kernels})")
    terms += [f"{ms:.2f} {name}" for name, ms in cost.once.items()]
    text = f"building artifacts, in ms: {' + '.join(terms)} = {cost.total:.2f}"
    if cost.cold is None or cost.warm is None:
        return f"{text}; the suite ttft on hypic says what share of a cold prompt that is"
    longer = f"cold {cost.cold:.1f} - warm {cost.warm:.1f} = {cost.cold - cost.warm:.1f}"
    if cost.share is None:
        return f"{text}; {longer}: no share of that can be given"
    return f"{text}; {longer}; {cost.total:.2f} / {cost.cold - cost.warm:.1f} = {cost.share:.1%}"
