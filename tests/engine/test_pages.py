"""Links on pages of 16 tokens, through SGLang's Triton attention backend, its kernels run by Triton's interpreter.

All other tests have pages of one token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hypic.check.judge import EXACT, Judge
from hypic.check.session import Answer, Prompt, Session, distance
from hypic.config import HypicConfig
from tests.platform.test_engine_matches_hf import hf_greedy, prompt

PAGE = 16
REQUESTS = 2
"""Fewer than a link has runs: the backend sizes its index buffers by this."""

FLAGS: dict[str, Any] = {
    "attention_backend": "triton",
    "max_running_requests": REQUESTS,
    "max_total_tokens": 1024,
    "chunked_prefill_size": 64,
    "spawn": True,  # TRITON_INTERPRET is read at import
    "env": {"TRITON_INTERPRET": "1"},
}
CONFIG = HypicConfig(seam_window=4, min_segment=8, attention="expanded", start_check=False)


@pytest.fixture(scope="module")
def session(tiny_model: Callable[[str], Path]) -> Iterator[Session]:
    with Session(tiny_model("qwen3next"), CONFIG, page_size=PAGE, **FLAGS) as session:
        assert session.settings["attention_backend"] == "triton"
        assert session.settings["page_size"] == PAGE
        yield session


@pytest.fixture(scope="module")
def judge(tiny_model: Callable[[str], Path]) -> Judge:
    return Judge("qwen3next", str(tiny_model("qwen3next")), 0)


def tokens(*lengths: int) -> Iterator[list[int]]:
    rng = random.Random(5)
    return ([rng.randrange(10, 1500) for _ in range(n)] for n in lengths)


def ask(session: Session, judge: Judge, prompt: Prompt) -> Answer:
    """The answer, which is what the oracle gives."""
    answer = session.ask(prompt)
    truth, linked = judge.link(session, prompt, answer.ids)
    assert linked == answer.linked and distance(answer, truth) <= EXACT
    return answer


def test_plain_prompts_are_continued_as_by_transformers(session: Session, tiny_model: Callable[[str], Path]) -> None:
    """Both in one batch, one of them in two chunks; the platform's tests compare all other backends so."""
    prompts = [prompt(length) for length in (5, 70)]
    expected = hf_greedy(tiny_model("qwen3next"), prompts)
    answers = session.ask_together([Prompt(ids, new_tokens=4) for ids in prompts])
    assert [answer.ids for answer in answers] == [ids[:4] for ids in expected]


def test_a_link_equals_the_oracle_compiled_and_hit(session: Session, judge: Judge) -> None:
    a, b, head, gap, query = tokens(21, 16, 3, 1, 6)
    for ids, segments, outcome in (
        (head + a + gap + b + query, [(3, 24), (25, 41)], "compiled"),
        (b + a + query[:2], [(0, 16), (16, 37)], "hit_device"),
    ):
        assert len(segments) + 1 > REQUESTS
        assert ask(session, judge, Prompt(ids, segments, new_tokens=2)).outcomes == [outcome] * 2
    session.audit()


def test_a_state_kept_where_a_seam_ends_does_not_hold_the_artifact(session: Session, judge: Judge) -> None:
    """The last page boundary within a run is the end of the seam, where the next prompt then goes on."""
    head, document, *queries = tokens(12, 30, 5, 30)
    for query, reused in zip(queries, (0, 16), strict=True):
        answer = ask(session, judge, Prompt(head + document + query, [(12, 42)], new_tokens=2, tenant="kept"))
        assert answer.report.reused_radix == reused
    session.audit()
