"""Dummy weights whose linear layers remember. That engines have them, stock and hypic: test_bench.py, for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hypic.bench.dummy import DUMMY_HORIZON, HORIZON, environment, log_decays, require_decays, set_decays, told
from hypic.cli import app
from hypic.kernels.gdn_inputs import GdnLayer, gates_torch
from hypic.kernels.gdn_transition import TransitionPlan, gdn_transition

HEADS, D_K = 4, 8


def parameters(channel_gates: bool) -> tuple[Tensor, Tensor]:
    """As SGLang's dummy loader draws them."""
    rng = torch.Generator().manual_seed(1)
    sizes = (HEADS,), (HEADS, D_K) if channel_gates else (HEADS,)
    A_log, dt_bias = (torch.empty(size).uniform_(-1e-3, 1e-3, generator=rng) for size in sizes)
    return A_log, dt_bias


def transition(A_log: Tensor, dt_bias: Tensor, tokens: int) -> Tensor:
    """T [HEADS, D_K, D_K] of so many tokens that write next to nothing; projections are as small as dummy weights make them."""
    layer = GdnLayer(torch.empty(0), None, None, A_log, dt_bias, HEADS, HEADS, D_K, D_K)
    a, k = (
        0.03 * torch.randn(tokens, dt_bias.numel()),
        torch.nn.functional.normalize(torch.randn(tokens, HEADS, D_K), dim=-1),
    )
    b = torch.full((tokens, HEADS), 0.0 if layer.channel_gates else -50.0)  # beta itself where channels have gates
    g, beta = gates_torch(layer, a, b)
    plan = TransitionPlan.build(
        seq_tok=[0],
        seq_len=[tokens],
        seq_skip=[0],
        seq_slot=[0],
        seq_fresh=[True],
        blob=[0],
        first=[True],
        device="cpu",
    )
    arena = torch.zeros(HEADS * D_K * D_K * 4, dtype=torch.uint8)
    gdn_transition(k, g.contiguous(), beta, arena=arena, t_off=0, plan=plan)
    return arena.view(torch.float32).view(HEADS, D_K, D_K)


@pytest.mark.parametrize("channel_gates", [False, True])
def test_all_heads_remember_what_all_forgot(channel_gates: bool) -> None:
    torch.manual_seed(0)
    drawn = parameters(channel_gates)
    assert (transition(*drawn, 64) == 0).all(), "SGLang's dummies forget within a chunk: T costs nothing"
    set_decays(*drawn, HORIZON)
    kept = transition(*drawn, HORIZON).diagonal(dim1=1, dim2=2).log()
    assert (kept[0] > -0.02).all() and (kept[-1] < -8).all(), "from slow to fast"
    assert (kept > -15).all(), "and none is near forgetting"
    assert kept.mean(1) == pytest.approx(HORIZON * log_decays(*drawn).reshape(HEADS, -1).mean(1), rel=0.05)


def test_the_worst_case_is_the_default_and_real_weights_are_left_alone() -> None:
    dummy = ["--model-path", "m", "--load-format", "dummy"]
    assert environment(dummy, None, {}) == {DUMMY_HORIZON: "16384"}
    assert environment(["--load-format=dummy"], 0, {DUMMY_HORIZON: "7"}) == {DUMMY_HORIZON: "0"}
    assert environment(dummy, None, {DUMMY_HORIZON: "7"}) == {DUMMY_HORIZON: "7"}
    assert environment(["--model-path", "m"], None, {DUMMY_HORIZON: "7"}) == {}
    with pytest.raises(ValueError, match="write a number of tokens"):
        environment(dummy, None, {DUMMY_HORIZON: "long"})


def test_a_horizon_for_loaded_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = CliRunner().invoke(app, ["bench", str(tmp_path), "--device", "cpu", "--dummy-horizon", "512"])
    assert done.exit_code == 2 and "only with --load-format dummy" in " ".join(done.output.split())


def test_an_engine_that_does_not_confirm_its_decays_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMMY_HORIZON, "100")
    good = {"horizon": 100, "layers": 3, "least": -0.01, "most": -10.0}
    assert require_decays({"dummy_decays": good}) == good and "3 linear layers remember" in told(good)
    assert "no layer of this model" in told(require_decays({"dummy_decays": {"horizon": 100, "layers": 0}}))
    for info in ({}, {"dummy_decays": good | {"horizon": 5}}, {"dummy_decays": good | {"most": -69.0}}):
        with pytest.raises(RuntimeError):
            require_decays(info)
