"""What the engine cannot serve: refused at start-up with the reason, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hypic.config import HypicConfig, artifact_dtypes
from hypic.method import parse_methods


class Unsupported(ValueError):
    """A server flag or model that position-independent caching cannot work with; the text names it and the remedy.

    Attributes:
        server_args: SGLang's, where they were what was checked: `hypic doctor` has more to say of them.
    """

    server_args: Any = None


REMEDY = "--hypic-off serves it without hypic"

SLIDING_WINDOWS = (
    "sliding-window attention: while a segment is compiled, SGLang frees the K and V that leave the window"
)
"""Why Gemma2, Gemma3 and others are refused (docs/SEMANTICS.md)."""


def cannot_serve(path: str, architecture: str, reasons: Sequence[str]) -> Unsupported:
    """The refusal of a model: one line."""
    return Unsupported(f"hypic cannot serve {path} ({architecture}): {'; '.join(reasons)}; {REMEDY}")


class Refusal(NamedTuple):
    flag: str
    applies: Callable[[Any], bool]
    reason: str


def _set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name))


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--speculative-algorithm", _set("speculative_algorithm"), "draft workers keep states that no artifact covers"
    ),
    Refusal(
        "--decoupled-spec-role",
        lambda a: a.decoupled_spec_role != "null",
        "draft workers keep states that no artifact covers",
    ),
    Refusal("--enable-dp-attention", _set("enable_dp_attention"), "padded batches have rows without a run plan"),
    Refusal("--dp-size", lambda a: a.dp_size > 1, "replicas do not share artifacts; start one server per replica"),
    Refusal(
        "--enable-two-batch-overlap", _set("enable_two_batch_overlap"), "half batches have no run plan of their own"
    ),
    Refusal("--pp-size", lambda a: a.pp_size > 1, "an artifact spans all layers"),
    Refusal("--disaggregation-mode", lambda a: a.disaggregation_mode != "null", "KV transfer assumes natural order"),
    Refusal(
        "--kv-cache-dtype",
        lambda a: a.kv_cache_dtype not in ("auto", "bf16", "bfloat16", "float16", "float32"),
        "relocating a quantised K is not proven",
    ),
    Refusal("--enable-hierarchical-cache", _set("enable_hierarchical_cache"), "host tiers know nothing of marked keys"),
    Refusal("--enable-lmcache", _set("enable_lmcache"), "its radix cache knows nothing of marked keys"),
    Refusal("--enable-flexkv", _set("enable_flexkv"), "its radix cache knows nothing of marked keys"),
    Refusal("--radix-cache-backend", _set("radix_cache_backend"), "an unknown radix cache may read token ids of keys"),
    Refusal(
        "--tokenizer-worker-num", lambda a: a.tokenizer_worker_num > 1, "SGLang's tokenizer workers load no plugins"
    ),
    Refusal("--use-ray", _set("use_ray"), "its scheduler actors load no plugins"),
    Refusal("--smg-grpc-mode", _set("smg_grpc_mode"), "its server passes by the front end that plans requests"),
    Refusal("--enable-unified-memory", _set("enable_unified_memory"), "state slots move"),
    Refusal("--enable-page-major-kv-layout", _set("enable_page_major_kv_layout"), "state slots are strided"),
    Refusal(
        "--enable-int8-mamba-checkpoint",
        _set("enable_int8_mamba_checkpoint"),
        "rounding of states in the radix tree is not proven",
    ),
    Refusal("--enable-linear-replayssm", _set("enable_linear_replayssm"), "the state slot lags behind the sequence"),
    Refusal("--enable-memory-saver", _set("enable_memory_saver"), "released pools would outlive their artifacts"),
    Refusal("--kv-canary", lambda a: a.kv_canary != "none", "interiors are copied without its marks"),
    Refusal("--kv-events-config", _set("kv_events_config"), "events would publish marked ids"),
    Refusal("--enable-session-radix-cache", _set("enable_session_radix_cache"), "sessions are not proven"),
    Refusal("--enable-streaming-session", _set("enable_streaming_session"), "streaming sessions are not proven"),
    Refusal("--enable-hisparse", _set("enable_hisparse"), "KV moves to the host"),
    Refusal("--enable-pdmux", _set("enable_pdmux"), "it splits the prefill by layers"),
    Refusal("--dllm-algorithm", _set("dllm_algorithm"), "diffusion decoding has no causal state"),
    Refusal("--is-embedding", _set("is_embedding"), "there is no prefill to link"),
    Refusal("--encoder-only", _set("encoder_only"), "there is no prefill to link"),
    Refusal("--attn-cp-size", lambda a: a.attn_cp_size > 1, "context parallelism splits runs"),
    Refusal("--dcp-size", lambda a: a.dcp_size > 1, "context parallelism splits KV pages"),
)


def check_methods(config: HypicConfig, hybrid: bool) -> None:
    """Raise Unsupported if the settings name a method that the model cannot be served with."""
    if hybrid and any(m.dummies for m in parse_methods(config.methods, config.seam_window).values()):
        raise Unsupported(
            "--hypic-methods legolink-0: for models whose layers are all full attention. A linear layer has no attention sink "
            "that dummy tokens could take; without a seam the tokens behind a segment's start are off in state and keys, and "
            "answers collapse (docs/SEMANTICS.md). Use seam"
        )


def check_state_dtype(setting: str, model: str) -> None:
    """Raise Unsupported if artifacts of a model in float32 would be kept in less."""
    if model == "float32" and artifact_dtypes(setting, model)[0] != "float32":
        raise Unsupported(f"--hypic-state-dtype {setting} with a model in float32: leave it out, or serve in bfloat16")


def check_server_args(args: Any, config: HypicConfig) -> None:
    """Raise Unsupported naming every flag that does not go with hypic, with its reason."""
    check_state_dtype(config.state_dtype, args.dtype)
    if config.router:
        if args.tp_size > 1 and not config.data.startswith("ipc://"):
            raise Unsupported("--hypic-data with --tp-size > 1: write ipc:///PATH, ranks speak to each other beside it")
        if not config.worker or not config.data:
            raise Unsupported(
                "--hypic-router needs --hypic-worker NAME and --hypic-data ADDRESS; `hypic launch` sets them"
            )
    found = [f"{r.flag}: {r.reason}" for r in REFUSALS if r.applies(args)]
    if found:
        listing = "\n  ".join(found)
        raise Unsupported(f"hypic does not work with these flags; drop them, or serve without hypic:\n  {listing}")
