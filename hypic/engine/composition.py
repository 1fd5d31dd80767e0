"""Start-up proof that composing by (T, S) equals running the tokens, with the loaded model's own parameters."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import torch

from hypic.artifact.layout import ArtifactLayout, LinearShape
from hypic.artifact.store import Artifact
from hypic.engine.batch import CompileRow
from hypic.engine.families import family
from hypic.engine.families.base import Inputs, LinearLayer, Memory
from hypic.engine.linear_compile import CompileStep
from hypic.engine.request import Compile
from hypic.kernels._triton import Precision
from hypic.kernels.chain_plans import ChainItem, ChainPlan

COMPOSITION_TOLERANCE = 2e-3
"""Bound on the composed state's error relative to the largest entry, in float32."""
_PRECISION: Precision = "tf32x3"
"""Close to float32. Products in IEEE float32 run without tensor cores: unrolled, they would take a bare GPU machine 20
seconds longer to compile at its first start, and no request uses those kernels."""

_PREFIX, _SEAM, _INTERIOR, _QUERY = 9, 8, 70, 5


class ComposeError(ValueError):
    """A composed state is not the state that the tokens give."""


@torch.no_grad()
def check_composition(model: Any, shape: LinearShape) -> float:
    """Run random inputs through the first and last linear layer twice: token by token, and with the middle joined as an
    artifact, compiled as in a batch but for the tokens' own pass. Returns the worst relative error of the end states.

    The segment stands behind other tokens: at the start of a prompt h T + S is its end state whatever T is. Where inputs
    know positions it also stands at the end of the context; a rotation there may be off by what the table rounds.

    Raises:
        ComposeError: a layer is missing, computes something else, or the error exceeds COMPOSITION_TOLERANCE.
    """
    try:
        layers = family(shape.family).layers(model)
    except ValueError as e:
        raise ComposeError(str(e)) from None
    if missing := sorted(set(shape.layer_ids) - set(layers)):
        raise ComposeError(f"no linear-attention module found for layers {missing}")
    worst = 0.0
    for layer_id in {shape.layer_ids[0], shape.layer_ids[-1]}:
        layer = layers[layer_id]
        for start in sorted(
            {_PREFIX, layer.positions - _INTERIOR - 2 * _SEAM - _QUERY} if layer.positions else {_PREFIX}
        ):
            error, bound = _layer_error(layer, shape, start), COMPOSITION_TOLERANCE + (start - _PREFIX) * 2**-23
            if not error <= bound:
                raise ComposeError(
                    f"composing by T and S at position {start} is off by {error:.1e} (bound {bound:.0e})"
                )
            worst = max(worst, error)
    return worst


def _layer_error(layer: LinearLayer, shape: LinearShape, start: int) -> float:
    """Of a segment that begins at position ``start``, behind _PREFIX tokens."""
    device, segment = layer.device, _SEAM + _INTERIOR
    total = _PREFIX + segment + _QUERY
    one = ArtifactLayout(msgspec.structs.replace(shape, layer_ids=(0,), state_dtype="float32", operator_dtype=""), None)
    assert one.linear is not None
    generator = torch.Generator().manual_seed(0)
    conv_dtype = getattr(torch, shape.conv_dtype)

    def random(*size: int) -> torch.Tensor:
        values = torch.randn(*size, generator=generator).to(device)
        return values.to(conv_dtype).float()  # so that windows hold it exactly

    drawn, places = layer.random_inputs(total, random), torch.arange(total, device=device) - _PREFIX
    alone, inputs = layer.at_positions(drawn, places.clamp(min=0)), layer.at_positions(drawn, places + start)
    out = torch.zeros(total, shape.heads, shape.d_v, device=device)
    at = Memory(
        conv=torch.zeros(3, *shape.window, dtype=conv_dtype, device=device) if shape.conv_width else None,
        state=torch.zeros(3, shape.heads, shape.d_v, shape.d_k, device=device),
        arena=torch.zeros(one.payload_bytes(0), dtype=torch.uint8, device=device),
        t_off=one.t_offset(0),
        s_off=one.s_offset(0),
        c_off=one.conv_offset(0),
        state_dtype=torch.float32,
        precision=_PRECISION,
    )

    def chain(slot: int, items: list[ChainItem], inputs: Inputs) -> torch.Tensor:
        plan = ChainPlan.build(rows=[items], slot=[slot], fresh=[True], conv_width=shape.conv_width + 1, device=device)
        layer.chain(inputs, at, plan, out)
        return at.state[slot]

    artifact = Artifact(b"", array("q", range(segment)), "", 0, at.arena.numel(), 0)
    row = CompileRow(Compile(artifact, _SEAM), pool_row=0, begin=0, end=segment)
    step = CompileStep([row], [_PREFIX], torch.zeros(1, dtype=torch.int64, device=device), one.linear)
    step.before(layer, alone, at, out)
    chain(0, [ChainItem(_PREFIX, segment)], alone)
    step.after(layer, at)

    whole = chain(1, [ChainItem(0, total)], inputs)
    seam, query = _PREFIX, _PREFIX + segment
    joined = chain(
        2,
        [ChainItem(0, _PREFIX), ChainItem(seam, _SEAM, 0, shape.conv_width, start), ChainItem(query, _QUERY)],
        inputs,
    )
    return float((joined - whole).abs().max() / whole.abs().max().clamp(min=1e-20))
