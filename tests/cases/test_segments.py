"""Rows 1, 2, 7-9, 13, 15, 30 and 31 of CASES: which segments are shared, and that it never changes an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hypic.check.judge import EXACT, Judge
from hypic.check.session import Prompt
from tests.cases.driving import PATIENCE, Document, Driver, Writer, assert_close, assert_equals_oracle, outcomes


def test_01_hit_miss_hit_uses_every_hit_and_stores_the_hole(engine: Driver, judge: Judge, write: Writer) -> None:
    a, hole, b = write.document(100), write.document(80), write.document(120)
    engine.ask(write.prompt(5, a, 3, b, 10))
    prompt = write.prompt(7, a, 2, hole, b, 12)
    answer = engine.ask(prompt)
    assert answer.outcomes == ["hit_device", "compiled", "hit_device"]
    assert answer.cached_tokens == engine.interior(a, b)
    assert answer.report.compiled == len(hole)
    assert_equals_oracle(judge, engine, prompt, answer)
    again = engine.ask(write.prompt(9, hole, a, 3, b, 12))
    assert again.outcomes == ["hit_device"] * 3
    assert again.cached_tokens == engine.interior(a, hole, b)


def test_02_a_different_cut_is_a_new_segment_and_leaves_the_old_one(engine: Driver, write: Writer) -> None:
    text = write.tokens(150)
    whole, head, tail = Document(text), Document(text[:-30]), Document(text[20:])
    engine.flush()
    engine.ask(write.prompt(5, whole, 10))
    before = engine.dump()
    for cut in (head, tail):
        answer = engine.ask(write.prompt(5, cut, 10))
        assert answer.outcomes == ["compiled"] and answer.cached_tokens == 0
    after = engine.dump()
    assert len(after) == 3
    for name, parts in before.items():
        assert all((after[name][part] == value).all() for part, value in parts.items())
    for document in (tail, whole, head):
        assert engine.ask(write.prompt(6, document, 10)).outcomes == ["hit_device"]


def test_07_a_segment_used_twice_in_a_prompt_is_one_artifact(engine: Driver, judge: Judge, write: Writer) -> None:
    twice, once = write.document(90), write.document(70)
    engine.flush()
    for expected in ("compiled", "hit_device"):
        prompt = write.prompt(4, twice, 2, once, twice, 11)
        answer = engine.ask(prompt)
        assert answer.outcomes == [expected] * 3
        hit = expected == "hit_device"
        assert answer.cached_tokens == (engine.interior(twice, once, twice) if hit else 0)
        assert answer.report.compiled == (0 if hit else len(twice) + len(once))
        assert_equals_oracle(judge, engine, prompt, answer)
        assert len(engine.dump()) == 2


@pytest.mark.parametrize(
    ("length", "outcome"),
    [(1, "too_short"), (3, "too_short"), (8, "too_short"), (63, "too_short"), (64, "compiled"), (65, "compiled")],
)
def test_08_segments_around_the_limits(engine: Driver, write: Writer, length: int, outcome: str) -> None:
    document, other = write.document(length), write.document(100)
    prompt = write.prompt(10, document, 5, other, 10)
    answer = engine.ask(prompt)
    assert answer.outcomes == [outcome, "compiled"]
    short = next(s for s in answer.report.spans if s.kind == "segment")
    interior = engine.interior(document) if outcome == "compiled" else 0
    assert (short.start, short.tokens, short.recomputed) == (10, length, length - interior)
    warm = engine.ask(write.prompt(11, document, 5, other, 10))
    assert warm.outcomes == ["hit_device" if interior else "too_short", "hit_device"]
    assert warm.cached_tokens == interior + engine.interior(other)


def test_08_a_segment_of_many_chunks(engine: Driver, judge: Judge, write: Writer) -> None:
    """A chunk of 2,048 ends inside it; (T, S) accumulate over its chunks."""
    long, short = write.document(3000), write.document(64)
    for expected in ("compiled", "hit_device"):
        prompt = write.prompt(3, long, short, 9)
        answer = engine.ask(prompt)
        assert answer.outcomes == [expected] * 2
        # Float32 rounds an angle of 3,000 radians by 1e-4.
        assert_equals_oracle(judge, engine, prompt, answer, bound=5 * EXACT)


def test_09_prompts_that_race_for_a_segment_share_one_compile(engine: Driver, judge: Judge, write: Writer) -> None:
    document = write.document(200)
    prompts = [write.prompt(3 + i, document, 8) for i in range(4)]
    answers = engine.ask_together(prompts)
    assert [a.outcomes for a in answers] == [["compiled"], *[["waited"]] * 3]
    assert [a.report.compiled for a in answers] == [len(document), 0, 0, 0], "counted once"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.cached_tokens == 0
        assert_equals_oracle(judge, engine, prompt, answer)


def test_13_cold_and_warm_answers_differ_by_noise_only(engine: Driver, write: Writer) -> None:
    documents = write.documents(6, 100)
    for i in range(8):
        chosen = [documents[(i + j) % 6] for j in range(3)]
        prompt = write.prompt(7, chosen[0], 2, chosen[1], chosen[2], 15, new_tokens=16)
        cold = engine.ask(prompt._replace(tenant=f"cold {i}"))
        assert cold.outcomes == ["compiled"] * 3 and cold.cached_tokens == 0
        engine.ask(write.prompt(2, *chosen, 2, tenant=f"warm {i}"))
        warm = engine.ask(prompt._replace(tenant=f"warm {i}"))
        assert warm.outcomes == ["hit_device"] * 3 and warm.cached_tokens == engine.interior(*chosen)
        assert_close(cold, warm)


def test_15_tenants_share_nothing_and_cannot_see_each_other_in_time(engine: Driver, write: Writer) -> None:
    document = write.document(120)
    head = write.tokens(20)
    prompt = write.prompt(head, document, 10, tenant="one")
    race = engine.ask_together([prompt, prompt._replace(tenant="two")])
    assert [a.outcomes for a in race] == [["compiled"], ["compiled"]]  # not "waited"
    longer = write.prompt(prompt.ids[:20], document, prompt.ids[140:], 10)
    stranger = engine.ask(longer._replace(tenant="three"))
    assert stranger.outcomes == ["compiled"]
    assert stranger.cached_tokens == stranger.report.reused_radix == 0
    known = engine.ask(longer._replace(tenant="one"))
    assert known.outcomes == ["hit_radix"] and known.cached_tokens == known.report.reused_radix == len(prompt.ids)
    for tenant in ("one", "two", "three"):
        shared = engine.ask(write.prompt(20, document, 10, tenant=tenant))
        assert shared.outcomes == ["hit_device"] and shared.cached_tokens == engine.interior(document)


def test_30_other_boundaries_over_the_same_tokens_share_no_linked_kv(
    engine: Driver, judge: Judge, write: Writer, model: str
) -> None:
    """The radix tree serves the same spans, and of others only what stands before the first difference."""
    head, text, query, more = write.tokens(40), write.tokens(300), write.tokens(10), write.tokens(7)
    engine.ask(write.prompt(head, Document(text), query))
    w = engine.config.seam_window
    for common, *parts in (
        (150, Document(text[:150]), Document(text[150:])),  # the interior's head is the same in both
        (w, text[:1], Document(text[1:])),
        (299, Document(text[:-1]), text[-1:]),
        (None, text),  # plain requests have a radix key of their own
    ):
        prompt = write.prompt(head, *parts, query, more)
        answer = engine.ask(prompt)
        reused = 0 if common is None or model == "qwen35" else len(head) + common  # hybrids keep states at ends only
        assert answer.report.reused_radix == answer.cached_tokens == reused
        assert_equals_oracle(judge, engine, prompt, answer)
    same = engine.ask(write.prompt(head, Document(text), query, more))
    assert same.report.reused_radix == len(head + text + query)


def test_30_tenants_whose_names_join_to_the_same_string(engine: Driver, write: Writer) -> None:
    """SGLang joins cache_salt and extra_key with nothing between."""
    head, document, query = write.tokens(30), write.document(100), write.tokens(10)
    first = write.prompt(head, document, query)
    second = write.prompt(head, document, query, 10)

    def ask(prompt: Prompt, salt: str, extra_key: str) -> dict[str, Any]:
        hypic = {"segments": [list(s) for s in prompt.segments], "report": True}
        chat = {"input_ids": prompt.ids, "hypic": hypic, "cache_salt": salt, "extra_key": extra_key, "max_tokens": 2}
        report: dict[str, Any] = engine.generate(messages=[], chat=chat)["meta_info"]["hypic"]
        return report

    ask(first, "a", "bc")
    other = ask(second, "ab", "c")
    assert other["reused_radix"] == other["reused_artifacts"] == 0 and outcomes(other) == ["compiled"]
    ask(first, "d", "ef")
    assert ask(second, "d", "ef")["reused_radix"] == len(first.ids)


@pytest.mark.parametrize("gap", [0, 1, 2, 3, 4])
def test_31_a_plain_span_shorter_than_the_conv_kernel(engine: Driver, judge: Judge, write: Writer, gap: int) -> None:
    a, b = write.document(80), write.document(65)
    for head in (0, gap):
        prompt = write.prompt(head, a, gap, b, gap, a, 1)
        assert_equals_oracle(judge, engine, prompt, engine.ask(prompt))


@pytest.mark.parametrize("moment", ["compiling", "linking", "decoding"])
def test_10_an_aborted_request_frees_everything_and_its_compile_stays_useful(
    engine: Driver, write: Writer, moment: str
) -> None:
    document = write.document(3000)
    after = 5000 if moment == "linking" else 12
    prompt = write.prompt(5, document, after)
    if moment != "compiling":
        engine.ask(write.prompt(2, document, 3))

    async def leave() -> None:
        began = asyncio.Event()
        await engine.until(lambda load: load.num_used_tokens == 0, "idle")
        task = asyncio.ensure_future(engine.follow(prompt, "leaves", began, new_tokens=2000))
        if moment == "compiling":
            await engine.until(lambda load: load.num_waiting_reqs == 1, "held")
        elif moment == "linking":
            await engine.until(
                lambda load: load.num_waiting_reqs == 0 and load.num_used_tokens >= len(document), "linking"
            )
        else:
            await began.wait()
        assert began.is_set() == (moment == "decoding")
        engine.abort("leaves")
        assert await task == "abort"

    engine.run(asyncio.wait_for(leave(), 2 * PATIENCE))
    engine.audit()
    assert engine.ask(write.prompt(6, document, 7)).outcomes == ["hit_device"]
