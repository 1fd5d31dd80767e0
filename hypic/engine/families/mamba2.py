"""Mamba2: Nemotron-H, Nemotron-3, Falcon-H1, Granite-4-H. T is one decay per head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape
from hypic.engine.families.base import DecayLayer, Family, Inputs, LinearLayer, Memory
from hypic.engine.linear import LinkedLinear
from hypic.kernels.chain_plans import ChainPlan
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.mamba2_chain import mamba2_chain
from hypic.kernels.mamba2_decay import mamba2_log_decay
from hypic.kernels.mamba2_layer import Mamba2Layer


class MixerLayer(DecayLayer):
    """Inputs: the tokens' projections [T, gate + x B C + dt], as SGLang's mixer lays them out.

    Args:
        parameters: as the kernels take them. impl: of the kernels, None: by device.
    """

    def __init__(self, parameters: Mamba2Layer, impl: Any = None):
        self._parameters, self._impl, self.device = parameters, impl, parameters.conv_weight.device

    @classmethod
    def of(cls, mixer: Any) -> MixerLayer:
        """Of SGLang's MambaMixer2."""
        return cls(
            Mamba2Layer(
                conv_weight=mixer.conv1d.weight.squeeze(1),
                conv_bias=mixer.conv1d.bias,
                activation=mixer.activation,
                A=mixer.A,
                dt_bias=mixer.dt_bias,
                skip=mixer.D,
                heads=mixer.num_heads // mixer.tp_size,
                groups=mixer.n_groups // mixer.tp_size,
                d_v=mixer.head_dim,
                d_k=mixer.ssm_state_size,
            )
        )

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gate [T, H V], inputs of the convolution [T, D], raw dt [T, H]."""
        p = self._parameters
        gate, x, dt = projected.split([p.heads * p.d_v, p.dim, p.heads], -1)
        return gate, x, dt

    def chain(self, inputs: Inputs, at: Memory, plan: ChainPlan, out: Tensor) -> None:
        assert at.conv is not None
        _, x, dt = self.split(*inputs)
        mamba2_chain(
            x, dt, layer=self._parameters, conv_pool=at.conv, ssm_pool=at.state, arena=at.arena, t_off=at.t_off,
            s_off=at.s_off, c_off=at.c_off, plan=plan, out=out, state_dtype=at.state_dtype, impl=self._impl,
        )  # fmt: skip

    def transition(self, inputs: Inputs, at: Memory, plan: TransitionPlan) -> None:
        _, _, dt = self.split(*inputs)
        mamba2_log_decay(dt, layer=self._parameters, arena=at.arena, t_off=at.t_off, plan=plan, impl=self._impl)

    def random_inputs(self, n: int, random: Callable[..., Tensor]) -> Inputs:
        p = self._parameters
        return (random(n, p.heads * p.d_v + p.dim + p.heads),)


class _Scan:
    """SGLang's mixer between its projections: takes tokens projected, gives them ungated.

    The mixer is one function from hidden states to outputs. With its projections and norm stepped over, the rest of it
    (convolution and scan, for prefill and decode rows, with SGLang's bookkeeping) runs on any view of the batch, while
    the projections run once for all tokens.
    """

    in_proj = out_proj = staticmethod(lambda x: (x, None))
    norm = staticmethod(lambda x, gate: x)

    def __init__(self, mixer: Any):
        self._mixer = mixer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mixer, name)

    def forward(self, **kwargs: Any) -> Any:
        return type(self._mixer).forward(self, **kwargs)


class LinkedMamba2(LinkedLinear):
    """Mixin in front of SGLang's Mamba2AttnBackend, which models call with their mixer."""

    def forward(
        self,
        mixer: Any,
        hidden_states: Tensor,
        output: Tensor | None,
        layer_id: int,
        forward_batch: Any,
        mup_vector: Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> Tensor:
        def native(view: Any, inputs: Inputs) -> Tensor:
            out: Tensor = super(LinkedMamba2, self).forward(  # type: ignore[misc]
                mixer=_Scan(mixer),
                hidden_states=inputs[0],
                output=None,
                layer_id=layer_id,
                forward_batch=view,
                use_triton_causal_conv=use_triton_causal_conv,
            )
            return out

        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        layer = MixerLayer.of(mixer)
        gate, _, _ = layer.split(projected)
        out = gate.new_empty(len(gate), mixer.num_heads // mixer.tp_size, mixer.head_dim)
        out = self.run_layer(layer_id, layer, (projected,), out, native)
        mixed: Tensor = mixer.out_proj(mixer.norm(out.flatten(1), gate))[0]
        if output is not None:
            output[: len(mixed)].copy_(mixed)
        return mixed


class Mamba2(Family):
    name = "mamba2"
    title = "Mamba2"
    backend = "sglang.srt.layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend"
    operator = "log_decay"
    mixin = LinkedMamba2

    def config(self, model_config: Any) -> Any | None:
        from sglang.srt.configs import FalconH1Config, NemotronHConfig
        from sglang.srt.configs.granitemoehybrid import GraniteMoeHybridConfig
        from sglang.srt.configs.hybrid_arch import mamba2_config

        found = mamba2_config(model_config)  # it also knows short convolutions
        return found if isinstance(found, FalconH1Config | NemotronHConfig | GraniteMoeHybridConfig) else None

    def layers(self, model: Any) -> dict[int, LinearLayer]:
        """The mixer knows no layer id; its decoder layer does, under either name."""
        found: dict[int, LinearLayer] = {}
        for module in model.modules():
            for child in module.children():
                if type(child).__name__ == "MambaMixer2":
                    layer_id = module.layer_id if hasattr(module, "layer_id") else module.layer_idx
                    found[layer_id] = MixerLayer.of(child)
        return found

    def random_layer(self, shape: LinearShape, randn: Callable[..., Tensor]) -> LinearLayer:
        heads, d_v, d_k, channels = shape.heads, shape.d_v, shape.d_k, shape.conv_channels
        return MixerLayer(
            Mamba2Layer(
                conv_weight=randn(channels, shape.conv_width + 1),
                conv_bias=randn(channels),
                activation="silu",
                A=-randn(heads, dtype=torch.float32).exp() / 1000,
                dt_bias=randn(heads),
                skip=randn(heads),
                heads=heads,
                groups=(channels - heads * d_v) // (2 * d_k),
                d_v=d_v,
                d_k=d_k,
            )
        )


FAMILY = Mamba2()
