"""The table of methods, prompts, and what compares answers: no model."""

from __future__ import annotations

import pytest
import torch

from hypic.check import tiny_models
from hypic.eval.items import Item, Piece
from hypic.eval.methods import ALWAYS, METHODS, MethodError, choose, method
from hypic.eval.prompt import Codec, Prompt, PromptError, cut
from hypic.eval.tasks import PrefixCache, by_documents, kl_and_agreement, tasks_of


def test_the_table_has_what_the_papers_compare() -> None:
    names = set(METHODS)
    assert {"full", "prefix", "naive", "concat", "no-relocation", "additive", "decay-only", "last-segment"} < names
    assert {f"hypic w={w}" for w in (0, 1, 2, 4, 8, 16, 32, "5%", "15%")} < names
    assert {"legolink-0", "legolink-32", "cacheblend-15%", "cacheblend-5%", "cacheblend-1%"} < names
    assert all(m.name == name and m.about for name, m in METHODS.items())


def test_names_beyond_the_table() -> None:
    assert method("hypic w=12").w == 12 and method("hypic w=12").served and not method("hypic w=0").served
    assert method("hypic w=10%").window(101) == 11 and method("legolink-3").w == 3
    assert method("cacheblend-30%").blend == 0.3
    for odd in ("hypic", "hypic w=-1", "hypic w=", "legolink-", "cacheblend-0%", "cacheblend-101%", "FULL"):
        with pytest.raises(MethodError, match="there are full"):
            method(odd)


def test_methods_fit_models_and_engines() -> None:
    hybrid, attention = ({m.name for m in choose(None, hybrid=h)} for h in (True, False))
    assert hybrid | attention == set(METHODS)
    assert {"additive", "hypic w=8"} <= hybrid - attention and {"legolink-8", "cacheblend-1%"} <= attention - hybrid
    served = choose(None, hybrid=True, served=True)
    assert all(m.served for m in served) and len(served) > 5
    assert [m.name for m in choose(["hypic w=8", "full"], hybrid=True)] == [*ALWAYS, "hypic w=8"]
    with pytest.raises(MethodError, match="full attention alone; this one has linear"):
        choose(["legolink-8"], hybrid=True)
    with pytest.raises(MethodError, match="linear layers; this one has none"):
        choose(["additive"], hybrid=False)
    with pytest.raises(MethodError, match="use --reference"):
        choose(["additive"], hybrid=True, served=True)


def test_prompts_are_pieces_tokenised_one_by_one() -> None:
    codec = Codec(tiny_models.build("qwen35"))
    texts = ("Read this.", " A document about keys and values.", "", "x", " Which keys?")
    pieces = [Piece(t, i in (1, 2, 3)) for i, t in enumerate(texts)]
    prompt = codec.prompt(pieces)
    parts = [codec.tokenizer.encode(t, add_special_tokens=False) for t in texts]
    assert list(prompt.ids) == [i for part in parts for i in part]
    first, second = len(parts[0]), len(parts[0]) + len(parts[1])
    assert prompt.segments == ((first, second), (second, second + len(parts[3])))
    assert codec.prompt(pieces, min_segment=2).segments == ((first, second),)
    assert codec.prompt([Piece((1, 2)), Piece((3, 4), True)]) == Prompt((1, 2, 3, 4), ())
    assert codec.prompt([Piece((1, 2), True), Piece((3,))]).segments == ((0, 2),)
    with pytest.raises(PromptError, match="without a token"):
        codec.prompt([Piece(""), Piece(())])
    assert codec.ends == {codec.tokenizer.eos_token_id}
    assert codec.text(codec.tokenizer.encode("Which keys?")) == "Which keys?"


def test_answers_are_cut_at_the_first_stop() -> None:
    assert cut("one\ntwo###", ["###", "\n"]) == ("one", True)
    assert cut("one", ["\n"]) == cut("one", []) == ("one", False)


def test_kl_and_agreement() -> None:
    p, q = (torch.randn(5, 30, generator=torch.Generator().manual_seed(s)).log_softmax(-1) for s in (1, 2))
    q[0] = p[0]
    kl, agrees = kl_and_agreement(p, q)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=p), torch.distributions.Categorical(logits=q)
    )
    assert kl == pytest.approx(expected.tolist(), abs=1e-6) and kl[0] == pytest.approx(0, abs=1e-7)
    assert agrees[0] and list(agrees) == (p.argmax(-1) == q.argmax(-1)).tolist()
    p[1, 3] = -torch.inf
    assert all(k < 100 for k in kl_and_agreement(p.log_softmax(-1), q)[0])


def test_a_prefix_cache_reuses_up_to_the_first_difference() -> None:
    cache = PrefixCache()
    prompts = [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 9, 4, 5), (1, 2, 9), (7, 2, 3), (1, 2, 3, 4, 5, 6)]
    assert [cache.reused(Prompt(p)) for p in prompts] == [0, 3, 2, 2, 0, 4]


def test_neighbours_with_the_same_documents_are_a_group() -> None:
    def item(name: str, *documents: str) -> Item:
        pieces = (*(Piece(d, True) for d in documents), Piece(f"{name}?"))
        return Item(
            id=name,
            dataset="d",
            pieces=pieces,
            closed_book=(Piece("?"),),
            answers=(),
            metric="f1",
            max_new_tokens=1,
        )

    items = [item("a", "one", "two"), item("b", "one", "two"), item("c", "two", "one"), item("d"), item("e")]
    tasks = tasks_of(items, Codec(tiny_models.build("qwen35")))
    assert [[t.item.id for t in g] for g in by_documents(tasks)] == [["a", "b"], ["c"], ["d", "e"]]
    broken = Item(id="x", dataset="d", pieces=(), closed_book=(), answers=(), metric="f1", max_new_tokens=1)
    with pytest.raises(PromptError, match="item x of d"):
        tasks_of([broken], Codec(tiny_models.build("qwen35")))
