"""A model by its config: can hypic serve it, how large are its artifacts, how many fit. Loads no weights.

What is served is decided as by the server (``engine.objections``).
"""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

from hypic.artifact.arena import align
from hypic.artifact.layout import ArtifactLayout, FullShape, Header, encode_header, token_bytes
from hypic.config import HypicConfig, artifact_dtypes
from hypic.doctor.findings import LayerFamily, ModelFinding, SegmentSize
from hypic.engine.families import family, family_of_config
from hypic.engine.memory import CPU_ARENA_BYTES, GPU_ARENA_SHARE, arena_of, estimated
from hypic.engine.objections import doubts, refusals
from hypic.engine.support import REMEDY, Unsupported, check_methods, check_server_args

SEGMENT_TOKENS = (512, 2048, 8192)


def folder_problem(path: str) -> str | None:
    """Why a model that is named by a path cannot be read at all: SGLang would look for it at Hugging Face, for a minute."""
    folder, above = Path(path).expanduser(), path.strip("/").partition("/")[0]
    if folder.is_file():  # one of weights, say
        return None
    if not folder.is_dir():
        local = path.startswith(("/", ".", "~")) or (above != path and Path(above).is_dir() and not _cached(path))
        elsewhere = (
            "" if path.startswith(("/", ".", "~")) else f"; is it on Hugging Face, run this where there is no {above}/"
        )
        return f"there is no such folder{elsewhere}" if local else None
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        if (folder / "params.json").is_file():  # as Mistral writes it, and SGLang reads it
            return None
        return "there is no config.json in this folder: download the model again, or name another folder"
    except (OSError, ValueError) as e:
        return f"its config.json cannot be read ({e}): download it again"
    if not isinstance(config, dict) or (missing := [f for f in ("architectures", "model_type") if not config.get(f)]):
        what = f"no {missing[0]}" if isinstance(config, dict) else "no JSON object"
        return f"its config.json has {what}, so it is not that of a model: download it again"
    return None


def _cached(name: str) -> bool:
    """Whether a model of Hugging Face was downloaded before."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def examine(finding: ModelFinding, server_args: Any, config: HypicConfig, free: int, on_cpu: bool) -> None:
    """Fill in ``finding``.

    Args:
        server_args: SGLang's ServerArgs for the model and flags in question.
        free: bytes of device memory that are free now.
        on_cpu: the server would run in CPU mode.
    Raises:
        Unsupported: a flag or setting that hypic refuses.
    """
    from sglang.srt.configs.model_config import ModelConfig

    check_server_args(server_args, config)
    model = ModelConfig.from_server_args(server_args)
    architecture = model.hf_config.architectures[0]
    finding.architecture, finding.dtype = architecture, str(model.dtype).removeprefix("torch.")
    finding.tp_size, finding.seam_window = server_args.tp_size, config.seam_window
    finding.tested = architecture in _tested()
    finding.problems += [f"{reason}; {REMEDY}" for reason in refusals(model, server_args)] + doubts(model)
    if finding.problems:
        return
    layout = read_layout(model, server_args, config.state_dtype)
    check_methods(config, hybrid=layout.linear is not None)
    finding.families = _families(layout)
    if (linear := layout.linear) is not None:
        n = len(linear.layer_ids)
        finding.transition_bytes, finding.state_bytes = n * layout.t_layer, n * layout.s_layer
        finding.conv_bytes = n * layout.conv_layer
    finding.token_bytes = layout.kv_token_bytes
    finding.weight_bytes = _weight_bytes(Path(server_args.model_path), model, server_args.load_format)
    ours = (finding.weight_bytes or 0) // server_args.tp_size
    try:
        finding.arena_bytes, finding.arena_source = _arena(config, server_args, free, ours, on_cpu)
    except Unsupported as e:
        finding.problems.append(str(e))
        return
    for tokens in SEGMENT_TOKENS:
        nbytes = artifact_bytes(layout, model, server_args, config, tokens)
        fit = finding.arena_bytes // nbytes
        finding.segments.append(SegmentSize(tokens=tokens, bytes=nbytes, fit=fit))
    least = max(config.min_segment, config.seam_window + 1)
    if (needed := artifact_bytes(layout, model, server_args, config, least)) > finding.arena_bytes:
        mib = math.ceil(needed / 2**20)
        finding.problems.append(
            f"the arena does not hold a single segment, so nothing would be cached; raise --hypic-memory: one of {least} tokens, "
            f"the shortest, needs {mib}MiB"
        )


def _tested() -> tuple[str, ...]:
    from hypic.check.coverage import COVERAGE

    return tuple(c.architecture for c in COVERAGE)


def read_layout(model: Any, server_args: Any, state_dtype: str) -> ArtifactLayout:
    """The artifact layout of one rank, from SGLang's ModelConfig (``engine.model.read_layout`` has it from the pools)."""
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.runtime_context import get_parallel

    tp, linear = server_args.tp_size, None
    layers = range(model.num_hidden_layers)
    if (found := family_of_config(model)) is not None:
        of_s, of_t = artifact_dtypes(state_dtype, str(model.dtype).removeprefix("torch."))
        hybrid = found.config(model)
        assert hybrid is not None
        with get_parallel().override(attn_tp_size=tp):
            params = hybrid.mamba2_cache_params
        linear = found.shape(
            tuple(params.layers),
            [tuple(conv) for conv in params.shape.conv],
            tuple(params.shape.temporal),
            str(params.dtype.conv).removeprefix("torch."),
            of_s,
        ).with_operators_in(of_t)
        layers = hybrid.full_attention_layer_ids
    latent = model.attention_arch == AttentionArch.MLA
    full = FullShape(
        layer_ids=tuple(layers),
        heads=1 if latent else model.get_num_kv_heads(tp),
        d_k=model.kv_lora_rank + model.qk_rope_head_dim if latent else model.head_dim,
        d_v=0 if latent else model.v_head_dim,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    return ArtifactLayout(linear, full if layers else None)


def _families(layout: ArtifactLayout) -> list[LayerFamily]:
    out = []
    if (linear := layout.linear) is not None:
        convolution = f"convolution over {linear.conv_width + 1}" if linear.conv_width else "no convolution"
        shape = f"{linear.heads} heads, d_k {linear.d_k}, d_v {linear.d_v}, {convolution}"
        title = family(linear.family).title
        out.append(LayerFamily(family=title, layers=len(linear.layer_ids), shape=shape))
    if (full := layout.full) is not None:
        shape = f"{full.heads} KV heads of {full.d_k}" if full.d_v else f"latent attention, {full.d_k} a token"
        out.append(LayerFamily(family="full attention", layers=len(full.layer_ids), shape=shape))
    return out


def artifact_bytes(layout: ArtifactLayout, model: Any, server_args: Any, config: HypicConfig, tokens: int) -> int:
    """Bytes that the artifact of a segment takes in the arena of one rank, header included."""
    from hypic.engine.keys import METHOD, model_fingerprint

    fingerprint = model_fingerprint(server_args.model_path, model.hf_config, server_args.load_format)
    header = Header(
        fingerprint=f"{fingerprint}+0",
        method=METHOD,
        seam_window=config.seam_window,
        adapter="",
        tp_rank=0,
        tp_size=server_args.tp_size,
        linear=layout.linear,
        full=layout.full,
        tokens=token_bytes(array("q", [0]) * tokens),
    )
    return align(len(encode_header(header)) + layout.payload_bytes(max(tokens - config.seam_window, 0)))


def _arena(config: HypicConfig, server_args: Any, free: int, weights: int, on_cpu: bool) -> tuple[int, str]:
    """Size of the arena, and where that figure is from. Raises Unsupported where it leaves SGLang nothing."""
    if on_cpu:
        if config.memory:
            return config.memory, "--hypic-memory"
        return CPU_ARENA_BYTES, "the default on a CPU; --hypic-memory sets it"
    budget = estimated(server_args, free, weights)
    nbytes = arena_of(config, budget)
    if config.memory:
        return nbytes, "--hypic-memory"
    return nbytes, f"an estimate: {budget}, of which {GPU_ARENA_SHARE:.0%}; --hypic-memory sets it"


def _weight_bytes(folder: Path, model: Any, load_format: str) -> int | None:
    """Bytes of a local model's weight files; 0 where they are not there yet. Of dummy weights as many as its config makes, where
    transformers knows the model."""
    if load_format == "dummy":
        return _made_up_bytes(folder, model)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder.is_dir() else None


def _made_up_bytes(folder: Path, model: Any) -> int | None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config)
    except Exception:  # whatever transformers has against a model that SGLang may well know
        return None
    return sum(p.numel() for p in made.parameters()) * model.dtype.itemsize
