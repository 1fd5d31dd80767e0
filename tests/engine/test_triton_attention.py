"""Links through SGLang's Triton attention backend, its kernels run by Triton's interpreter, on pages of 1 and 16 tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hypic.check.judge import EXACT, Judge
from hypic.check.session import Prompt, Session, distance
from hypic.config import HypicConfig

REQUESTS = 2
"""Fewer than a link has runs: the backend sizes its index buffers by this."""

FLAGS: dict[str, Any] = {
    "attention_backend": "triton",
    "max_running_requests": REQUESTS,
    "max_total_tokens": 1024,
    "spawn": True,  # TRITON_INTERPRET is read at import
    "env": {"TRITON_INTERPRET": "1"},
}
CONFIG = HypicConfig(seam_window=4, min_segment=8, attention="expanded")


@pytest.fixture(scope="module", params=[1, 16])
def session(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[Session]:
    with Session(tiny_model("qwen3next"), CONFIG, page_size=request.param, **FLAGS) as session:
        assert session.settings["attention_backend"] == "triton"
        assert session.settings["page_size"] == request.param
        yield session


def test_a_link_equals_the_oracle_compiled_and_hit(session: Session, tiny_model: Callable[[str], Path]) -> None:
    rng = random.Random(5)
    a, b, head, gap, query = ([rng.randrange(10, 1500) for _ in range(n)] for n in (21, 16, 3, 1, 6))
    judge = Judge("qwen3next", str(tiny_model("qwen3next")), 0)
    for ids, segments, outcome in (
        (head + a + gap + b + query, [(3, 24), (25, 41)], "compiled"),
        (b + a + query[:2], [(0, 16), (16, 37)], "hit_device"),
    ):
        prompt = Prompt(ids, segments, new_tokens=3)
        answer = session.ask(prompt)
        assert answer.outcomes == [outcome] * 2 and len(segments) + 1 > REQUESTS
        truth, linked = judge.link(session, prompt, answer.ids)
        assert linked == answer.linked and distance(answer, truth) <= EXACT
    session.audit()
