"""Decoder layers of the oracle: how norms, mixers, residuals and multipliers of an architecture go together.

A block has the interface of a mixer (see oracle_mixers) on the residual stream: it takes hidden states and returns them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from hypic.check import oracle_lightning
from hypic.check.oracle_kimi import KimiDelta, LatentAttention, Rope
from hypic.check.oracle_mamba import Mamba2, SsmState, SsmTokens
from hypic.check.oracle_mixers import KV, Attention, Mixer, NoRope, mixer_of


class PreNorm:
    """Qwen, Llama, Ring: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, layer: Any, mixer: Mixer[Any, Any]) -> None:
        self._layer, self._mixer = layer, mixer

    def start(self) -> Any:
        return self._mixer.start()

    def run(self, x: Tensor, state: Any) -> tuple[Tensor, Any, Any]:
        layer = self._layer
        y, state, record = self._mixer.run(layer.input_layernorm(x), state)
        x = x + y
        return x + layer.mlp(layer.post_attention_layernorm(x)[None])[0], state, record

    def replay(self, state: Any, record: Any) -> Any:
        return self._mixer.replay(state, record)


class KimiLinear:
    """Pre-norm as well: Kimi delta attention, or latent attention without positions."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        mixer = layer.self_attn
        self._mixer: Mixer[Any, Any] = KimiDelta(mixer) if hasattr(mixer, "A_log") else LatentAttention(mixer, NoRope())

    def start(self) -> Any:
        return self._mixer.start()

    def run(self, x: Tensor, state: Any) -> tuple[Tensor, Any, Any]:
        layer = self._layer
        y, state, record = self._mixer.run(layer.input_layernorm(x), state)
        x = x + y
        return x + layer.channels(layer.post_attention_layernorm(x)), state, record

    def replay(self, state: Any, record: Any) -> Any:
        return self._mixer.replay(state, record)


class MiniMax:
    """What the norms give is the residual stream; factors weigh it and what is added. Linear layers do not rotate."""

    def __init__(self, layer: Any, rope: Rope) -> None:
        self._layer, mixer = layer, layer.self_attn
        self._mixer: Mixer[Any, Any]
        if hasattr(mixer, "slope_rate"):
            self._mixer = oracle_lightning.Lightning(oracle_lightning.MiniMaxLinear(mixer), NoRope())
        else:
            self._mixer = Attention(mixer, rope)

    def start(self) -> Any:
        return self._mixer.start()

    def run(self, x: Tensor, state: Any) -> tuple[Tensor, Any, Any]:
        layer = self._layer
        x = layer.input_layernorm(x)
        y, state, record = self._mixer.run(x, state)
        x = layer.post_attention_layernorm(x * layer.attn_alpha_factor + y * layer.attn_beta_factor)
        return x * layer.mlp_alpha_factor + layer.mlp(x[None])[0] * layer.mlp_beta_factor, state, record

    def replay(self, state: Any, record: Any) -> Any:
        return self._mixer.replay(state, record)


class Nothing(NamedTuple):
    """State and record of a layer that mixes no tokens."""


class NemotronH:
    """One module per layer: Mamba-2, attention without positions, MLP or mixture of experts."""

    def __init__(self, layer: Any, rope: Rope | None) -> None:
        self._layer = layer
        self._mixer: Mixer[Any, Any] | None = None
        if layer.block_type == "mamba":
            self._mixer = Mamba2(layer.mixer)
        elif layer.block_type == "attention":
            self._mixer = Attention(layer.mixer, NoRope())

    def start(self) -> Any:
        return self._mixer.start() if self._mixer is not None else Nothing()

    def run(self, x: Tensor, state: Any) -> tuple[Tensor, Any, Any]:
        y = self._layer.norm(x)
        if self._mixer is None:
            return x + self._layer.mixer(y[None])[0], state, Nothing()
        y, state, record = self._mixer.run(y, state)
        return x + y, state, record

    def replay(self, state: Any, record: Any) -> Any:
        return self._mixer.replay(state, record) if self._mixer is not None else state


class Both(NamedTuple):
    """State or record of attention and Mamba-2 side by side."""

    attention: Any
    mamba: Any


class FalconH1:
    """Attention and Mamba-2 on the same norm, both added; multipliers everywhere."""

    def __init__(self, layer: Any, rope: Rope) -> None:
        self._layer = layer
        self._attention, self._mamba = Attention(layer.self_attn, rope), Mamba2(layer.mamba)

    def start(self) -> Both:
        return Both(self._attention.start(), self._mamba.start())

    def run(self, x: Tensor, state: Both) -> tuple[Tensor, Both, Both]:
        layer = self._layer
        y = layer.input_layernorm(x)
        kv: KV
        ssm: SsmState
        tokens: SsmTokens
        a, kv, rows = self._attention.run(y * layer.attention_in_multiplier, state.attention)
        m, ssm, tokens = self._mamba.run(y, state.mamba)
        x = x + a * layer.attn_out_multiplier + m * layer.ssm_out_multiplier
        x = x + layer.feed_forward(layer.pre_ff_layernorm(x)[None])[0]
        return x, Both(kv, ssm), Both(rows, tokens)

    def replay(self, state: Both, record: Both) -> Both:
        return Both(
            self._attention.replay(state.attention, record.attention), self._mamba.replay(state.mamba, record.mamba)
        )


def block_of(layer: Any, rope: Rope | None) -> Mixer[Any, Any]:
    """The block of one Hugging Face decoder layer. Raises NotImplementedError for a kind the oracle does not know."""
    if type(layer).__name__ == "NemotronHBlock":
        return NemotronH(layer, rope)
    if type(layer).__name__ == "KimiDecoderLayer":
        return KimiLinear(layer)
    if rope is None:
        raise NotImplementedError(f"{type(layer).__name__} in a model without a rotary embedding")
    if type(layer).__name__ == "MiniMaxDecoderLayer":
        return MiniMax(layer, rope)
    if type(layer).__name__ == "FalconH1DecoderLayer":
        return FalconH1(layer, rope)
    ring = type(layer).__name__ == "BailingLinearLayer"
    return PreNorm(layer, oracle_lightning.mixer_of(layer, rope) if ring else mixer_of(layer, rope))
