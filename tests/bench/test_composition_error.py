"""The error that joining leaves in a layer's state, as `hypic bench --suites kernels` reports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hypic.algebra.naive import gated_delta_net
from hypic.artifact.layout import ArtifactLayout, LinearShape
from hypic.bench.composition_error import Trial, composition_errors
from hypic.bench.kernels import Bench
from hypic.bench.result import Timing
from hypic.bench.suites import Plan
from hypic.bench.workload import Workload
from hypic.engine.families.gdn import GdnLayer
from hypic.kernels.gdn_inputs import gates_torch

LENGTH, SEGMENTS = 150, 3
STOCK = "stock: all tokens in one run of its kernel"


@pytest.fixture(scope="module", autouse=True)
def plugins() -> Iterator[None]:
    """The CPU's stand-ins for SGLang's kernels."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with torch.no_grad():
        yield


def bench(dtype: torch.dtype, solved: bool = False) -> tuple[Bench, LinearShape]:
    name = str(dtype).removeprefix("torch.")
    linear = LinearShape(
        (0, 1), heads=4, d_k=24, d_v=16, conv_channels=2 * 2 * 24 + 4 * 16, conv_width=3, conv_dtype=name
    )
    plan = Plan(("kernels",), Workload(segments=SEGMENTS, segment_tokens=LENGTH), 8)
    return Bench(ArtifactLayout(linear, None), 1, dtype, plan, "cpu", solved=solved), linear


def errors(dtype: torch.dtype, solved: bool = False) -> dict[str, Timing]:
    return {t.case: t for t in composition_errors(*bench(dtype, solved))}


def test_the_truth_is_the_token_recurrence() -> None:
    trial = Trial(*bench(torch.float32))
    q, k, v = trial._qkv(0, SEGMENTS * LENGTH, torch.float64)
    k = torch.nn.functional.normalize(k, dim=-1, eps=0)
    g, beta = gates_torch(GdnGates(trial.parameters), *trial.inputs[1:])  # type: ignore[arg-type]
    q, k = (t.repeat_interleave(2, 1) for t in (q, k))
    zero = torch.zeros(4, 16, 24, dtype=torch.float64)
    _, expected = gated_delta_net(q, k, v, g.double(), beta.double(), zero)
    truth = trial.truth()
    assert (truth - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (truth.flatten(1).norm(dim=1) > 0.1).all(), "a state that is worth joining"


class GdnGates:
    """What gates_torch reads of a layer."""

    channel_gates = False

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.A_log, self.dt_bias = parameters["A_log"], parameters["dt_bias"]


INT8 = "joined: T in int8, S in bfloat16"


def test_in_float32_joining_is_exact_and_fewer_bits_round_what_is_stored() -> None:
    found = errors(torch.float32)
    assert list(found) == [STOCK, INT8, "joined: T and S in bfloat16", "joined: T and S in float32"]
    assert all(t.unit == "of |h|" and len(t.values) == 4 for t in found.values())
    assert found[STOCK].shape == {"segments": SEGMENTS, "segment_tokens": LENGTH, "heads": 4}
    assert max(found[STOCK].values) < 2e-6 and max(found["joined: T and S in float32"].values) < 2e-6
    for rounded in (found["joined: T and S in bfloat16"].values, found[INT8].values):
        assert all(2**-12 < e < 3 * 2**-8 for e in rounded)
    assert found[INT8].values != found["joined: T and S in bfloat16"].values


def test_a_16_bit_model_errs_by_itself() -> None:
    found = errors(torch.bfloat16)
    assert all(1e-4 < e < 1e-2 for e in found[STOCK].values)
    assert max(found["joined: T and S in float32"].values) < 1.5 * max(found[STOCK].values)


def test_a_wrong_operator_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GdnLayer, "transition", lambda *_: None)  # T stays zero
    assert max(errors(torch.float32)["joined: T and S in float32"].values) > 0.05


def test_operators_out_of_sglangs_pass_are_joined_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found = errors(torch.float32, solved=True)
    assert len(found) == 7 and "joined: T and S in bfloat16, T of kernels of our own" in found
    assert max(found["joined: T and S in float32"].values) < 2e-6
    monkeypatch.setattr(GdnLayer, "transition", lambda *_: None)
    assert (
        errors(torch.float32, solved=True)["joined: T and S in float32"].values
        == found["joined: T and S in float32"].values
    )
