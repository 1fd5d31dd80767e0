"""What hypic cannot serve: refused at start-up, or served natively, with the reason."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from hypic.check.engines import running_engine
from hypic.cli import app
from hypic.commands.serve import read_server_args
from hypic.config import HypicConfig
from hypic.engine import objections
from hypic.engine.http.inprocess import generate
from hypic.engine.support import (
    REFUSALS,
    REMEDY,
    SLIDING_WINDOWS,
    Refusal,
    Unsupported,
    check_methods,
    check_server_args,
)
from hypic.platform_cpu import fork_server

VALUES = {
    "--speculative-algorithm": ["EAGLE", "NGRAM", "STANDALONE"],
    "--decoupled-spec-role": ["verifier", "drafter"],
    "--dp-size": ["2"],
    "--pp-size": ["2"],
    "--disaggregation-mode": ["prefill", "decode"],
    "--kv-cache-dtype": ["fp8_e5m2", "fp8_e4m3", "fp4_e2m1"],
    "--radix-cache-backend": ["elsewhere"],
    "--tokenizer-worker-num": ["2"],
    "--kv-canary": ["log", "raise"],
    "--kv-events-config": ['{"publisher": "zmq"}'],
    "--dllm-algorithm": ["LowConfidence"],
    "--attn-cp-size": ["2"],
    "--dcp-size": ["2"],
}
"""What is refused of flags that take a value; the others are switches."""

HARMLESS = {
    "--decoupled-spec-role": ["null"],
    "--dp-size": ["1"],
    "--pp-size": ["1"],
    "--disaggregation-mode": ["null"],
    "--kv-cache-dtype": ["auto", "bf16", "bfloat16"],
    "--tokenizer-worker-num": ["1"],
    "--kv-canary": ["none"],
    "--attn-cp-size": ["1"],
    "--dcp-size": ["1"],
    "--enable-mixed-chunk": [],
    "--disable-radix-cache": [],
    "--disable-overlap-schedule": [],
    "--enable-lora": [],
}

Parse = Callable[..., Any]


@pytest.fixture(scope="module")
def with_flags(tiny_model: Callable[[str], Path]) -> Parse:
    """``with_flags("--dp-size", "2")``: the ServerArgs of a plain server, and in them what SGLang's parser makes of the flags.

    SGLang itself refuses some of them on a CPU, before hypic can.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    model = ["--model-path", str(tiny_model("qwen35"))]
    plain, accepted = parser.parse_args(model), ServerArgs(model_path=model[1])

    def parse(*flags: str) -> Any:
        found, args = parser.parse_args([*model, *flags]), copy.copy(accepted)
        for name, value in vars(found).items():
            if value != getattr(plain, name):
                assert name in vars(args)
                vars(args)[name] = value  # a resolved ServerArgs refuses assignments
        return args

    return parse


def test_without_a_tokenizer_no_image_processor_is_wanted(with_flags: Parse, tiny_model: Callable[[str], Path]) -> None:
    """Shapes under models/shapes are a config alone, and SGLang's flag can only switch its vision tower on."""
    argv = ["--model-path", str(tiny_model("qwen35"))]
    assert read_server_args([*argv, "--skip-tokenizer-init"]).enable_multimodal is False
    assert read_server_args(argv).enable_multimodal is not False, "and the next one is as ever"


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.flag)
def test_each_row_is_refused_with_its_reason(row: Refusal, with_flags: Parse) -> None:
    for values in [[v] for v in VALUES.get(row.flag, [])] or [[]]:
        with pytest.raises(Unsupported) as refused:
            check_server_args(with_flags(row.flag, *values), HypicConfig())
        assert str(refused.value).splitlines()[1:] == [f"  {row.flag}: {row.reason}"]


@pytest.mark.parametrize(("flag", "values"), HARMLESS.items())
def test_what_works_is_not_refused(flag: str, values: list[str], with_flags: Parse) -> None:
    for given in [[v] for v in values] or [[]]:
        check_server_args(with_flags(flag, *given), HypicConfig())


def test_all_refused_flags_are_named_at_once(with_flags: Parse) -> None:
    with pytest.raises(Unsupported) as refused:
        check_server_args(with_flags("--enable-hierarchical-cache", "--pp-size", "2"), HypicConfig())
    assert [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]] == [
        "--pp-size",
        "--enable-hierarchical-cache",
    ]


def test_an_engine_does_not_start_with_a_refused_flag(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(Unsupported, match="--kv-cache-dtype: relocating a quantised K is not proven"):
        running_engine(tiny_model("llama"), kv_cache_dtype="fp8_e5m2").__enter__()


def test_a_server_ends_with_what_it_refuses_and_no_traceback(
    tiny_model: Callable[[str], Path], with_flags: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in this process, which has imported SGLang; test_refused_models.py has one of its own."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(fork_server, "start", lambda: None)
    flags = ["--tokenizer-worker-num", "2", "--enable-streaming-session"]
    done = CliRunner().invoke(app, ["serve", str(tiny_model("llama")), *flags])
    assert done.exit_code == 2
    assert done.output.rstrip().endswith(
        "hypic serve: hypic does not work with these flags; drop them, or serve without hypic:\n"
        "  --tokenizer-worker-num: SGLang's tokenizer workers load no plugins\n"
        "  --enable-streaming-session: streaming sessions are not proven"
    )
    assert "Traceback" not in done.output


@pytest.mark.parametrize("methods", ["legolink-0", "seam,legolink-0"])
def test_legolink_0_is_refused_for_hybrids(methods: str) -> None:
    """And nothing else is."""
    config = HypicConfig(methods=methods)
    with pytest.raises(Unsupported, match="--hypic-methods legolink-0: for models whose layers are all full attention"):
        check_methods(config, hybrid=True)
    check_methods(config, hybrid=False)
    check_methods(HypicConfig(methods="seam,seam-16"), hybrid=True)


def why_it_died(model: Path, folder: Path, config: HypicConfig, **flags: Any) -> str:
    """What an engine that cannot start logs. Into a file: its standard error is that of the process it is forked from."""
    file = {"class": "logging.FileHandler", "filename": str(folder / "log")}
    logging = {"version": 1, "handlers": {"file": file}, "root": {"handlers": ["file"], "level": "ERROR"}}
    (folder / "logging.json").write_text(json.dumps(logging | {"disable_existing_loggers": False}))
    env = config.to_env() | {"SGLANG_LOGGING_CONFIG_PATH": str(folder / "logging.json")}
    before = list(map(id, tokenizer_managers()))
    with pytest.raises(RuntimeError, match="died during initialization"):
        running_engine(model, env=env, **flags).__enter__()
    # Open, they would wait for each other when they are collected, in whatever test that is.
    made = [m for m in tokenizer_managers() if id(m) not in before]
    assert all(m.recv_from_detokenizer.closed and m.send_to_scheduler.closed for m in made) and made
    return (folder / "log").read_text()


def tokenizer_managers() -> list[Any]:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    return [o for o in gc.get_objects() if type(o) is TokenizerManager]


def test_windows_that_only_the_layers_know_are_refused(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's Cohere2 tells its windows to the attention layers alone; the engine names model, reason and remedy.

    The scheduler has the last word: here the launching process finds nothing in the config.
    """
    import transformers

    monkeypatch.setattr(objections, "refusals", lambda *_: [])
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 32,
    }
    config = transformers.Cohere2Config(
        architectures=["Cohere2ForCausalLM"], vocab_size=1536, sliding_window=64, **sizes
    )
    config.save_pretrained(tmp_path)
    for file in tiny_model("llama").glob("*token*"):
        (tmp_path / file.name).symlink_to(file)
    said = why_it_died(tmp_path, tmp_path_factory.mktemp("log"), HypicConfig(enabled=True), load_format="dummy")
    assert f"hypic cannot serve {tmp_path} (Cohere2ForCausalLM): {SLIDING_WINDOWS}; {REMEDY}" in said


# ---------------------------------------------------------------------- requests

GREEDY = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
IDS = list(range(100, 400))


class Declined(NamedTuple):
    """A request with segments that are not served from artifacts: its fields, its segments, and why."""

    reason: str
    fields: dict[str, Any]
    segments: tuple[tuple[int, int], ...] = ((10, 110), (120, 220))
    spared: int = 0
    """So many of its segments are linked all the same."""


DECLINED = [
    Declined("input_logprobs", {"return_logprob": True, "logprob_start_len": 0}),
    Declined("input_logprobs", {"return_logprob": True, "logprob_start_len": 219}),
    Declined("hidden_states", {"return_hidden_states": True}),
    Declined("disaggregation", {"bootstrap_room": 3}),
    Declined("prompt_end", {}, ((10, 110), (200, 300)), spared=1),
    Declined("arena_full", {}, ((10, 50), (60, 280)), spared=1),
]


@pytest.fixture(scope="module")
def counting(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with metrics, an arena for a hundred tokens or two, and ``counting.counts("fallbacks_total")``."""
    folder = tmp_path_factory.mktemp("metrics")
    flags = {"enable_metrics": True, "disable_radix_cache": True, "enable_return_hidden_states": True}
    config = HypicConfig(enabled=True, min_segment=32, memory=ARENA)
    env = {
        **config.to_env(),
        "PROMETHEUS_MULTIPROC_DIR": str(folder),
    }  # read at import, which the fork server leaves to forks
    with running_engine(tiny_model("llama"), env=env, **flags) as engine:

        def counts(name: str, label: str = "reason") -> Counter[str]:
            from prometheus_client import CollectorRegistry, multiprocess

            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry, path=str(folder))
            found: Counter[str] = Counter()
            for sample in (s for m in registry.collect() for s in m.samples if s.name == f"hypic:{name}"):
                found[sample.labels[label]] += int(sample.value)
            return found

        engine.counts = counts
        yield engine


ARENA = 220 * 2048
"""A token of the tiny Llama takes 2 KiB of KV."""


@pytest.mark.parametrize("case", DECLINED, ids=lambda case: f"{case.reason}-{case.fields}")
def test_a_declined_request_is_served_natively_and_counted(case: Declined, counting: Any) -> None:
    before, outcomes = counting.counts("fallbacks_total"), counting.counts("segments_total", "outcome")
    request = {"input_ids": IDS, "sampling_params": GREEDY, **case.fields}
    out = generate(counting, **request, segments=case.segments)
    report = out["meta_info"]["hypic"]
    spans = [s for s in report["spans"] if s["kind"] == "segment"]
    declined = len(case.segments) - case.spared
    assert Counter(s["reason"] for s in spans) == Counter({case.reason: declined, None: case.spared})
    assert {s["outcome"] for s in spans if s["reason"]} == {"declined"}
    assert report["method"] == ("seam" if case.spared else "native")
    assert counting.counts("fallbacks_total") - before == {case.reason: declined}
    counted = counting.counts("segments_total", "outcome") - outcomes
    assert counted["declined"] == declined and counted.total() == len(case.segments)
    if not case.spared:
        assert out["output_ids"] == generate(counting, **request)["output_ids"]


def test_a_request_in_a_session_is_served_natively_and_counted(counting: Any) -> None:
    before = counting.counts("fallbacks_total")
    session = {"id": counting.open_session(1000)}
    out = generate(
        counting, input_ids=IDS, segments=[[10, 110]], sampling_params=GREEDY, extra_key="s", session_params=session
    )
    assert [s["reason"] for s in out["meta_info"]["hypic"]["spans"] if s["kind"] == "segment"] == ["session"]
    assert counting.counts("fallbacks_total") - before == {"session": 1}


def test_a_prompt_of_embeddings_has_no_segments(counting: Any) -> None:
    with pytest.raises(ValueError, match=r"hypic\.segments: .*send input_ids"):
        generate(counting, input_embeds=[[0.0] * 128] * 200, segments=[[10, 110]], sampling_params=GREEDY)


def test_without_a_reason_it_is_linked(counting: Any) -> None:
    """The engine of these tests is not off."""
    out = generate(counting, input_ids=IDS, segments=[[10, 110]], sampling_params=GREEDY)
    assert [s["outcome"] for s in out["meta_info"]["hypic"]["spans"] if s["kind"] == "segment"] in (
        ["compiled"],
        ["hit_device"],
    )


def test_a_model_whose_keys_cannot_be_moved_is_served_natively(tiny_model: Callable[[str], Path]) -> None:
    """Dynamic NTK: the angles depend on the length of the sequence."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    override = json.dumps({"rope_parameters": rope, "rope_scaling": rope})
    env = HypicConfig(enabled=True).to_env()
    with running_engine(tiny_model("llama"), env=env, json_model_override_args=override) as engine:
        out = generate(engine, input_ids=IDS, segments=[[10, 110], [120, 220]], sampling_params=GREEDY)
        plain = generate(engine, input_ids=IDS, sampling_params=GREEDY, extra_key="apart")
    spans = [s for s in out["meta_info"]["hypic"]["spans"] if s["kind"] == "segment"]
    assert [s["outcome"] for s in spans] == ["declined"] * 2
    for s in spans:
        assert s["reason"].startswith("off: ") and "DynamicNTK" in s["reason"]
    assert out["output_ids"] == plain["output_ids"]
