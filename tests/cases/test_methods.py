"""Caching methods: a request picks one of the server's, and answer, artifacts and radix entries are those of that method."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hypic.check.judge import Judge
from hypic.check.layouts import document_pool, random_layout
from hypic.check.session import Prompt, distance
from tests.cases.conftest import METHODS
from tests.cases.driving import TINY_VOCAB, Driver, Writer, assert_close, assert_equals_oracle

LENGTHS = (65, 80, 100, 130, 200)


@pytest.fixture
def methods(model: str) -> list[str]:
    return METHODS[model].split(",")


def test_random_layouts_of_all_methods_at_once_equal_the_oracle(
    engine: Driver, judge: Judge, methods: list[str], request: pytest.FixtureRequest
) -> None:
    """P4, with segments compiled, hit and waited for, and batches that hold several methods."""
    rng = random.Random(request.node.nodeid)
    pool = document_pool(rng, TINY_VOCAB.stop, lengths=LENGTHS)
    linked = dict.fromkeys(methods, 0)
    for _ in range(6):
        prompts = []
        for i in range(5):
            layout = random_layout(rng, TINY_VOCAB.stop, max_tokens=700, pool=pool)
            prompts.append(Prompt(layout.ids, layout.cached, 3, method=methods[i % len(methods)]))
        for prompt, answer in zip(prompts, engine.ask_together(prompts), strict=True):
            assert answer.linked == tuple(s for s in prompt.segments if s[1] < len(prompt.ids))
            assert_equals_oracle(judge, engine, prompt, answer)
            linked[prompt.method] += len(answer.linked)
    assert min(linked.values()) > 3, linked


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5, 300])
def test_a_segment_anywhere(engine: Driver, judge: Judge, methods: list[str], write: Writer, start: int) -> None:
    """Also where LegoLink-0 moves it to the left, since it stands further on behind its dummies than in the prompt."""
    document = write.document(90)
    for method in methods:
        for question in (9, 1):
            prompt = write.prompt(start, document, question)._replace(method=method)
            answer = engine.ask(prompt)
            assert answer.linked == tuple(prompt.segments)
            assert_equals_oracle(judge, engine, prompt, answer)
            assert answer.report.method == method
            w = engine.method(method).seam_window
            assert answer.report.seam_window == w
            known = {"compiled": 0, "hit_device": 90 - w, "hit_radix": 90}  # the last where a prefix is the same
            assert answer.cached_tokens == known[answer.outcomes[0]]
            assert (answer.outcomes == ["compiled"]) == (question == 9)


def test_a_prompt_of_segments_alone(engine: Driver, judge: Judge, methods: list[str], write: Writer) -> None:
    """With LegoLink-0, one token is computed."""
    a, b = write.documents(2, 70)
    for method in methods:
        prompt = write.prompt(a, b, a, 1)._replace(method=method)
        cold, warm = (engine.ask(prompt._replace(tenant=t)) for t in ("cold", "cold"))
        assert_equals_oracle(judge, engine, prompt, cold)
        assert_close(cold, warm)
        assert cold.report.recomputed == 1 + 3 * engine.method(method).seam_window


def test_methods_share_neither_artifacts_nor_linked_prefixes(engine: Driver, methods: list[str], write: Writer) -> None:
    document, head = write.document(100), write.tokens(5)
    answers = []
    for method in methods:
        prompt = write.prompt(head, document, 30)._replace(method=method, ids=[*head, *document.ids, *range(20, 50)])
        first = engine.ask(prompt)
        assert first.outcomes == ["compiled"] and first.report.reused_radix == 0
        longer = prompt._replace(ids=[*prompt.ids, *first.ids, *range(60, 70)])
        assert engine.ask(longer).outcomes == ["hit_radix"]
        answers.append(first)
    unnamed = engine.ask(write.prompt(3, document, 4))
    assert unnamed.outcomes == ["hit_device"] and unnamed.report.method == methods[0]
    for i, one in enumerate(answers):
        for other in answers[i + 1 :]:
            assert distance(one, other) > 1e-3, "another method is another answer"


def test_a_named_segment_is_compiled_for_its_method(engine: Driver, methods: list[str], write: Writer) -> None:
    document = write.document(100)
    views = [engine.run(engine.register(document, method=method))[0] for method in methods]
    assert len({v.record.id for v in views}) == len(methods) and {v.look.state for v in views} == {"ready"}
    for method in methods:
        answer = engine.ask(write.prompt(3, document, 4)._replace(method=method))
        assert answer.outcomes == ["hit_device"]
    assert [v.look.hits for v in engine.run(engine.named.views([v.record for v in views]))] == [1] * len(methods)
    for view in views:
        engine.run(engine.named.delete("", view.record.id))


def test_a_method_that_the_server_has_not(engine: Driver, write: Writer) -> None:
    with pytest.raises(ValueError, match=r"hypic.method 'seam-7': this server has seam, .*--hypic-methods"):
        engine.generate(input_ids=write.tokens(9), method="seam-7")


def test_the_longest_segment_fits_behind_its_dummies(driver_for: Callable[..., Driver], write: Writer) -> None:
    """Of a prompt that SGLang just takes, and beside which nothing fits into the KV pool."""
    small = driver_for("llama", methods="legolink-0", flags={"max_total_tokens": 600})
    longest = small.manager.max_req_input_len - 1
    assert longest < 600
    for tokens in (longest + 1, longest):
        prompt = write.prompt(write.document(tokens - 1), 1, new_tokens=1)
        if tokens > longest:
            with pytest.raises(ValueError, match="exceeds the maximum allowed length"):
                small.ask(prompt)
        else:
            assert small.ask(prompt).outcomes == ["compiled"]
