"""The start-up proof that composing by (T, S) equals running the tokens: it holds, and each wrong part turns it red."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hypic.artifact.layout import LinearShape
from hypic.engine.composition import ComposeError, check_composition
from hypic.engine.families import base, gdn, kda, lightning, mamba2
from hypic.engine.relocation import CannotRelocate
from hypic.kernels._common import blob_view
from hypic.kernels.lightning_chain import KeyRotation

SHAPE = LinearShape((3, 5), 4, 16, 24, 2 * 2 * 16 + 4 * 24, 3, "bfloat16", "bfloat16")


class RadixLinearAttention(torch.nn.Module):
    """What the proof reads of SGLang's module, with gates under which T stays of order 1."""

    activation, bias = "silu", None
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = 2, 4, 16, 24

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(layer_id)
        self.layer_id = layer_id
        self.conv_weights = torch.randn(SHAPE.conv_channels, SHAPE.conv_width + 1, generator=rng)
        self.A_log = torch.randn(SHAPE.heads, generator=rng) - 6.0
        self.dt_bias = torch.randn(SHAPE.heads, generator=rng)


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.ModuleList([RadixLinearAttention(i) for i in SHAPE.layer_ids])


def test_it_holds(model: torch.nn.Module) -> None:
    assert 0 < check_composition(model, SHAPE) < 1e-5


@pytest.mark.parametrize("part", ["T", "S", "side"])
def test_a_wrong_part_is_found(part: str, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """T that is the identity, S that keeps the seam, and T on the wrong side."""
    transition, end_states = gdn.gdn_transition, gdn.gdn_end_states

    def wrong_transition(k: Any, g: Any, beta: Any, *, arena: Any, t_off: int, **rest: Any) -> None:
        transition(k, g, beta, arena=arena, t_off=t_off, **rest)
        t = blob_view(arena, t_off, (4, 16, 16), torch.float32)
        t.copy_(torch.eye(16) if part == "T" else t.mT.clone())

    def wrong_end_states(ssm_pool: Any, seam_states: Any, **rest: Any) -> None:
        end_states(ssm_pool, torch.zeros_like(seam_states), **rest)

    if part == "S":
        monkeypatch.setattr(gdn, "gdn_end_states", wrong_end_states)
    else:
        monkeypatch.setattr(gdn, "gdn_transition", wrong_transition)
    with pytest.raises(ComposeError, match="off by"):
        check_composition(model, SHAPE)


def test_a_missing_layer_is_named(model: torch.nn.Module) -> None:
    with pytest.raises(ComposeError, match=r"layers \[5\]"):
        check_composition(model[:1], SHAPE)


KDA = kda.FAMILY.shape((3, 5), [(3, 3 * 2 * 16)], (2, 16, 16), "bfloat16", "bfloat16")


class KimiDelta(torch.nn.Module):
    """What the proof reads of SGLang's RadixLinearAttention in Kimi-Linear."""

    activation, bias, lower_bound = "silu", None, None
    num_k_heads, num_v_heads, head_k_dim, head_v_dim = 2, 2, 16, 16

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(layer_id)
        self.layer_id = layer_id
        self.conv_weights = torch.randn(KDA.conv_channels, KDA.conv_width + 1, generator=rng)
        self.A_log = torch.randn(1, 1, 2, 1, generator=rng) - 6.0
        self.dt_bias = torch.randn(2 * 16, generator=rng)


KimiDelta.__name__ = "RadixLinearAttention"


@pytest.fixture
def kimi_model() -> torch.nn.Module:
    return torch.nn.ModuleList([KimiDelta(i) for i in KDA.layer_ids])


def test_it_holds_for_kda(kimi_model: torch.nn.Module) -> None:
    assert KDA.window == (3, 96)
    assert 0 < check_composition(kimi_model, KDA) < 1e-5


def test_a_wrong_gate_of_kda_is_found(kimi_model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """T under one gate for all channels of a head is not T."""
    transition = gdn.gdn_transition

    def one_gate(k: Any, g: Any, beta: Any, **rest: Any) -> None:
        transition(k, g.mean(-1, keepdim=True).expand_as(g).contiguous(), beta, **rest)

    monkeypatch.setattr(gdn, "gdn_transition", one_gate)
    with pytest.raises(ComposeError, match="off by"):
        check_composition(kimi_model, KDA)


def test_bounded_gates_of_kda_are_refused(kimi_model: torch.nn.Module) -> None:
    kimi_model[1].lower_bound = -5.0  # type: ignore[index,assignment]
    with pytest.raises(ComposeError, match="lower bound"):
        check_composition(kimi_model, KDA)


MAMBA2 = LinearShape((3, 5), 4, 16, 24, 4 * 24 + 2 * 2 * 16, 3, "bfloat16", "bfloat16", "mamba2", "log_decay")


class MambaMixer2(torch.nn.Module):
    """What the proof reads of SGLang's mixer, with decays of order 1 over the segment."""

    activation, num_heads, n_groups, tp_size, head_dim, ssm_state_size = "silu", 4, 2, 1, 24, 16

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        channels = MAMBA2.conv_channels
        self.conv1d = torch.nn.Conv1d(channels, channels, 4, groups=channels)
        self.A = -(torch.randn(4, generator=rng) - 6.0).exp()
        self.D, self.dt_bias = torch.randn(4, generator=rng), torch.randn(4, generator=rng)


class DecoderLayer(torch.nn.Module):
    def __init__(self, layer_id: int, name: str) -> None:
        super().__init__()
        setattr(self, name, layer_id)
        self.mixer = MambaMixer2(layer_id)


@pytest.fixture
def mamba_model() -> torch.nn.Module:
    return torch.nn.ModuleList([DecoderLayer(3, "layer_id"), DecoderLayer(5, "layer_idx")])


def test_it_holds_for_mamba2(mamba_model: torch.nn.Module) -> None:
    assert 0 < check_composition(mamba_model, MAMBA2) < 1e-5


@pytest.mark.parametrize("part", ["T", "S"])
def test_a_wrong_part_of_mamba2_is_found(
    part: str, mamba_model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decay that is not stored, and S that keeps the seam."""
    end_states = base.decay_end_states

    def wrong_end_states(ssm_pool: Any, seam_states: Any, **rest: Any) -> None:
        end_states(ssm_pool, torch.zeros_like(seam_states), **rest)

    if part == "S":
        monkeypatch.setattr(base, "decay_end_states", wrong_end_states)
    else:
        monkeypatch.setattr(mamba2, "mamba2_log_decay", lambda *args, **kwargs: None)
    with pytest.raises(ComposeError, match="off by"):
        check_composition(mamba_model, MAMBA2)


LIGHTNING = LinearShape((0, 2), 4, 16, 16, 0, 0, "float32", "bfloat16", "lightning", "log_decay")
POSITIONS = 32768


class RotaryEmbedding(torch.nn.Module):
    rotary_dim, is_neox_style = 8, True

    def __init__(self, bend: float = 0.0) -> None:
        super().__init__()
        angles = torch.arange(POSITIONS)[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
        angles = angles + bend * angles**2 / POSITIONS
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)


class DynamicNTKScalingRotaryEmbedding(RotaryEmbedding):
    pass


class BailingMoELinearAttention(torch.nn.Module):
    """What the proof reads of SGLang's module."""

    linear_backend, linear_rope, scaling, total_num_heads, head_dim = "seg_la", True, 0.25, 4, 16

    def __init__(self, layer_id: int, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.layer_id, self.rotary_emb, self.query_key_value = layer_id, rotary, torch.nn.Linear(1, 1)


def ring(rotary: torch.nn.Module | None = None, **changes: Any) -> torch.nn.Module:
    model = torch.nn.ModuleList([BailingMoELinearAttention(i, rotary or RotaryEmbedding()) for i in (0, 2)])
    model.config = SimpleNamespace(num_hidden_layers=4)
    for module, (name, value) in itertools.product(model, changes.items()):
        setattr(module, name, value)
    return model


@pytest.fixture
def slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's slopes, which ask for its parallel state."""
    from sglang.srt.layers.attention.linear import lightning_backend

    state = SimpleNamespace(attn_tp_size=1, attn_tp_rank=0)
    monkeypatch.setattr(lightning_backend, "get_parallel", lambda: state)


@pytest.mark.usefixtures("slopes")
def test_it_holds_for_lightning_near_and_far() -> None:
    """At position 32,000 what the table rounds is there, and within its bound."""
    assert 1e-5 < check_composition(ring(), LIGHTNING) < 2e-3
    assert 0 < check_composition(ring(linear_rope=False), LIGHTNING) < 1e-5


@pytest.mark.usefixtures("slopes")
@pytest.mark.parametrize("part", ["T", "S", "unturned", "bent"])
def test_a_wrong_part_of_lightning_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay of twice the slope, S that keeps the seam, S that is not turned, and angles that are not linear."""
    end_states, log_decay = base.decay_end_states, lightning.lightning_log_decay
    model = ring(RotaryEmbedding(bend=0.1 if part == "bent" else 0.0))
    if part == "T":
        monkeypatch.setattr(
            lightning, "lightning_log_decay", lambda p, **k: log_decay(p._replace(slope=2 * p.slope), **k)
        )
    elif part == "S":
        monkeypatch.setattr(
            base, "decay_end_states", lambda pool, seams, **k: end_states(pool, torch.zeros_like(seams), **k)
        )
    elif part == "unturned":
        monkeypatch.setattr(KeyRotation, "turn", lambda self, s, shift: s)
    with pytest.raises(ComposeError, match="off by"):
        check_composition(model, LIGHTNING)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"linear_backend": "minimax"}, "minimax"),
        ({"rotary_emb": DynamicNTKScalingRotaryEmbedding()}, "depend on the sequence length"),
        ({"rotary_emb": torch.nn.Linear(1, 1)}, "keeps no table"),
    ],
    ids=["backend", "dynamic", "no table"],
)
def test_lightning_that_cannot_be_turned_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(CannotRelocate, match=says):
        lightning.FAMILY.check_model(ring(**change), 1000)
    with pytest.raises(CannotRelocate, match="32768 positions, the context needs 40000"):
        lightning.FAMILY.check_model(ring(), 40000)
    lightning.FAMILY.check_model(ring(), POSITIONS)
