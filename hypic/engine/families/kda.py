"""Kimi delta attention: Kimi-Linear. T is a dense matrix per head, as GDN's, under a gate for every key channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape
from hypic.engine.families.base import Family, Inputs, LinearLayer, Memory
from hypic.engine.families.gdn import GdnLayer
from hypic.engine.linear import LinkedLinear
from hypic.kernels.chain_plans import ChainPlan
from hypic.kernels.compile_plans import TransitionPlan


class KdaLayer(GdnLayer):
    """Inputs: the projections mixed_qkv [T, D], raw gates a [T, H K], and beta [T, H]. Windows lie as [W-1, D]."""

    @classmethod
    def of(cls, layer: Any) -> KdaLayer:
        """Of SGLang's RadixLinearAttention module. Raises ValueError if it computes something else."""
        if layer.lower_bound is not None:
            raise ValueError("Kimi delta attention with a lower bound on its gates (Kimi-K3) is not proven")
        heads, dim = layer.num_v_heads, layer.head_k_dim
        return cls(
            dict(
                conv_weight=layer.conv_weights,
                conv_bias=layer.bias,
                activation=layer.activation,
                A_log=layer.A_log.view(heads),
                dt_bias=layer.dt_bias.view(heads, dim),
                num_k_heads=layer.num_k_heads,
                num_v_heads=heads,
                head_k_dim=dim,
                head_v_dim=layer.head_v_dim,
            )
        )

    def chain(self, inputs: Inputs, at: Memory, plan: ChainPlan, out: Tensor) -> None:
        super().chain(inputs, _by_channel(at), plan, out)

    def transition(self, inputs: Inputs, at: Memory, plan: TransitionPlan) -> None:
        super().transition(inputs, _by_channel(at), plan)

    def random_inputs(self, n: int, random: Callable[..., Tensor]) -> Inputs:
        channels, gates = self._parameters["conv_weight"].shape[0], self._parameters["dt_bias"]
        return random(n, channels), random(n, gates.numel()), random(n, len(gates)).sigmoid()


def _by_channel(at: Memory) -> Memory:
    assert at.conv is not None
    return replace(at, conv=at.conv.mT)


class LinkedKda(LinkedLinear):
    """Mixin in front of SGLang's KDAAttnBackend, which takes a [1, T, H, K] and b [1, T, H] when it prefills."""

    def forward_extend(self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        heads = a.shape[2:]

        def native(view: Any, inputs: Inputs) -> Tensor:
            mixed_qkv, a, b = inputs
            out: Tensor = super(LinkedKda, self).forward_extend(  # type: ignore[misc]
                layer=layer, forward_batch=view, mixed_qkv=mixed_qkv, a=a.unflatten(1, heads)[None], b=b[None], **kwargs
            )
            return out

        out = mixed_qkv.new_empty(mixed_qkv.shape[0], layer.num_v_heads, layer.head_v_dim)
        return self.run_layer(layer.layer_id, KdaLayer.of(layer), (mixed_qkv, a[0].flatten(1), b[0]), out, native)[None]


class Kda(Family):
    name = "kda"
    title = "Kimi delta attention"
    backend = "sglang.srt.layers.attention.linear.kda_backend.KDAAttnBackend"
    operator = "dense"
    mixin = LinkedKda

    def config(self, model_config: Any) -> Any | None:
        from sglang.srt.configs.hybrid_arch import kimi_linear_config

        return kimi_linear_config(model_config)

    def layers(self, model: Any) -> dict[int, LinearLayer]:
        modules = [m for m in model.modules() if type(m).__name__ == "RadixLinearAttention"]
        return {m.layer_id: KdaLayer.of(m) for m in modules}

    def random_layer(self, shape: LinearShape, randn: Callable[..., Tensor]) -> LinearLayer:
        heads, channels = shape.heads, shape.conv_channels
        return KdaLayer(
            dict(
                conv_weight=randn(channels, shape.conv_width + 1, dtype=torch.float32),
                conv_bias=None,
                activation="silu",
                A_log=randn(heads, dtype=torch.float32) - 8.0,
                dt_bias=randn(heads, shape.d_k, dtype=torch.float32),
                num_k_heads=heads,
                num_v_heads=heads,
                head_k_dim=shape.d_k,
                head_v_dim=shape.d_v,
            )
        )

    def shape(
        self,
        layer_ids: tuple[int, ...],
        conv: Sequence[tuple[int, ...]],
        state: tuple[int, ...],
        conv_dtype: str,
        state_dtype: str,
    ) -> LinearShape:
        by_channel = [tuple(reversed(shape)) for shape in conv]
        shape = super().shape(layer_ids, by_channel, state, conv_dtype, state_dtype)
        return msgspec.structs.replace(shape, columns_first=True)


FAMILY = Kda()
