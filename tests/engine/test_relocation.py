"""Models without a rotary embedding: K is copied, but only where it is proven not to depend on positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hypic.engine.relocation import CannotRelocate, find_rotary


class RadixAttention(nn.Module):
    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id = layer_id


class Attention(nn.Module):
    """The parts of an attention module that are there in every model: a projection, and what attends."""

    hidden_size = 16

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.qkv_proj, self.attn = nn.Linear(16, 3 * 8), RadixAttention(layer_id)

    def forward(self, hidden_states: Tensor, forward_batch: Any) -> Any:
        return self.attn(*self.qkv_proj(hidden_states).split(8, -1), forward_batch)


class TakesPositions(Attention):
    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Any:  # type: ignore[override]
        return self.attn(*self.qkv_proj(hidden_states).split(8, -1), forward_batch)


class ScalesKeys(Attention):
    """A rotation by hand, say: K depends on the position."""

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Any:  # type: ignore[override]
        q, k, v = self.qkv_proj(hidden_states).split(8, -1)
        return self.attn(q, k * (1 + 1e-3 * positions[:, None]), v, forward_batch)


class ScalesValues(Attention):
    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Any:  # type: ignore[override]
        q, k, v = self.qkv_proj(hidden_states).split(8, -1)
        return self.attn(q, k, v * (1 + 1e-3 * positions[:, None]), forward_batch)


class WantsMore(Attention):
    def forward(self, hidden_states: Tensor, angles: Tensor, forward_batch: Any) -> Any:  # type: ignore[override]
        return self.attn(*self.qkv_proj(hidden_states).split(8, -1), forward_batch)


class SaysNoWidth(Attention):
    hidden_size = None  # type: ignore[assignment]


class AttendsElsewhere(Attention):
    def forward(self, hidden_states: Tensor, forward_batch: Any) -> Any:
        return hidden_states


def model(*attention: Callable[[int], nn.Module], **others: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(make(i) for i, make in enumerate(attention)), **others})


@pytest.mark.parametrize("kind", [Attention, TakesPositions])
def test_no_positions_no_rotation(kind: type[Attention]) -> None:
    built = model(kind, kind)
    attends = [layer.attn for layer in built["layers"]]  # type: ignore[index,union-attr]
    assert find_rotary(built, (0, 1), 4096) is None
    assert [layer.attn for layer in built["layers"]] == attends, "left as they were"  # type: ignore[index,union-attr]


class YarnRotaryEmbedding(nn.Module):
    pass


@pytest.mark.parametrize(
    ("parts", "others", "says"),
    [
        ((Attention, ScalesKeys), {}, "layer 1: K or V depends on positions"),
        ((ScalesValues, Attention), {}, "layer 0: K or V depends on positions"),
        ((Attention, WantsMore), {}, r"WantsMore .* takes \['angles'\]"),
        ((AttendsElsewhere, Attention), {}, "does not pass its K"),
        ((SaysNoWidth, Attention), {}, "says no hidden_size"),
        ((Attention, Attention), {"wpe": nn.Embedding(9, 16)}, "wpe .* knows positions"),
        ((Attention, Attention), {"embed_positions": nn.Embedding(9, 16)}, "embed_positions .* knows positions"),
        ((Attention, Attention), {"shared": YarnRotaryEmbedding()}, "YarnRotaryEmbedding.* knows positions"),
        ((Attention, lambda i: nn.Linear(2, 2)), {}, r"layers \[1\]"),
    ],
)
def test_positions_that_reach_keys_are_refused(parts: tuple[Any, ...], others: dict[str, nn.Module], says: str) -> None:
    with pytest.raises(CannotRelocate, match=says):
        find_rotary(model(*parts, **others), (0, 1), 4096)


def test_layers_with_and_without_rotation_are_refused() -> None:
    built = model(Attention, Attention)
    built["layers"][0].rotary_emb = YarnRotaryEmbedding()  # type: ignore[index,union-attr]
    with pytest.raises(CannotRelocate, match=r"no rotary embedding found on full-attention layers \[1\]"):
        find_rotary(built, (0, 1), 4096)


class Turning(nn.Module):
    """Rotary embedding over half of K, in half-split pairs."""

    rotary_dim, is_neox_style = 4, True

    def __init__(self) -> None:
        super().__init__()
        phase = torch.arange(4096).float()[:, None] * 100.0 ** (-torch.arange(2) / 2)
        self.cos_sin_cache = torch.cat([phase.cos(), phase.sin()], -1)

    def forward(self, positions: Tensor, k: Tensor) -> Tensor:
        (cos, sin), (a, b, rest) = self.cos_sin_cache[positions].chunk(2, -1), k.split([2, 2, 4], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Rotates(Attention):
    def __init__(self, layer_id: int) -> None:
        super().__init__(layer_id)
        self.rotary_emb, self.attn.head_dim = Turning(), 8

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Any:  # type: ignore[override]
        q, k, v = self.qkv_proj(hidden_states).split(8, -1)
        return self.attn(q, self.place(k, positions), v, forward_batch)

    def place(self, k: Tensor, positions: Tensor) -> Tensor:
        return self.rotary_emb(positions, k)


class OwnsButDoesNotRotate(Rotates):
    """As layers without positions among others that have them."""

    def place(self, k: Tensor, positions: Tensor) -> Tensor:
        return k


class TakesMore(OwnsButDoesNotRotate):
    """As Ring's attention, which takes what decoders pass to others."""

    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any, **kwargs: Any) -> Any:
        return super().forward(positions, hidden_states, forward_batch)


class TurnsTwice(Rotates):
    def place(self, k: Tensor, positions: Tensor) -> Tensor:
        return super().place(k, 2 * positions)


class WantsABatch(OwnsButDoesNotRotate):
    def forward(self, positions: Tensor, hidden_states: Tensor, forward_batch: Any) -> Any:
        return forward_batch.no_such_thing


def test_layers_that_turn_by_their_table_are_asked_and_left_as_they_were() -> None:
    built = model(Rotates, Rotates)
    attends = [layer.attn for layer in built["layers"]]  # type: ignore[index,union-attr]
    rotary = find_rotary(built, (0, 1), 4096)
    assert rotary is not None and (rotary.dim, rotary.is_neox) == (4, True)
    assert [layer.attn for layer in built["layers"]] == attends  # type: ignore[index,union-attr]
    assert find_rotary(model(Rotates).to(torch.bfloat16), (0,), 4096) is not None


@pytest.mark.parametrize("kind", [OwnsButDoesNotRotate, TakesMore, TurnsTwice])
def test_a_layer_that_does_not_use_its_table_is_refused(kind: type[Attention]) -> None:
    with pytest.raises(CannotRelocate, match="layer 1 does not use its rotary embedding as others do: K"):
        find_rotary(model(Rotates, kind), (0, 1), 4096)


def test_a_layer_that_cannot_be_asked_is_taken_at_its_word() -> None:
    assert find_rotary(model(Rotates, WantsABatch), (0, 1), 4096) is not None


def test_16_bit_weights_are_asked_in_their_type() -> None:
    assert find_rotary(model(Attention).to(torch.bfloat16), (0,), 4096) is None
