"""Ring-linear through SGLang's seams for external models: found, with its config, and with what the scheduler asks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hypic.engine import model_classes
from hypic.engine.model_classes.config import ARCHITECTURE, BailingMoeLinearConfig


def test_it_is_offered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.configs import linear_attn_model_registry, model_config
    from transformers import AutoConfig

    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    for _ in range(2):
        model_classes.offer()
    assert os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "hypic.engine.model_classes"
    found = AutoConfig.for_model("bailing_moe_linear", head_dim=64, num_hidden_layers=4, layer_group_size=2)
    assert type(found) is BailingMoeLinearConfig
    assert (found.full_attention_type, found.v_head_dim, found.full_attention_layer_ids) == ("gqa", 64, [1, 3])
    specs = [s for s in linear_attn_model_registry._LINEAR_ATTN_MODEL_REGISTRY if ARCHITECTURE in s.arch_names]
    assert len(specs) == 1 and specs[0].uses_mamba_radix_cache
    assert model_config.piecewise_cuda_graph_disabled_model_archs.count(ARCHITECTURE) == 1


def test_a_package_that_the_user_names_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "theirs")
    monkeypatch.setattr("hypic.engine.model_classes.config.register", lambda: pytest.fail("registered"))
    model_classes.offer()
    assert os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "theirs"


@pytest.mark.parametrize(("backend", "can"), [("triton", True), ("other", False)])
def test_states_may_be_kept_beside_an_overlapping_schedule(backend: str, can: bool) -> None:
    from hypic.engine.model_classes.config import register

    register()
    view = SimpleNamespace(linear_attn_backend=backend)
    assert model_classes.supports_extra_buffer(lambda *_: False, view, ARCHITECTURE) is can
    assert model_classes.supports_extra_buffer(lambda *_: can, view, "Other") is can
