"""The reference against the oracle, Hugging Face's forward, and formulas written out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hypic.check import tiny_models
from hypic.check.oracle import Oracle
from hypic.eval.methods import CLOSED_BOOK, FULL, METHODS, Method, method
from hypic.eval.prompt import Prompt
from hypic.eval.reference import Model, Reference
from hypic.eval.reference.delta import delta_rule
from hypic.eval.reference.layout import Layout
from hypic.eval.reference.probing import probe

HYBRIDS = ("qwen35", "qwen3next")
MODELS = (*HYBRIDS, "llama", "qwen3")
EXACT = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def oracle(name: str) -> Oracle:
    return Oracle(tiny_models.build(name))


@cache
def model(name: str) -> Model:
    return Model(tiny_models.build(name))


@cache
def reference(name: str) -> Reference:
    return Reference(model(name))


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(20, 900, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def prompt(*parts: int | tuple[int, ...]) -> Prompt:
    """Numbers are so many plain tokens, tuples are segments."""
    ids: list[int] = []
    segments = []
    for i, part in enumerate(parts):
        if isinstance(part, tuple):
            segments.append((len(ids), len(ids) + len(part)))
        ids += tokens(part, 90 + i) if isinstance(part, int) else part
    return Prompt(tuple(ids), tuple(segments))


PROMPTS = {
    "gaps": prompt(9, tokens(90, 1), 3, tokens(70, 2), tokens(40, 3), 8),
    "at the start, one twice, one short": prompt(tokens(66, 4), tokens(66, 4), tokens(6, 5), 5),
}


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def rows(name: str, how: Method, p: Prompt, forced: Sequence[int]) -> Tensor:
    return reference(name).answer(how, p, max_new=len(forced), forced=forced).logprobs


# --- what the oracle also knows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("w", [0, 2, 8])
def test_a_link_is_the_oracles(name: str, w: int, layout: str) -> None:
    p = PROMPTS[layout]
    truth = oracle(name).link(p.ids, p.segments, w=w, n_new=5)
    how = Method(name="", about="", w=w)
    assert distance(rows(name, how, p, truth.ids), truth.logprobs) < EXACT
    greedy = reference(name).answer(how, p, max_new=5)
    assert list(greedy.ids) == truth.ids and distance(greedy.logprobs, truth.logprobs) < EXACT
    assert greedy.reused == sum(end - start - w for start, end in truth.linked)


@pytest.mark.parametrize("name", MODELS)
def test_full_is_hugging_faces_forward(name: str) -> None:
    p = PROMPTS["gaps"]
    truth = oracle(name).full(p.ids, n_new=5)
    greedy = reference(name).answer(FULL, p, max_new=5)
    assert list(greedy.ids) == truth.ids and distance(greedy.logprobs, truth.logprobs) < EXACT
    assert greedy.reused == 0
    closed = reference(name).answer(CLOSED_BOOK, Prompt(p.ids[-8:]), max_new=5)
    assert distance(closed.logprobs, oracle(name).full(p.ids[-8:], n_new=5).logprobs) < EXACT


def test_a_seam_window_that_is_a_share_is_of_each_document() -> None:
    p = prompt(9, tokens(80, 1), 3, tokens(41, 2), 8)
    share = method("hypic w=10%")
    greedy = reference("qwen35").answer(share, p, max_new=4)
    assert greedy.reused == (80 - 8) + (41 - 5)
    truth = oracle("qwen35").full(p.ids, n_new=4)
    assert distance(rows("qwen35", method("hypic w=100%"), p, truth.ids), truth.logprobs) < EXACT


# --- methods that nobody else knows, against formulas ---------------------------------------------------------------


def steps_by_hand(t: Sequence[Tensor], seam: int, start: int, end: int, how: str) -> Tensor:
    """The state after ``start`` plain tokens, a seam and an interior, token by token in float64 [H, K, V]."""
    _, k, v, g, beta = (x.double() for x in t)

    def walk(h: Tensor, span: range) -> Tensor:
        for i in span:
            h = h * g[i].exp()[:, None, None]
            held = torch.einsum("hkv,hk->hv", h, k[i])
            h = h + torch.einsum("hk,hv->hkv", k[i], beta[i][:, None] * (v[i] - held))
        return h

    zero = torch.zeros(k.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    before = walk(zero, range(start + seam))
    alone = walk(zero, range(start + seam, end))
    decay = g[start + seam : end].sum(0).exp()[:, None, None]
    return {"additive": before + alone, "decay": decay * before + alone, "last": alone, "zero": zero}[how]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("how", ["additive", "decay-only", "last-segment", "state-zeroed"])
def test_states_step_as_the_formula_says(name: str, how: str) -> None:
    start, length, w = 20, 90, 8
    p = prompt(start, tokens(length, 1), 6)
    ref, m = reference(name), METHODS[how]
    states = ref.head(m, p).states
    # The first linear layer's inputs are the embeddings, which no method changes: its tokens are known without a link.
    ids = p.ids[: p.head]
    layer, mixer = model(name).layers[0]
    with torch.inference_mode():
        y = layer.input_layernorm(model(name).embed(ids))
        full_record = list(mixer.link(y, Layout(len(ids), (), FULL, "cpu"), []).record)
        alone = mixer.link(y[start:], Layout(length, (), FULL, "cpu"), []).record
    linked = [torch.cat([mine[: start + w], theirs[w:]]) for mine, theirs in zip(full_record, alone, strict=True)]
    expected = steps_by_hand(linked, w, start, start + length, m.state)
    assert distance(states[0].h.double(), expected) < 1e-5
    assert m.state == "zero" or expected.abs().max() > 0.05


@pytest.mark.parametrize(
    ("name", "how"),
    [(n, how) for n in MODELS for how in ("naive", "concat", "no-relocation") if METHODS[how].fits(n in HYBRIDS)],
)
def test_without_relocation_keys_stay_at_their_places_in_the_document(name: str, how: str) -> None:
    """K of an isolated run that Hugging Face rotated at local positions is what stands in the state."""
    m, ref = METHODS[how], reference(name)
    p = PROMPTS["gaps"]
    o = oracle(name)
    at = next(i for i, (_, mixer) in enumerate(model(name).layers) if mixer.kind == "attention")
    state = ref.head(m, p).states[at]
    for start, end in p.segments:
        own = DynamicCache(config=o._text.config)
        with torch.inference_mode():
            o._text(torch.tensor([p.ids[start:end]]), past_key_values=own, use_cache=True)
        k = own.layers[at].keys[0].transpose(0, 1)
        w = m.window(end - start)
        assert distance(state.k[start + w : end], k[w:]) < EXACT
    relocated = ref.head(Method(name="", about="", w=m.w, state=m.state), p).states[at]
    assert distance(state.k, relocated.k) > 0.05
    assert torch.equal(state.v, relocated.v)  # the first attention layer: no K came before it


@pytest.mark.parametrize("layout", PROMPTS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_legolink_0_is_a_link_of_what_stood_behind_dummies(name: str, layout: str) -> None:
    """The oracle links the records of an isolated run of dummies and document, less the dummies."""
    p, o, lego = PROMPTS[layout], Oracle(tiny_models.build(name)), METHODS["legolink-0"]
    dummies = [model(name).dummy] * lego.dummies
    with torch.inference_mode():
        for start, end in p.segments:
            document = p.ids[start:end]
            _, _, records = o._run([*dummies, *document], [block.start() for block in o._blocks])
            o._compiled[document] = [type(r)(*(x[lego.dummies :] for x in r)) for r in records]
    truth = o.link(p.ids, p.segments, w=0, n_new=4)
    assert distance(rows(name, lego, p, truth.ids), truth.logprobs) < EXACT
    assert distance(rows(name, method("hypic w=0"), p, truth.ids), truth.logprobs) > 0.01


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_cacheblend(name: str) -> None:
    """All tokens are full recompute; few are nearer to it than none, and so many are computed as it says."""
    p = PROMPTS["gaps"]
    truth = oracle(name).full(p.ids, n_new=4)
    assert distance(rows(name, method("cacheblend-100%"), p, truth.ids), truth.logprobs) < EXACT
    answer = reference(name).answer(method("cacheblend-15%"), p, max_new=4)
    assert answer.reused == 200 - 30
    v_full, v_none, v_some = (
        torch.cat([s.v for s in reference(name).head(m, p).states])
        for m in (FULL, method("hypic w=0"), method("cacheblend-15%"))
    )
    assert distance(v_some, v_full) > 1e-3
    assert (v_some - v_full).norm() < 0.95 * (v_none - v_full).norm()


def test_cacheblend_computes_the_tokens_that_deviate_most() -> None:
    """Second layer, by hand: the same tokens as an isolated and a full run differ in most."""
    name, p = "llama", PROMPTS["gaps"]
    o, blend = oracle(name), method("cacheblend-5%")
    with torch.inference_mode():
        start = [block.start() for block in o._blocks]
        full = o._run(p.ids[: p.head], start)[2][1]
        away = torch.full((p.head,), -1.0)
        for a, b in p.segments:
            alone = o._run(p.ids[a:b], start)[2][1]
            away[a:b] = sum((x[a:b] - y).square().flatten(1).sum(-1) for x, y in zip(full, alone, strict=True))
    chosen = set(away.topk(10).indices.tolist())
    states = reference(name).head(blend, p).states
    full_v, none_v = (reference(name).head(m, p).states[1].v for m in (FULL, method("hypic w=0")))
    taken = {i for i in range(p.head) if away[i] >= 0 and not torch.equal(states[1].v[i], none_v[i])}
    # Two documents begin the same way in isolation and in the prompt nowhere: every chosen token's V changed.
    assert taken == chosen
    assert distance(states[1].v[sorted(chosen)], full_v[sorted(chosen)]) < EXACT


@pytest.mark.parametrize("name", ["qwen35", "llama"])
def test_kv_zeroed_hides_documents_from_what_stands_outside(name: str) -> None:
    m = METHODS["kv-zeroed"]
    p = prompt(9, tokens(80, 1), 3, tokens(60, 2), 8)
    at = next(i for i, (_, mixer) in enumerate(model(name).layers) if mixer.kind == "attention")
    state = reference(name).head(m, p).states[at]
    assert len(state.k) == 9 + 3
    if name == "llama":  # nothing else carries what documents say
        other = prompt(9, tokens(80, 7), 3, tokens(60, 8), 8)
        forced = tokens(3, 5)
        assert distance(rows(name, m, p, forced), rows(name, m, other, forced)) < EXACT


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 64, 65, 150])
def test_the_chunked_rule_is_the_token_recurrence(n: int) -> None:
    g = torch.Generator().manual_seed(n)
    q, k = (torch.randn(n, 3, 16, generator=g) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    v, h = torch.randn(n, 3, 8, generator=g), torch.randn(3, 16, 8, generator=g)
    decay, beta = -torch.rand(n, 3, generator=g), torch.rand(n, 3, generator=g)
    state, out = delta_rule(q, k, v, decay, beta, h)
    h = h.double()
    for i in range(n):
        h = h * decay[i].exp()[:, None, None]
        held = torch.einsum("hkv,hk->hv", h, k[i].double())
        h = h + torch.einsum("hk,hv->hkv", k[i].double(), beta[i][:, None] * (v[i] - held))
        assert distance(out[i].double(), torch.einsum("hkv,hk->hv", h, q[i].double()) / 4) < 1e-4
    assert distance(state.double(), h) < 1e-5


def test_forcing_finds_the_greedy_answer_too() -> None:
    """Whatever is forced, the answer is the greedy one, from where both part."""
    p, how = PROMPTS["gaps"], METHODS["hypic w=8"]
    greedy = reference("qwen35").answer(how, p, max_new=6)
    for n in range(7):
        forced = greedy.ids[:n] + tuple((t + 1) % 900 for t in greedy.ids[n:])
        again = reference("qwen35").answer(how, p, max_new=6, forced=forced)
        assert again.ids == greedy.ids and len(again.logprobs) == 6


def test_answers_end_at_ends_and_stops() -> None:
    p = PROMPTS["gaps"]
    plain = reference("llama").answer(FULL, p, max_new=6)
    end = plain.ids[3]
    first = plain.ids.index(end)
    ended = Reference(model("llama"), ends=frozenset([end]), text=str).answer(FULL, p, max_new=6)
    assert ended.ids == plain.ids[: first + 1] and ended.text == str(list(plain.ids[:first]))
    stopped = Reference(model("llama"), text=lambda ids: " ".join(map(str, ids))).answer(
        FULL, p, max_new=6, stop=[f" {plain.ids[2]}"]
    )
    assert stopped.ids == plain.ids[:3] and stopped.text == f"{plain.ids[0]} {plain.ids[1]}"


def test_records_are_kept_up_to_a_size_and_answers_do_not_depend_on_it() -> None:
    p, how = PROMPTS["gaps"], METHODS["legolink-8"]
    small = Reference(model("llama"), record_bytes=1)
    one, again = (small.answer(how, p, max_new=3) for _ in range(2))
    assert one.ids == again.ids and len(small._records) == 1
    big = Reference(model("llama"))
    assert torch.equal(big.answer(how, p, max_new=3).logprobs, one.logprobs) and len(big._records) == 3


# --- how far from full recompute, inside ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen35", "llama"])
def test_probes(name: str) -> None:
    p = prompt(9, tokens(90, 1), tokens(70, 2), 8)
    everything = [method("hypic w=100"), METHODS["kv-zeroed"], method("hypic w=8"), method("hypic w=0")]
    exact, hidden_kv, eight, none = probe(reference(name), "item", p, everything, span=64)
    kinds = [mixer.kind for _, mixer in model(name).layers]
    assert exact.method == "hypic w=100" and exact.item == "item"
    for found in (exact, hidden_kv, eight, none):
        assert list(found.layers) == kinds and len(found.hidden) == len(found.kept) == len(kinds)
        assert len(found.distance) == 64
    assert max(exact.hidden + exact.kept + exact.distance) < EXACT
    assert all(e > 0.5 for e, kind in zip(hidden_kv.kept, kinds, strict=True) if kind == "attention")
    assert max(eight.kept) > 0.01 and max(eight.hidden) > 0.01
    # The reference's own attention sees other tokens of a document from its own place on: by hand, for one layer and place.
    at = len(kinds) - 1
    full, linked = (reference(name).head(m, p).states[at] for m in (FULL, method("hypic w=0")))
    assert kinds[at] == "attention"
    away = [(linked.v[s] - full.v[s]).norm() / full.v[s].norm() for s in (9 + 20, 99 + 20)]
    one = probe(reference(name), "item", p, [method("hypic w=0")], span=64, only=[at])[0]
    assert one.distance[20] == pytest.approx(float(sum(away) / 2), rel=1e-4)
    kept = [torch.cat([s.k[9:169].flatten(1), s.v[9:169].flatten(1)], -1) for s in (linked, full)]
    assert none.kept[at] == pytest.approx(float((kept[0] - kept[1]).norm() / kept[1].norm()), rel=1e-4)
