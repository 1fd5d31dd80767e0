"""Lightning attention (SegLA): Ring-linear-2.0, Ring-2.5, MiniMax. T is one constant decay per head; keys may rotate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape
from hypic.engine.families.base import DecayLayer, Family, Inputs, LinearLayer, Memory
from hypic.engine.linear import LinkedLinear
from hypic.engine.relocation import CannotRelocate, require_rotation
from hypic.kernels.chain_plans import ChainPlan
from hypic.kernels.compile_plans import TransitionPlan
from hypic.kernels.lightning_chain import KeyRotation, LightningLayer, lightning_chain, lightning_log_decay


class RotatedLayer(DecayLayer):
    """Inputs: q, k, v [T, H, D], q and k rotated by the model.

    Args:
        parameters: as the kernels take them. dim: D. impl: of the kernels, None: by device.
    """

    def __init__(self, parameters: LightningLayer, dim: int, impl: Any = None):
        self._parameters, self._dim, self._impl, self.device = parameters, dim, impl, parameters.slope.device
        self.positions = 0 if parameters.rotation is None else len(parameters.rotation.table)

    def chain(self, inputs: Inputs, at: Memory, plan: ChainPlan, out: Tensor) -> None:
        lightning_chain(
            *inputs, layer=self._parameters, state_pool=at.state, arena=at.arena, t_off=at.t_off, s_off=at.s_off,
            plan=plan, out=out, state_dtype=at.state_dtype, impl=self._impl,
        )  # fmt: skip

    def transition(self, inputs: Inputs, at: Memory, plan: TransitionPlan) -> None:
        lightning_log_decay(self._parameters, arena=at.arena, t_off=at.t_off, plan=plan)

    def random_inputs(self, n: int, random: Callable[..., Tensor]) -> Inputs:
        heads = len(self._parameters.slope)
        q, k, v = (random(n, heads, self._dim).float() for _ in range(3))  # in any model
        return q, k, v

    def at_positions(self, inputs: Inputs, positions: Tensor) -> Inputs:
        q, k, v = inputs
        rotation = self._parameters.rotation
        return inputs if rotation is None else (rotation.apply(q, positions), rotation.apply(k, positions), v)


class LinkedLightning(LinkedLinear):
    """Mixin in front of SGLang's LightningAttentionBackend."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Tensor:
        def native(view: Any, inputs: Inputs) -> Tensor:
            out: Tensor = super(LinkedLightning, self).forward_extend(  # type: ignore[misc]
                *inputs, layer, view, save_kv_cache, **kwargs
            )
            return out

        inputs = tuple(x.view(-1, layer.tp_q_head_num, layer.head_dim) for x in (q, k, v))
        out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        layers = self.hypic_runtime.linear_layers
        return self.run_layer(layer.layer_id, layers[layer.layer_id], inputs, out, native).view(len(out), -1)


class Lightning(Family):
    name = "lightning"
    title = "Lightning"
    backend = "sglang.srt.layers.attention.linear.lightning_backend.LightningAttentionBackend"
    operator = "log_decay"
    mixin = LinkedLightning

    def config(self, model_config: Any) -> Any | None:
        from sglang.srt.configs.hybrid_arch import hybrid_lightning_config, linear_attn_model_spec

        if (spec := linear_attn_model_spec(model_config)) is not None and spec.backend_class_name == self.backend:
            return model_config.hf_config
        return hybrid_lightning_config(model_config)

    def check_model(self, model: Any, max_position: int) -> None:
        for module in _modules(model):
            if module.linear_backend != "seg_la":
                raise CannotRelocate(f"linear_backend {module.linear_backend!r}: only seg_la is proven")
            if module.linear_rope:
                require_rotation(module.rotary_emb, max_position)
                if not module.rotary_emb.is_neox_style:
                    raise CannotRelocate("linear layers rotate interleaved pairs: only half-split ones are proven")

    def layers(self, model: Any) -> dict[int, LinearLayer]:
        from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend

        found: dict[int, LinearLayer] = {}
        for module in _modules(model):
            device = next(module.parameters()).device
            # The backend makes its slopes so; it takes the number of all layers from the config.
            slopes = LightningAttentionBackend._build_slope_tensor(
                module.total_num_heads, model.config.num_hidden_layers, device
            )
            rotation = None
            if module.linear_rope:
                rotary = module.rotary_emb
                scale = float(getattr(rotary, "mscale", 1.0) or 1.0)
                rotation = KeyRotation(rotary.cos_sin_cache, int(rotary.rotary_dim), scale)
            parameters = LightningLayer(slopes[module.layer_id].view(-1), module.scaling, rotation)
            found[module.layer_id] = RotatedLayer(parameters, module.head_dim)
        return found

    def random_layer(self, shape: LinearShape, randn: Callable[..., Tensor]) -> LinearLayer:
        rotary, positions = shape.d_k // 2, 1 << 16
        angles = randn(positions, rotary // 2, dtype=torch.float32)
        rotation = KeyRotation(torch.cat([angles.cos(), angles.sin()], -1), rotary, 1.0)
        slope = randn(shape.heads, dtype=torch.float32).exp() / 1000
        return RotatedLayer(LightningLayer(slope, shape.d_k**-0.5, rotation), shape.d_k)

    def shape(
        self, layer_ids: Any, conv: Any, state: tuple[int, ...], conv_dtype: str, state_dtype: str
    ) -> LinearShape:
        if state[1] != state[2]:
            raise ValueError(f"states {state}: SGLang keeps them as [key, value] here, both of the head's size")
        return super().shape(layer_ids, conv, state, conv_dtype, state_dtype)


def _modules(model: Any) -> list[Any]:
    return [
        m for m in model.modules() if type(m).__name__ in ("BailingMoELinearAttention", "MiniMaxLightningAttention")
    ]


FAMILY = Lightning()
