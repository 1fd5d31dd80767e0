"""What `hypic states` measures, on models whose right answers are known in part."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hypic.check import tiny_models
from hypic.check.oracle import OracleError
from hypic.check.states import METHODS, state_errors
from hypic.cli import app

COMPOSING, LAST = METHODS


@pytest.mark.parametrize("name", ["qwen3next", "nemotronh", "falconh1", "ring25", "kimi"])
def test_composing_is_exact_at_the_first_layer_and_better_than_forgetting(name: str) -> None:
    found = state_errors(tiny_models.build(name), segments=3, length=60, prompts=2)
    composing, last = found.states[COMPOSING], found.states[LAST]
    assert len(composing) == len(last) == len(found.layers) and found.layers[0] == 0
    assert composing[0] < 1e-6, "its inputs are the tokens themselves"
    assert composing[-1] > 0.01, "interiors are compiled without their prefix"
    assert last[0] > 0.05 and sum(last) > sum(composing)
    assert 0 < found.kl[COMPOSING] < found.kl[LAST]


def test_segments_within_the_seam_window_leave_nothing() -> None:
    """All is recomputed: composing is full recompute, and forgetting is not."""
    found = state_errors(tiny_models.build("nemotronh"), segments=2, length=8, w=8, prompts=1)
    assert max(found.states[COMPOSING]) < 1e-5 and found.kl[COMPOSING] < 1e-5
    assert found.states[LAST][0] == 1.0, "an empty interior leaves the zero state"


def test_models_without_states_are_refused_and_the_command_prints_json() -> None:
    with pytest.raises(OracleError, match="no layer has a recurrent state"):
        state_errors(tiny_models.build("llama"))
    refused = CliRunner().invoke(app, ["states", str(tiny_models.build("llama"))])
    assert refused.exit_code == 2 and "no layer has a recurrent" in " ".join(refused.output.split())
    arguments = ["--segments", "1", "--length", "20", "--prompts", "1", "--json"]
    done = CliRunner().invoke(app, ["states", str(tiny_models.build("qwen3next")), *arguments])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["layers"] == [0, 2]
