"""The oracle against Hugging Face: its full recompute, and links put together from Hugging Face's own parts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from hypic.check import tiny_models
from hypic.check.layouts import document_pool, random_layout
from hypic.check.oracle import Oracle, OracleError, OracleResult

PUBLISHED = (
    "qwen3next", "qwen35", "qwen35moe", "qwen35_dk", "llama", "qwen3", "deepseekv2", "nemotronh", "falconh1", "minimax",
)  # fmt: skip
"""Models that transformers has."""
MODELS = (*PUBLISHED, "ringlinear", "ring25")
"""With a full recompute of their own; Rings' is the quadratic form of check/bailing.py."""
OURS = ("kimi",)
"""transformers does not know them: SGLang's own forward is what they are compared with (check P1 and P4 on an engine)."""
HYBRIDS = (*MODELS[:4], *MODELS[7:], *OURS)
CONTINUED = MODELS[:7]
"""Models that Hugging Face takes on from a cache by more than one token; its Mamba-2 mixers and MiniMax cannot."""
VOCAB = 1000
W = 8
Spans = list[tuple[int, int]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def oracle(name: str) -> Oracle:
    return Oracle(tiny_models.build(name))


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def prompt(*parts: int | list[int]) -> tuple[list[int], Spans]:
    """A prompt of plain stretches (given by their length) and segments (given by their tokens)."""
    ids: list[int] = []
    cached: Spans = []
    for i, part in enumerate(parts):
        if isinstance(part, list):
            cached.append((len(ids), len(ids) + len(part)))
            ids += part
        else:
            ids += tokens(part, seed=100 + i)
    return ids, cached


def assert_same(got: OracleResult | Tensor, want: OracleResult | Tensor, atol: float) -> None:
    """Logprobs agree to ``atol`` plus the resolution of float32 logits of the tiny models' size (about 30)."""
    a, b = (x.logprobs if isinstance(x, OracleResult) else x for x in (got, want))
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-6)


# --- full recompute -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_is_the_forward_of_the_whole_model(name: str) -> None:
    ids = tokens(150)
    result = oracle(name).full(ids, n_new=5)
    with torch.inference_mode():
        logits = oracle(name).model(input_ids=torch.tensor([ids + result.ids[:-1]])).logits[0, len(ids) - 1 :]
    assert_same(result, logits.log_softmax(-1), atol=1e-5)
    assert result.ids == logits.argmax(-1).tolist()
    assert result.logprobs.dtype == torch.float32 and not result.linked


@pytest.mark.parametrize("name", PUBLISHED)
def test_full_is_greedy_generate(name: str) -> None:
    ids = tokens(70)
    out = oracle(name).model.generate(
        torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert oracle(name).full(ids, n_new=5).ids == out[0, len(ids) :].tolist()


def test_forced_tokens_are_taken_instead_of_the_greedy_ones() -> None:
    o, ids, forced = oracle("qwen35"), tokens(60), [5, 6, 7]
    answers = [o.full(ids, n_new=3, forced=forced), o.link(ids, [], w=W, n_new=3, forced=forced)]
    for result in answers:
        assert result.ids == forced
        assert_same(result.logprobs[2:], o.full([*ids, 5, 6], n_new=1), atol=1e-5)


def test_vocab_limit_normalises_over_the_logits_it_leaves() -> None:
    ids = tokens(30)
    limited = Oracle(tiny_models.build("llama"), vocab_limit=200)
    want = oracle("llama").full(ids, n_new=1).logprobs[:, :200].log_softmax(-1)
    assert_same(limited.full(ids, n_new=1), want, atol=1e-5)
    assert_same(limited.link(ids, [], w=W, n_new=1), want, atol=1e-5)


# --- links that equal a full recompute (no cached span, P1, P2) -------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n", [1, 2, 130])
def test_link_of_nothing_is_full(name: str, n: int) -> None:
    ids = tokens(n)
    full = oracle(name).full(ids, n_new=4)
    assert_same(oracle(name).link(ids, [], w=W, n_new=4, forced=full.ids), full, atol=2e-5)


@pytest.mark.parametrize("name", [*MODELS, *OURS])
@pytest.mark.parametrize(("length", "w"), [(200, 8), (65, 1), (9, 8), (11, 8), (4, 2), (70, 0)])
def test_p1_one_segment_at_the_start_is_full(name: str, length: int, w: int) -> None:
    ids, cached = prompt(tokens(length), 20)
    full = oracle(name).full(ids, n_new=4)
    linked = oracle(name).link(ids, cached, w=w, n_new=4, forced=full.ids)
    assert linked.linked == ((0, length),)
    assert_same(linked, full, atol=1e-4)


@pytest.mark.parametrize("name", [*MODELS, *OURS])
def test_p2_segments_within_the_seam_window_are_full(name: str) -> None:
    ids, cached = prompt(5, tokens(64, 1), tokens(30, 2), 3, tokens(8, 3), 10)
    full = oracle(name).full(ids, n_new=4)
    linked = oracle(name).link(ids, cached, w=64, n_new=4, forced=full.ids)
    assert linked.linked == ()
    assert_same(linked, full, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen35", "llama"])
def test_a_segment_that_ends_the_prompt_is_plain(name: str) -> None:
    ids, cached = prompt(tokens(40, 1), 5, tokens(50, 2))
    linked = oracle(name).link(ids, cached, w=W, n_new=3)
    assert linked.linked == (cached[0],)
    assert_same(linked, oracle(name).full(ids, n_new=3, forced=linked.ids), atol=1e-4)  # the other one starts at 0


# --- links against Hugging Face's parts -----------------------------------------------------------------------------


class HuggingFaceLink:
    """A link put together from Hugging Face's forward, cache, chunked and recurrent kernels; no line of the oracle.

    A segment runs in isolation, but at its true positions (RoPE is relative, so its K is what a link wants); its
    interior K, V and conv inputs are then appended to the running cache, and the recurrence is taken on with
    ``torch_recurrent_gated_delta_rule`` over the inputs that the isolated run gave to its chunked kernel.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.text = getattr(model.model, "language_model", model.model)
        self.cache = DynamicCache(config=self.text.config)
        self.position = 0

    def compute(self, ids: Sequence[int]) -> None:
        self.hidden = self._forward(ids, self.cache)
        self.position += len(ids)

    def interior(self, segment: Sequence[int], w: int) -> None:
        """Link tokens [w, L) of ``segment``; its seam must have been computed."""
        own, kernel_inputs = DynamicCache(config=self.text.config), {}
        kernels = {i: x.linear_attn.chunk_gated_delta_rule for i, x in enumerate(self.text.layers) if is_linear(x)}

        def spy(i: int) -> Any:
            def call(*qkv: Tensor, **kwargs: Any) -> Any:
                kernel_inputs[i] = (*qkv, kwargs["g"], kwargs["beta"])
                return kernels[i](*qkv, **kwargs)

            return call

        self.position -= w
        try:
            for i in kernels:
                self.text.layers[i].linear_attn.chunk_gated_delta_rule = spy(i)
            self._forward(segment, own)
        finally:
            for i, kernel in kernels.items():
                self.text.layers[i].linear_attn.chunk_gated_delta_rule = kernel
        for i, (mine, true) in enumerate(zip(own.layers, self.cache.layers, strict=True)):
            if i in kernels:
                q, k, v, g, beta = (x[:, w:] for x in kernel_inputs[i])
                _, h = torch_recurrent_gated_delta_rule(q, k, v, g, beta, true.recurrent_states, True, True)
                self.cache.update_recurrent_state(h, i)
                self.cache.update_conv_state(mine.conv_states[..., w - len(segment) :], i)
            else:
                self.cache.update(mine.keys[:, :, w:], mine.values[:, :, w:], i)
        self.position += len(segment)

    def _forward(self, ids: Sequence[int], kv: DynamicCache) -> Tensor:
        positions = torch.arange(self.position, self.position + len(ids))[None]
        out = self.text(torch.tensor([ids]), position_ids=positions, past_key_values=kv, use_cache=True)
        return out.last_hidden_state[0, -1]


def is_linear(layer: Any) -> bool:
    return hasattr(layer, "linear_attn")


@torch.inference_mode()
def hf_link(name: str, ids: list[int], cached: Spans, w: int, forced: list[int]) -> Tensor:
    """Logprobs [len(forced), vocab] of the link of ``ids``; segments must be longer than w."""
    model = oracle(name).model
    link = HuggingFaceLink(model)
    done, rows = 0, []
    for start, end in cached:
        link.compute(ids[done : start + w])
        link.interior(ids[start:end], w)
        done = end
    link.compute(ids[done:])
    for token in forced:
        rows.append(model.lm_head(link.hidden).log_softmax(-1))
        link.compute([token])
    return torch.stack(rows)


LAYOUTS = {
    "two": prompt(32, tokens(100, 1), tokens(130, 2), 20),
    "short gaps": prompt(tokens(64, 1), 1, tokens(65, 2), 2, tokens(63, 3), 3),
    "twice": prompt(3, tokens(70, 1), tokens(70, 1), 40, tokens(70, 1), 1),
    "interiors shorter than the conv window": prompt(20, tokens(9, 1), tokens(10, 2), 1, tokens(9, 3), 6),
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("w", [W, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_link_is_hugging_faces_parts_put_together(name: str, layout: str, w: int) -> None:
    ids, cached = LAYOUTS[layout]
    linked = oracle(name).link(ids, cached, w=w, n_new=4)
    assert linked.linked == tuple(cached)
    assert_same(linked, hf_link(name, ids, cached, w, linked.ids), atol=1e-4)


@pytest.mark.parametrize("name", CONTINUED)
def test_random_layouts(name: str) -> None:
    pool = document_pool(random.Random(0), VOCAB)
    for seed in range(6):
        ids, cached = random_layout(random.Random(seed), VOCAB, max_tokens=300, pool=pool)
        linked = oracle(name).link(ids, cached, w=W, n_new=3)
        assert_same(linked, hf_link(name, ids, list(linked.linked), W, linked.ids), atol=1e-4)


# --- the tests above can fail, and links do not touch each other ------------------------------------------------------


@pytest.mark.parametrize("name", [*MODELS, *OURS])
def test_a_link_is_not_a_full_recompute_and_knows_its_order(name: str) -> None:
    a, b = tokens(120, 1), tokens(90, 2)
    linked, swapped = (oracle(name).link(*prompt(10, *pair, 15), w=W, n_new=1) for pair in ((a, b), (b, a)))
    full = oracle(name).full(prompt(10, a, b, 15)[0], n_new=1)
    assert (linked.logprobs - full.logprobs).abs().max() > 0.05
    assert (linked.logprobs - swapped.logprobs).abs().max() > 0.05


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_conv_window_after_a_segment_matters(name: str) -> None:
    """The last token of an interior reaches the next token's convolution."""
    segment = tokens(60, 1)
    other = [*segment[:-1], segment[-1] + 1]
    one, two = (oracle(name).link(*prompt(10, s, 1), w=W, n_new=1) for s in (segment, other))
    assert (one.logprobs - two.logprobs).abs().max() > 0.01


@pytest.mark.parametrize("name", ["qwen3next", "llama"])
def test_answers_do_not_depend_on_what_was_asked_before(name: str) -> None:
    ids, cached = prompt(12, tokens(100, 1), tokens(80, 2), 9)
    o = Oracle(tiny_models.build(name))
    first = o.link(ids, cached, w=W, n_new=3)
    o.link(*prompt(40, tokens(80, 2), tokens(100, 1), 9), w=3, n_new=3)
    o.full(ids, n_new=3)
    again = o.link(ids, cached, w=W, n_new=3)
    assert again.ids == first.ids and torch.equal(again.logprobs, first.logprobs)


# --- clear errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "cached", "kwargs", "message"),
    [
        ([], [], {}, "empty"),
        ([5] * 30, [(10, 31)], {}, "leaves the prompt"),
        ([5] * 30, [(10, 20), (19, 25)], {}, "overlaps"),
        ([5] * 30, [(10, 20), (0, 9)], {}, "out of order"),
        ([5] * 30, [(-3, 9)], {}, "leaves the prompt"),
        ([5] * 30, [], {"w": -1}, "w = -1"),
        ([5] * 30, [], {"n_new": 0}, "n_new = 0"),
        ([5] * 30, [], {"forced": [1, 2]}, "forced has 2"),
    ],
)
def test_what_cannot_be_answered_is_refused(ids: list[int], cached: Spans, kwargs: Any, message: str) -> None:
    with pytest.raises(OracleError, match=message):
        oracle("llama").link(ids, cached, **{"w": W, "n_new": 1} | kwargs)


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match="cannot read"):
        Oracle(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(OracleError, match=r"\['MambaForCausalLM'\] unknown.*Qwen3NextForCausalLM"):
        Oracle(tmp_path)


def test_rope_that_depends_on_the_prompt_length_is_refused(tmp_path: Path) -> None:
    source = tiny_models.build("llama")
    config = json.loads((source / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(OracleError, match="dynamic"):
        Oracle(tmp_path)
