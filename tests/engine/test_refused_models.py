"""Models that hypic cannot serve, by their config alone: refused in the launching process, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hypic.commands.serve import read_server_args
from hypic.engine.support import SLIDING_WINDOWS, Unsupported


class Early(NamedTuple):
    """A model whose config alone tells that the server will not start: its config, the reason, flags."""

    kind: str
    architecture: str
    reason: str
    flags: tuple[str, ...] = ("--attention-backend", "triton")


EARLY = [
    Early("Gemma3Config", "Gemma3ForConditionalGeneration", SLIDING_WINDOWS),
    Early("Gemma3TextConfig", "Gemma3ForCausalLM", SLIDING_WINDOWS),
    Early("GptOssConfig", "GptOssForCausalLM", SLIDING_WINDOWS),
    Early("Llama4Config", "Llama4ForConditionalGeneration", SLIDING_WINDOWS),
    Early("Cohere2Config", "Cohere2ForCausalLM", SLIDING_WINDOWS),
    Early("Lfm2Config", "Lfm2ForCausalLM", "linear attention of Mamba2AttnBackend of another mixer", ()),
]


def config_only(folder: Path, kind: str, architecture: str, **fields: Any) -> Path:
    """The folder of a model that has a config and no weights."""
    import transformers

    getattr(transformers, kind)(architectures=[architecture], **fields).save_pretrained(folder)
    return folder


@pytest.fixture
def with_plugin(tiny_model: Callable[[str], Path]) -> None:
    """hypic's hooks are in force in this process, as in one that launches a server."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.mark.parametrize("model", EARLY, ids=lambda model: model.architecture)
def test_a_model_is_refused_by_its_config_before_anything_is_loaded(
    model: Early, tmp_path: Path, with_plugin: None
) -> None:
    path = config_only(tmp_path, model.kind, model.architecture)
    with pytest.raises(Unsupported) as refused:
        read_server_args(["--model-path", str(path), *model.flags])
    said = str(refused.value)
    assert said.startswith(f"hypic cannot serve {path} ({model.architecture}): {model.reason}") and "\n" not in said
    assert said.endswith("; --hypic-off serves it without hypic")


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("Mistral", {"sliding_window": 4096}),
        ("Cohere2", {"sliding_window": 64, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_what_the_engine_may_serve_is_not_refused_early(
    kind: str, fields: dict[str, Any], tmp_path: Path, with_plugin: None
) -> None:
    """Windows that no layer has, and keys that cannot be moved: the start-up proof would serve those natively."""
    path = config_only(tmp_path, f"{kind}Config", f"{kind}ForCausalLM", **fields)
    assert read_server_args(["--model-path", str(path)]).model_path == str(path)


def test_an_architecture_of_the_users_own_package_is_read_there(
    tmp_path: Path, with_plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes precedence over SGLang's, and this one knows no windows."""
    package = tmp_path / "models_of_mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "commands.py").write_text("class Base: ...\n\n\nclass Cohere2ForCausalLM(Base): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "models_of_mine")
    path = config_only(tmp_path / "model", "Cohere2Config", "Cohere2ForCausalLM")
    assert read_server_args(["--model-path", str(path)]).model_path == str(path)


def test_what_sglang_refuses_it_refuses_itself(tmp_path: Path, with_plugin: None) -> None:
    path = config_only(tmp_path, "GptOssConfig", "GptOssForCausalLM")
    with pytest.raises(Exception, match=r"GptOss|torch_native|attention backend") as refused:
        read_server_args(["--model-path", str(path), "--attention-backend", "torch_native"])
    assert not isinstance(refused.value, Unsupported)


def test_a_method_is_refused_for_a_hybrid_by_its_config(
    tiny_model: Callable[[str], Path], with_plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYPIC_METHODS", "seam,legolink-0")
    read_server_args(["--model-path", str(tiny_model("llama"))])
    with pytest.raises(Unsupported, match="--hypic-methods legolink-0: for models whose layers are all full attention"):
        read_server_args(["--model-path", str(tiny_model("qwen35"))])


def test_a_server_ends_with_the_model_that_it_refuses_and_no_traceback(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """In the launching process: there are no weights, so nothing that loads them could say so."""
    config_only(tmp_path, "Gemma3TextConfig", "Gemma3ForCausalLM")
    for file in tiny_model("llama").glob("*token*"):
        (tmp_path / file.name).symlink_to(file)
    command = [sys.executable, "-m", "hypic", "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    said = (
        f"hypic serve: hypic cannot serve {tmp_path} (Gemma3ForCausalLM): {SLIDING_WINDOWS}; "
        "--hypic-off serves it without hypic"
    )
    assert said in done.stderr.splitlines(), done.stderr  # SGLang's imports in the fork server may warn behind it
    assert "Traceback" not in done.stderr
