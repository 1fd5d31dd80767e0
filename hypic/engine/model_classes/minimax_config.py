"""Configs of MiniMax-Text-01 and MiniMax-M1, with what SGLang asks of a hybrid."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.runtime_context import get_parallel
from transformers import MiniMaxConfig

_PUBLISHED = {
    f"layernorm_{theirs}_{factor}": f"{ours}_{factor}_factor"
    for theirs, ours in (("linear_attention", "linear_attn"), ("full_attention", "full_attn"), ("mlp", "mlp"))
    for factor in ("alpha", "beta")
}
"""Names in published configs of what transformers names otherwise."""


class MiniMaxHybridConfig(MiniMaxConfig):
    """transformers' config."""

    @property
    def linear_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind == "linear_attention"]

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return [i for i, kind in enumerate(self.layer_types) if kind == "full_attention"]

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        shape = Mamba2StateShape.create(
            tp_world_size=get_parallel().attn_tp_size,
            intermediate_size=0,
            n_groups=0,
            num_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            state_size=self.head_dim,
            conv_kernel=1,
        )
        return Mamba2CacheParams(shape=shape, layers=self.linear_layer_ids)


class MiniMaxM1Config(MiniMaxHybridConfig):
    """As published: kinds of layers by number, residual factors by norm, rotary channels by count."""

    model_type = "minimax_m1"

    def __post_init__(self, **kwargs: Any) -> None:
        kinds, shared = kwargs.pop("attn_type_list", None), kwargs.get("shared_intermediate_size") or 0
        # Absent in a published config: false. In one that was read and written again: true.
        postnorm = kwargs.pop("postnorm", kinds is None)
        if not postnorm or any(shared if isinstance(shared, list) else [shared]):
            raise ValueError(f"{self.model_type} without postnorm, or with shared experts, is another model")
        if kinds is not None:
            self.layer_types = ["full_attention" if kind else "linear_attention" for kind in kinds]
        for theirs in [name for name in kwargs if name in _PUBLISHED]:
            setattr(self, _PUBLISHED[theirs], kwargs.pop(theirs))
        rotary, factor = kwargs.pop("rotary_dim", None), kwargs.pop("partial_rotary_factor", 1.0)
        super().__post_init__(**kwargs)
        # As SGLang's attention reads it.
        self.partial_rotary_factor = factor if rotary is None else rotary / self.head_dim


class MiniMaxText01Config(MiniMaxM1Config):
    model_type = "minimax_text_01"
