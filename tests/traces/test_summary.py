"""What caches could save at best, against counting token by token."""

from __future__ import annotations

import msgspec
import pytest

from hypic.traces.generate import generate
from hypic.traces.prompts import PromptMaker
from hypic.traces.spec import read_spec
from hypic.traces.summary import Capacity, summarise
from tests.traces.helpers import request
from tests.traces.test_generate import TINY, TRACES


def test_by_hand() -> None:
    trace = [
        request(("(s)", 10), ("a", 100), ("b", 80), rest=10),
        request(("(s)", 10), ("b", 80), ("a", 100), rest=10),
        request(("(s)", 10), ("a", 100), ("c", 60), rest=30, at=2000.0),
    ]
    found = summarise(trace)
    assert found.prefix == pytest.approx((0 + 10 + 110) / 600)
    assert found.pic == pytest.approx((0 + 190 + 110) / 600), "c is below 64 tokens and new"
    assert (found.segments_seen, found.distinct, found.distinct_tokens) == (3 / 5, 2, 180)
    assert (found.seconds, found.qps, found.input.mean, found.input.max) == (2.0, 1.0, 200, 200)
    later = summarise(trace, warmup=2)
    assert later.requests == 1 and later.prefix == later.pic == 110 / 200


def test_a_segment_twice_in_a_prompt_and_other_tenants_save_nothing() -> None:
    twice = summarise([request(("a", 100), ("b", 100), ("a", 100), rest=0)])
    assert twice.pic == 0
    apart = summarise([request(("a", 100), tenant="x"), request(("a", 100), tenant="y")])
    assert apart.pic == apart.prefix == 0


def test_one_token_is_always_computed() -> None:
    found = summarise([request(("a", 100), rest=0), request(("a", 100), rest=0)])
    assert found.pic == found.prefix == 99 / 200


def test_a_limited_cache_drops_what_was_not_used_for_longest() -> None:
    order = "abacab"  # room for two: a, b | a is used | c drops b | a is there | b is not
    trace = [request((f"(new{i})", 1), (name, 100), rest=0) for i, name in enumerate(order)]
    found = summarise(trace, capacity=Capacity(205, per_segment=2))
    assert found.segments_seen == 3 / 6 and found.segments_kept == 2 / 6
    assert found.pic == 300 / 606 and found.pic_capacity == 200 / 606
    none = summarise(trace, capacity=Capacity(90))
    assert none.pic_capacity == none.prefix == 0


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("name", ["tiny", "rag-appending"])
def test_against_token_ids(name: str) -> None:
    """The longest common prefix with any earlier prompt, and tokens of segments that an earlier prompt had."""
    spec = msgspec.structs.replace(read_spec(TRACES / f"{name}.toml"), requests=60)
    requests = list(generate(spec))
    maker = PromptMaker(1 << 30)
    earlier: list[list[int]] = []
    seen: set[tuple[int, ...]] = set()
    prefix = pic = total = 0
    for number, r in enumerate(requests):
        ids, bounds, _ = maker.make(r, number)
        assert len(ids) == r.input_length
        common = max((_shared(ids, e) for e in earlier), default=0)
        saved = set(range(common))
        for s, e in bounds:
            if tuple(ids[s:e]) in seen:
                saved |= set(range(s, e))
        seen |= {tuple(ids[s:e]) for s, e in bounds}
        earlier.append(ids)
        prefix, pic, total = prefix + min(common, len(ids) - 1), pic + min(len(saved), len(ids) - 1), total + len(ids)
    found = summarise(requests)
    assert found.prefix == pytest.approx(prefix / total) and found.pic == pytest.approx(pic / total)


def test_a_header_ends_the_prefix_cache_and_not_ours() -> None:
    without = summarise(generate(msgspec.structs.replace(TINY, prompt=msgspec.structs.replace(TINY.prompt, header=0))))
    assert summarise(generate(TINY)).prefix == 0 < without.prefix
    assert summarise(generate(TINY)).pic > 0.8


def test_nothing_behind_the_warm_up() -> None:
    with pytest.raises(ValueError, match=r"1 requests, and the warm-up alone takes 3 \(--warmup\)"):
        summarise([request(("a", 100))], warmup=3)
    with pytest.raises(ValueError, match="0 requests"):
        summarise([])


def test_the_table_of_the_readme_is_what_the_spec_gives() -> None:
    (row,) = [r for r in (TRACES / "README.md").read_text().splitlines() if r.startswith("| `rag-production`")]
    limit = Capacity(24 << 30, per_segment=60 << 20, per_token=20 << 10)
    found = summarise(generate(read_spec(TRACES / "rag-production.toml")), warmup=1000, capacity=limit)
    shares = [f"{100 * s:.0f}%" for s in (found.prefix, found.pic, found.pic_capacity or 0)]
    assert [c.strip() for c in row.split("|")[2:6]] == [f"{found.input.mean:,.0f}", *shares]
