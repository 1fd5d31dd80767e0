"""Gated delta networks: Qwen3-Next, Qwen3.5. T is a dense matrix per head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape
from hypic.engine import solved_chunks
from hypic.engine.families.base import Family, Inputs, LinearLayer, Memory
from hypic.engine.linear import LinkedLinear
from hypic.kernels.chain_plans import ChainPlan
from hypic.kernels.compile_plans import EndStatesPlan, TransitionPlan
from hypic.kernels.gdn_chain import gdn_chain
from hypic.kernels.gdn_end_states import gdn_end_states
from hypic.kernels.gdn_keys import gdn_keys
from hypic.kernels.gdn_solved import SolvedChunks, SolvedPlan, gdn_transition_solved
from hypic.kernels.gdn_transition import gdn_transition


class GdnLayer(LinearLayer):
    """Inputs: the projections mixed_qkv [T, D], a and b [T, HV].

    Args:
        parameters: as the kernels take them. impl: of the kernels, None: by device.
    """

    def __init__(self, parameters: dict[str, Any], impl: Any = None):
        self._parameters, self._impl, self.device = parameters, impl, parameters["conv_weight"].device

    @classmethod
    def of(cls, layer: Any) -> GdnLayer:
        """Of SGLang's RadixLinearAttention module."""
        return cls(
            dict(
                conv_weight=layer.conv_weights,
                conv_bias=layer.bias,
                activation=layer.activation,
                A_log=layer.A_log,
                dt_bias=layer.dt_bias,
                num_k_heads=layer.num_k_heads,
                num_v_heads=layer.num_v_heads,
                head_k_dim=layer.head_k_dim,
                head_v_dim=layer.head_v_dim,
            )
        )

    @property
    def gates(self) -> tuple[Tensor, Tensor]:
        """A_log [HV] and dt_bias [HV], or [HV, K] where each channel has a gate: the model's own, not copies."""
        return self._parameters["A_log"], self._parameters["dt_bias"]

    def chain(self, inputs: Inputs, at: Memory, plan: ChainPlan, out: Tensor) -> None:
        assert at.conv is not None
        gdn_chain(
            *inputs, **self._parameters, conv_pool=at.conv, ssm_pool=at.state, arena=at.arena, t_off=at.t_off,
            s_off=at.s_off, c_off=at.c_off, plan=plan, out=out, state_dtype=at.state_dtype,
            operator_dtype=at.operator_dtype, precision=at.precision, impl=self._impl,
        )  # fmt: skip

    def transition(self, inputs: Inputs, at: Memory, plan: TransitionPlan) -> None:
        assert at.conv is not None
        k, g, beta = gdn_keys(*inputs, plan=plan, conv_pool=at.conv, **self._parameters, impl=self._impl)
        gdn_transition(
            k, g, beta, arena=at.arena, t_off=at.t_off, operator_dtype=at.operator_dtype or at.state_dtype, plan=plan,
            precision=at.precision, impl=self._impl,
        )  # fmt: skip

    def transition_solved(self, chunks: SolvedChunks, at: Memory, plan: SolvedPlan) -> None:
        gdn_transition_solved(
            chunks, arena=at.arena, t_off=at.t_off, plan=plan, operator_dtype=at.operator_dtype or at.state_dtype,
            impl=self._impl,
        )  # fmt: skip

    def end_states(self, seam_states: Tensor, at: Memory, plan: EndStatesPlan) -> None:
        gdn_end_states(
            at.state, seam_states, arena=at.arena, t_off=at.t_off, s_off=at.s_off, plan=plan,
            state_dtype=at.state_dtype, operator_dtype=at.operator_dtype, precision=at.precision, impl=self._impl,
        )  # fmt: skip

    def random_inputs(self, n: int, random: Callable[..., Tensor]) -> Inputs:
        heads = self._parameters["num_v_heads"]
        return random(n, self._parameters["conv_weight"].shape[0]), random(n, heads), random(n, heads)


class LinkedGdn(LinkedLinear):
    """Mixin in front of SGLang's GDNAttnBackend."""

    def forward_extend(self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        def native(view: Any, inputs: Inputs) -> Tensor:
            mixed_qkv, a, b = inputs
            out: Tensor = super(LinkedGdn, self).forward_extend(  # type: ignore[misc]
                layer=layer, forward_batch=view, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
            )
            return out

        out = mixed_qkv.new_empty(mixed_qkv.shape[0], layer.num_v_heads, layer.head_v_dim)
        return self.run_layer(layer.layer_id, GdnLayer.of(layer), (mixed_qkv, a, b), out, native)[None]


class Gdn(Family):
    name = "gdn"
    title = "gated delta network"
    backend = "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend"
    operator = "dense"
    mixin = LinkedGdn

    def config(self, model_config: Any) -> Any | None:
        from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

        return hybrid_gdn_config(model_config)

    def layers(self, model: Any) -> dict[int, LinearLayer]:
        modules = [m for m in model.modules() if type(m).__name__ == "RadixLinearAttention"]
        return {m.layer_id: GdnLayer.of(m) for m in modules}

    def keeps_solved_chunks(self, model_runner: Any, shape: LinearShape, proof: bool) -> bool:
        backend = model_runner.attn_backend.linear_attn_backend
        if not solved_chunks.usable(backend):
            return False
        layer = next(m for m in model_runner.model.modules() if type(m).__name__ == "RadixLinearAttention")
        return not proof or solved_chunks.agrees(
            shape, layer.num_k_heads, model_runner.dtype, torch.device(backend.device)
        )


FAMILY = Gdn()
