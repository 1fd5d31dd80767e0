"""Start-up proof that composing by (T, S) equals running the tokens, with the loaded model's own parameters."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from hypic.artifact.layout import ArtifactLayout, LinearShape
from hypic.engine.gdn import gdn_parameters
from hypic.kernels.gdn_chain import ChainItem, ChainPlan, gdn_chain
from hypic.kernels.gdn_inputs import InputsPlan, gdn_inputs
from hypic.kernels.gdn_transition import TransitionPlan, gdn_transition

COMPOSITION_TOLERANCE = 2e-3
"""Bound on the composed state's error relative to the largest entry, in IEEE float32."""

_SEAM, _INTERIOR, _QUERY = 8, 70, 5


class ComposeError(ValueError):
    """A composed state is not the state that the tokens give."""


def linear_layers(model: Any) -> dict[int, Any]:
    """SGLang's RadixLinearAttention modules of a model, by layer id."""
    return {m.layer_id: m for m in model.modules() if type(m).__name__ == "RadixLinearAttention"}


@torch.no_grad()
def check_composition(model: Any, shape: LinearShape) -> float:
    """Run random inputs through the first and last linear layer twice: token by token, and with the middle joined as an
    artifact. Returns the worst relative error of the end states.

    Raises:
        ComposeError: a layer is missing or the error exceeds COMPOSITION_TOLERANCE.
    """
    layers = linear_layers(model)
    if missing := sorted(set(shape.layer_ids) - set(layers)):
        raise ComposeError(f"no linear-attention module found for layers {missing}")
    worst = 0.0
    for layer_id in {shape.layer_ids[0], shape.layer_ids[-1]}:
        worst = max(worst, _layer_error(layers[layer_id], shape))
    if not worst <= COMPOSITION_TOLERANCE:
        raise ComposeError(f"composing by T and S is off by {worst:.1e} (bound {COMPOSITION_TOLERANCE:.0e})")
    return worst


def _layer_error(layer: Any, shape: LinearShape) -> float:
    weights = layer.conv_weights
    device, total = weights.device, _SEAM + _INTERIOR + _QUERY
    one = ArtifactLayout(msgspec.structs.replace(shape, layer_ids=(0,), state_dtype="float32"), None)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device)

    x, a, b = random(total, shape.conv_channels), random(total, shape.heads), random(total, shape.heads)
    params = gdn_parameters(layer)
    arena = torch.zeros(one.payload_bytes(0), dtype=torch.uint8, device=device)
    offsets: dict[str, Any] = dict(t_off=one.t_offset(0), s_off=one.s_offset(0))
    width = shape.conv_width + 1

    def pools() -> dict[str, Any]:
        dtype = getattr(torch, shape.conv_dtype)
        return dict(
            conv_pool=torch.zeros(1, shape.conv_channels, shape.conv_width, dtype=dtype, device=device),
            ssm_pool=torch.zeros(1, shape.heads, shape.d_v, shape.d_k, device=device),
        )

    def chain(items: list[ChainItem]) -> torch.Tensor:
        state = pools()
        plan = ChainPlan.build(rows=[items], slot=[0], fresh=[True], conv_width=width, device=device)
        out = x.new_zeros(total, shape.heads, shape.d_v)
        gdn_chain(
            x, a, b, **params, **state, arena=arena, **offsets,
            c_off=one.conv_offset(0), plan=plan, out=out, precision="ieee",
        )  # fmt: skip
        return state["ssm_pool"]

    whole = chain([ChainItem(0, total)])
    # The interior is compiled behind its own seam, from zero, as a compile request does.
    inputs = InputsPlan.build(
        seq_tok=[0],
        seq_len=[_SEAM + _INTERIOR],
        seq_slot=[0],
        seq_fresh=[True],
        seq_skip=[_SEAM],
        conv_width=width,
        device=device,
    )
    k, v, g, beta = gdn_inputs(x, a, b, **params, conv_pool=pools()["conv_pool"], plan=inputs)
    plan = TransitionPlan.build(cu=[0, len(k)], blob=[0], first=[True], device=device)
    gdn_transition(k, v, g, beta, arena=arena, **offsets, plan=plan, precision="ieee")
    window = slice(_SEAM + _INTERIOR - shape.conv_width, _SEAM + _INTERIOR)
    tail = x[window].t().to(getattr(torch, shape.conv_dtype)).contiguous()
    at = one.conv_offset(0)
    arena[at : at + tail.numel() * tail.element_size()] = tail.view(torch.uint8).flatten()
    joined = chain([ChainItem(0, _SEAM, 0, shape.conv_width), ChainItem(_SEAM + _INTERIOR, _QUERY)])
    return float((joined - whole).abs().max() / whole.abs().max().clamp(min=1e-20))
