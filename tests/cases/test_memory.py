"""Rows 8, 11, 12 and 27 of CASES: an arena of eight artifacts and KV for a few requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hypic.check.judge import EXACT, Judge
from hypic.check.session import Answer, Prompt, distance
from hypic.check.soak import stretches
from tests.cases.driving import PATIENCE, Driver, Writer, assert_equals_oracle, reasons

LENGTH = 100
"""Tokens of a document; its artifact takes about 205 kB."""
FITTING = 8
TIGHT = {"chunked_prefill_size": 128, "max_total_tokens": 1800, "schedule_conservativeness": 0.05}
GROWTH = 160
"""New tokens with which five prompts of two documents outgrow the KV cache, wherever eight of them fit at their start."""
FORCED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


@pytest.fixture
def tight(driver_for: Callable[..., Driver]) -> Driver:
    engine = driver_for("qwen35", flags=TIGHT, memory=FITTING * 210_000)
    engine.flush()
    return engine


@pytest.fixture
def forget(tight: Driver) -> Iterator[Callable[[list[Any]], None]]:
    """Have named segments deleted at the end of the test."""
    views: list[Any] = []
    yield views.extend
    for view in views:
        tight.run(tight.named.delete(view.record.tenant, view.record.id))


@pytest.fixture
def judge(judge_for: Callable[[str], Judge]) -> Judge:
    return judge_for("qwen35")


def test_12_a_flood_of_one_off_documents_leaves_the_popular_ones(tight: Driver, write: Writer) -> None:
    popular = write.documents(3, LENGTH)
    for _ in range(2):
        tight.ask(write.prompt(3, *popular, 5, new_tokens=1))
    flood = write.documents(200, LENGTH)
    for i in range(0, len(flood), 4):
        one_off = tight.ask(write.prompt(*flood[i : i + 4], 5, new_tokens=1))
        assert one_off.outcomes == ["compiled"] * 4
        if i % 20 == 0:
            asked = tight.ask(write.prompt(2, *popular, 6, new_tokens=1))
            assert asked.outcomes == ["hit_device"] * 3
    assert tight.ask(write.prompt(2, *popular, 6, new_tokens=1)).outcomes == ["hit_device"] * 3
    assert len(tight.dump()) <= FITTING
    assert tight.ask(write.prompt(flood[0], 5, new_tokens=1)).outcomes == ["compiled"]


def test_12_what_became_popular_later_takes_the_place_of_what_was(tight: Driver, write: Writer) -> None:
    old, new = write.documents(6, LENGTH), write.documents(6, LENGTH)
    for documents in (old, new):
        for _ in range(3):
            for document in documents:
                tight.ask(write.prompt(document, 5, new_tokens=1))
    assert tight.ask(write.prompt(*new, 5, new_tokens=1)).outcomes == ["hit_device"] * 6


def test_27_requests_that_each_need_more_than_half_of_the_arena_take_turns(tight: Driver, write: Writer) -> None:
    half = FITTING // 2 + 1
    prompts = [write.prompt(2, *write.documents(half, LENGTH), 4) for _ in range(2)]
    shared = write.documents(FITTING + 4, LENGTH)
    prompts += [write.prompt(i, *shared[i : i + half], 4) for i in range(1, 8, 2)]
    prompts.append(write.prompt(9))
    answers = tight.ask_together(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.linked) == len(prompt.segments), reasons(answer)
        assert len(answer.ids) == prompt.new_tokens
    assert answers[0].outcomes == answers[1].outcomes == ["compiled"] * half


def test_27_a_request_larger_than_the_arena_is_served_with_what_fits(
    tight: Driver, judge: Judge, write: Writer
) -> None:
    documents = write.documents(FITTING + 4, LENGTH)
    prompt = write.prompt(3, *documents, 8)
    answer = tight.ask(prompt)
    fitting = answer.outcomes.count("compiled")
    assert FITTING - 1 <= fitting <= FITTING + 1
    assert answer.outcomes == ["compiled"] * fitting + ["declined"] * (len(documents) - fitting)
    assert set(reasons(answer)) == {None, "arena_full"}
    assert_equals_oracle(judge, tight, prompt, answer)


def test_08_a_segment_larger_than_the_arena_is_plain(tight: Driver, judge: Judge, write: Writer) -> None:
    prompt = write.prompt(3, write.document(1700), 8)
    answer = tight.ask(prompt)
    assert answer.outcomes == ["declined"] and reasons(answer) == ["arena_full"]
    assert_equals_oracle(judge, tight, prompt, answer)


def test_27_a_request_whose_own_hits_leave_no_hole_large_enough_does_not_wait_for_itself(
    tight: Driver, write: Writer
) -> None:
    documents = write.documents(FITTING, LENGTH)
    for document in documents:
        tight.ask(write.prompt(document, 3, new_tokens=1))
    middle, large = documents[FITTING // 2], write.document(900)  # of six tenths of the arena
    answer = tight.ask(write.prompt(middle, 3, large, 3))
    assert answer.outcomes == ["compiled", "compiled"] and reasons(answer) == [None, None]
    assert tight.ask(write.prompt(large, 3)).outcomes == ["hit_device"]


def test_27_registrations_wait_for_memory_and_take_turns_with_requests(tight: Driver, write: Writer) -> None:
    """Each document is half of the arena; a registration that waits computes nothing, and neither blocks the other."""
    documents = write.documents(4, 600)
    prompts = [write.prompt(3, d, 4) for d in documents[2:]]

    async def scene() -> tuple[list[Any], list[Any], Answer, Answer]:
        registered = (tight.register(d) for d in documents[:2])
        return await asyncio.gather(*registered, *(tight.answer(p) for p in prompts))

    *views, one, other = tight.run(asyncio.wait_for(scene(), PATIENCE))
    assert one.outcomes == other.outcomes == ["compiled"]
    assert [view.record.reason for (view,) in views] == [None, None]


def test_27_pinned_artifacts_may_leave_no_hole_large_enough(
    tight: Driver, judge: Judge, write: Writer, forget: Callable[[list[Any]], None]
) -> None:
    """Every second place is pinned: a large segment fits by its size, and not between them. It is plain, and does not wait."""
    documents = write.documents(FITTING, LENGTH)
    views = tight.run(tight.register(*documents))
    pins = [v.record.id for v in views[1::2]]
    forget(views)
    for name in pins:
        assert tight.run(tight.named.pin("", name)).look.pinned
    large = write.document(400)
    prompt = write.prompt(3, large, 5, documents[1], 4)
    answer = tight.ask(prompt)
    assert answer.outcomes == ["declined", "hit_device"] and reasons(answer) == ["arena_full", None]
    assert_equals_oracle(judge, tight, prompt, answer)
    for name in pins:
        assert tight.run(tight.named.unpin("", name)).look.state == "ready"
    assert tight.ask(prompt._replace(tenant="other")).outcomes == ["compiled", "compiled"], "now it fits"


@pytest.mark.parametrize("cause", ["pressure", "forced"])
def test_11_a_retracted_request_resumes_with_the_same_tokens_and_counts(
    driver_for: Callable[..., Driver], write: Writer, cause: str
) -> None:
    env = FORCED if cause == "forced" else None
    engine = driver_for("qwen35", flags=TIGHT, memory=FITTING * 210_000, env=env)
    known, shared = write.document(LENGTH), write.document(90)
    engine.ask(write.prompt(2, known, 3))
    prompts = [write.prompt(5 + i, known, 3, shared, 20, new_tokens=GROWTH) for i in range(7)]
    prompts.append(write.prompt(150, new_tokens=80))
    answers = engine.ask_together(prompts)
    assert sum(a.retractions for a in answers[:-1]) > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = engine.ask(prompt._replace(tenant="alone"))
        assert alone.retractions == 0
        assert answer.ids == alone.ids
    assert [a.outcomes for a in answers[:-1]] == [["hit_device", "compiled"], *[["hit_device", "waited"]] * 6]
    assert [a.cached_tokens for a in answers] == [engine.interior(known)] * 7 + [0]
    assert [a.report.reused_artifacts for a in answers] == [engine.interior(known)] * 7 + [0]


def test_11_a_retracted_request_that_cannot_link_again_says_from_where_on(
    tight: Driver, judge: Judge, write: Writer
) -> None:
    """Two of three segments come from the radix tree, and the arena does not hold all three: once the tree has lost them to
    another request, one is plain. Both halves of the answer are exact, and the report tells them apart."""
    documents = write.documents(3, 480)
    turn = write.prompt(3, *documents[:2], 9, new_tokens=1)
    prompt = Prompt(
        [*turn.ids, *documents[2].ids, *write.tokens(7)],
        [*turn.segments, (len(turn.ids), len(turn.ids) + len(documents[2]))],
        new_tokens=200,
    )
    other = write.prompt(1650, new_tokens=1)

    async def scene() -> tuple[Answer, Answer]:
        began = asyncio.ensure_future(tight.answer(prompt))
        await tight.until(lambda load: load.num_running_reqs == 1 and load.num_waiting_reqs == 0, "running")
        waits = asyncio.ensure_future(tight.answer(other))  # there is no room for it beside the other
        await tight.until(lambda load: load.num_waiting_reqs == 1, "waiting")
        await tight.pause("retract")
        await tight.resume()
        return await began, await waits

    tight.ask(turn)
    answer, _ = tight.run(asyncio.wait_for(scene(), PATIENCE))
    assert answer.retractions == 1
    assert answer.outcomes == ["hit_radix", "hit_radix", "compiled"], reasons(answer)
    assert reasons(answer) == [None, None, "arena_full"]
    untils = [s.until for s in answer.report.spans if s.kind == "segment"]
    assert untils[:2] == [None, None] and untils[2] is not None and 0 < untils[2] < len(answer.ids)
    for asked, given in stretches(prompt, answer):
        truth, linked = judge.link(tight, asked, given.ids)
        assert linked == tuple(asked.segments)
        assert distance(given, truth) <= EXACT
