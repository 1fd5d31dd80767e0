"""Ring-linear and MiniMax through SGLang's seams for external models: found, with configs and what the scheduler asks."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hypic.config import STOCK
from hypic.engine import hook, model_classes, plugin
from hypic.engine.model_classes.config import ARCHITECTURE, BailingMoeLinearConfig, register


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


@pytest.mark.parametrize(("environ", "offered"), [(STOCK, True), (STOCK | {"HYPIC_MODELS": "0"}, False)])
def test_a_stock_engine_of_ours_has_the_models_and_no_hook(
    environ: dict[str, str], offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; in CPU mode the platform offers them, whatever is asked for."""
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    monkeypatch.setattr(plugin, "table", lambda: pytest.fail("hypic is off"))
    registered: list[str] = []
    monkeypatch.setattr(hook.HookTable, "register", lambda table: registered.extend(h.target for h in table.hooks))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    plugin.activate()
    assert ("SGLANG_EXTERNAL_MODEL_PACKAGE" in os.environ) is offered
    assert registered == [h.target for h in plugin.MODEL_HOOKS if offered]


def test_a_package_that_the_user_names_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "theirs")
    monkeypatch.setattr("hypic.engine.model_classes.config.register", lambda: pytest.fail("registered"))
    model_classes.offer()
    assert os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "theirs"


def test_ring_2_5_is_a_hybrid_whose_first_layer_need_not_have_keys() -> None:
    """What sglang.srt.layers.attention.triton_backend goes by: without it, it reads V of layer 0 and dies."""
    from sglang.srt.configs import model_config
    from sglang.srt.configs.bailing_hybrid import BailingHybridConfig
    from sglang.srt.configs.hybrid_arch import linear_attn_model_spec
    from sglang.srt.configs.linear_attn_model_registry import get_linear_attn_config

    register()
    for config, architecture in {
        BailingHybridConfig: "BailingMoeV2_5ForCausalLM", BailingMoeLinearConfig: ARCHITECTURE,
    }.items():  # fmt: skip
        found = get_linear_attn_config(config(num_hidden_layers=4, layer_group_size=2))
        assert found is not None and found[0].arch_names == [architecture]
        assert linear_attn_model_spec(SimpleNamespace(linear_attn_registry_result=found)) is found[0]
    assert model_config.piecewise_cuda_graph_disabled_model_archs.count("BailingMoeV2_5ForCausalLM") == 1


def test_published_configs_of_minimax_are_read() -> None:
    """By the names of MiniMax's own code, which knows two kinds of residuals and experts that all tokens share."""
    from transformers import AutoConfig

    register()
    fields = {"head_dim": 128, "rotary_dim": 64, "rope_theta": 10000000, "postnorm": True, "num_hidden_layers": 8}
    fields |= {"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1], "layernorm_linear_attention_alpha": 3.5565588200778455}
    fields |= {"layernorm_linear_attention_beta": 1.0, "layernorm_mlp_alpha": 3.5, "num_attention_heads": 64}
    for kind in ("minimax_m1", "minimax_text_01"):
        found = AutoConfig.for_model(kind, **fields)
        assert (found.full_attention_layer_ids, found.linear_layer_ids) == ([7], list(range(7)))
        assert (found.linear_attn_alpha_factor, found.linear_attn_beta_factor) == (3.5565588200778455, 1.0)
        assert (found.mlp_alpha_factor, found.full_attn_alpha_factor) == (3.5, 1)
        assert (found.rope_parameters["rope_theta"], found.partial_rotary_factor) == (10000000, 0.5)
        again = type(found).from_dict(found.to_dict())
        assert again.to_dict() == found.to_dict() and again.partial_rotary_factor == 0.5
        AutoConfig.for_model(kind, **fields | {"shared_intermediate_size": [0]})
        fields_without = {name: value for name, value in fields.items() if name != "postnorm"}
        for other in (fields_without, fields | {"postnorm": False}, fields | {"shared_intermediate_size": [64]}):
            with pytest.raises(ValueError, match="without postnorm"):
                AutoConfig.for_model(kind, **other)


@pytest.mark.parametrize(("backend", "can"), [("triton", True), ("other", False)])
def test_states_may_be_kept_beside_an_overlapping_schedule(backend: str, can: bool) -> None:
    register()
    view = SimpleNamespace(linear_attn_backend=backend)
    assert model_classes.supports_extra_buffer(lambda *_: False, view, ARCHITECTURE) is can
    assert model_classes.supports_extra_buffer(lambda *_: can, view, "Other") is can
