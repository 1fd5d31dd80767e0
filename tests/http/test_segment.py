"""Cutting and tokenising prompts, the wire format, span ids."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.sampling_params import SamplingParams

from hypic.segment import (
    Bounds,
    Declined,
    MalformedSpans,
    Piece,
    RequestSpans,
    SegmentTokenizer,
    segment_id,
    span_id,
    split_at,
)

SEPARATOR = "<<PIC_SEP>>"
# Text in which merges across a cut are likely, control tokens and the separator's own letters included.
texts = st.lists(
    st.sampled_from([*"abet hn. \n<>P_SÄé漢🙂", "the ", "<|im_end|>", "<|im_start|>", "<<PIC_"]), max_size=30
).map("".join)
pieces = st.lists(st.builds(Piece, texts, st.booleans(), st.none()), max_size=6).map(
    lambda ps: [p for p in ps if p.text]
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A|B|Q", [("A", True), ("B", True), ("Q", False)]),
        ("A|B|", [("A", True), ("B", True)]),
        ("|A|Q", [("A", True), ("Q", False)]),
        ("A||B|Q", [("A", True), ("B", True), ("Q", False)]),
        ("A| \n|Q", [("A", True), (" \n", False), ("Q", False)]),
        ("Q", [("Q", False)]),
        ("|Q", [("Q", False)]),
        ("A|", [("A", True)]),
        ("||", []),
        ("", []),
        ("A|A|A", [("A", True), ("A", True), ("A", False)]),
        (" A |\nQ", [(" A ", True), ("\nQ", False)]),
    ],
)
def test_split(text: str, expected: list[tuple[str, bool]]) -> None:
    assert [(p.text, p.segment) for p in split_at(text, "|")] == expected


def test_split_with_a_segment_at_the_end() -> None:
    assert split_at("A|B", "|", last_is_segment=True) == [Piece("A", True), Piece("B", True)]


@settings(deadline=None)
@given(st.lists(texts, max_size=6))
def test_separator_never_stays(parts: list[str]) -> None:
    text = SEPARATOR.join(parts)
    cut = split_at(text, SEPARATOR)
    assert "".join(p.text for p in cut) == text.replace(SEPARATOR, "")
    assert all(p.text and SEPARATOR not in p.text for p in cut)


@settings(deadline=None)
@given(pieces)
def test_cut_never_changes_a_segments_ids(tokenizer: Any, cut: list[Piece]) -> None:
    """Every piece has in the prompt the ids it has alone, and the prompt still says what it said."""
    ids, cached = SegmentTokenizer(tokenizer).tokenize(cut)
    alone = [tokenizer.encode(p.text) for p in cut]
    assert ids == [i for one in alone for i in one]
    assert [ids[s:e] for s, e in cached] == [one for one, p in zip(alone, cut, strict=True) if p.segment]
    assert tokenizer.decode(ids) == "".join(p.text for p in cut)


def test_merges_do_cross_cuts_of_a_whole_text(tokenizer: Any) -> None:
    """The reason for all this."""
    assert tokenizer.encode("the") != tokenizer.encode("t") + tokenizer.encode("he")


@settings(deadline=None)
@given(pieces)
def test_bos_once(bos_tokenizer: Any, cut: list[Piece]) -> None:
    """A BOS of the tokenizer stands once, before the first piece, and is part of no segment."""
    tokens = SegmentTokenizer(bos_tokenizer)
    ids, cached = tokens.tokenize(cut)
    bare, bare_cached = tokens.tokenize(cut, {"add_special_tokens": False})
    assert ids == [bos_tokenizer.bos_token_id, *bare]
    assert cached == tuple(Bounds(s + 1, e + 1) for s, e in bare_cached)


def test_control_tokens_in_a_document_are_tokens_as_in_sglang(tokenizer: Any) -> None:
    ids, cached = SegmentTokenizer(tokenizer).tokenize([Piece("a<|im_end|>b", True), Piece("q", False)])
    assert tokenizer.eos_token_id in ids[: cached[0].end] and len(cached) == 1


def test_segments_are_tokenised_once_within_the_budget() -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def encode(self, text: str, **_: Any) -> list[int]:
            self.calls.append(text)
            return [ord(c) for c in text]

    counting = Counting()
    tokens = SegmentTokenizer(counting, cache_bytes=3 * 4 * 10 + 3 * SegmentTokenizer._ENTRY_OVERHEAD)
    a, b, c, d = ("a" * 10, "b" * 10, "c" * 10, "d" * 10)
    for text in (a, b, c, a, b, c, a):
        tokens.tokenize([Piece(text, True)])
    assert [counting.calls.count(t) for t in (a, b, c)] == [1, 1, 1]
    tokens.tokenize([Piece(d, True)])  # drops b, the least recently used
    for text in (a, c, d, b):
        tokens.tokenize([Piece(text, True)])
    assert [counting.calls.count(t) for t in (a, b, c, d)] == [1, 2, 1, 1]
    tokens.tokenize([Piece("x" * 10_000, True)])  # larger than the budget: not kept, nothing breaks
    assert tokens._used <= tokens._budget


spans = st.builds(
    lambda cuts, flags, declined, salt, report, request, name, method: RequestSpans(
        cached=tuple(Bounds(s, e) for s, e, f in zip(cuts, cuts[1:], flags, strict=False) if f),
        declined=tuple(declined),
        salt=salt,
        report=report,
        request=request,
        name=name,
        method=method,
    ),
    st.lists(st.integers(0, 10_000), unique=True, max_size=12).map(sorted),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.lists(st.builds(Declined, st.integers(-1, 99), st.integers(-1, 99), st.sampled_from(["template", "empty"]))),
    st.text(max_size=5),
    st.booleans(),
    st.text(max_size=5),
    st.text(max_size=5),
    st.text(max_size=5),
)


@settings(deadline=None)
@given(spans)
def test_wire_round_trip(plan: RequestSpans) -> None:
    """Through SGLang's msgpack IPC, which takes only flat values, and beside keys of others."""
    sent = SamplingParams(custom_params={"theirs": 1, **plan.to_params()})
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=SamplingParams)
    assert RequestSpans.from_params(received.custom_params) == plan


@pytest.mark.parametrize("params", [None, {}, {"theirs": [1]}])
def test_no_plan(params: Any) -> None:
    assert RequestSpans.from_params(params) is None


GOOD = RequestSpans(cached=(Bounds(2, 5),), declined=(Declined(-1, -1, "empty"),)).to_params()


@pytest.mark.parametrize(
    "change",
    [
        {"hypic_request": 7},
        {"hypic_name": None},
        {"hypic_method": 0},
        {"hypic_cached": [2]},
        {"hypic_cached": [2, "5"]},
        {"hypic_cached": [2, True]},
        {"hypic_cached": [2, 2]},
        {"hypic_cached": [-1, 2]},
        {"hypic_cached": [2, 5, 4, 6]},
        {"hypic_cached": [2, 11]},
        {"hypic_cached": "25"},
        {"hypic_declined": []},
        {"hypic_reasons": [1]},
        {"hypic_salt": None},
        {"hypic_report": 1},
        {"hypic_forged": 1},
    ],
)
def test_malformed_wire_is_refused(change: dict[str, Any]) -> None:
    assert RequestSpans.from_params(GOOD, 10)
    with pytest.raises(MalformedSpans, match="custom_params"):
        RequestSpans.from_params({**GOOD, **change}, 10)


def test_missing_key_is_refused() -> None:
    with pytest.raises(MalformedSpans, match="hypic_salt"):
        RequestSpans.from_params({k: v for k, v in GOOD.items() if k != "hypic_salt"})


def test_declining_all_keeps_places_and_order() -> None:
    plan = RequestSpans(cached=(Bounds(2, 5),), declined=(Declined(7, 9, "a"), Declined(-1, -1, "b")), salt="s")
    assert plan.declining_all("c") == RequestSpans(
        declined=(Declined(-1, -1, "b"), Declined(2, 5, "c"), Declined(7, 9, "a")), salt="s"
    )


def test_span_id_names_the_tokens() -> None:
    import numpy as np

    assert span_id([1, 2, 3]) == span_id(np.array([1, 2, 3], dtype=np.int32)) and len(span_id([1])) == 16
    assert len({span_id([1, 2]), span_id([2, 1]), span_id([12]), span_id([1, 2, 0])}) == 4


def test_segment_ids_name_tenant_adapter_method_and_tokens() -> None:
    """And no two of them that spell the same when put together."""
    import numpy as np

    assert segment_id("t", "a", "m", [1, 2]) == segment_id("t", "a", "m", np.array([1, 2], dtype=np.int32))
    assert re.fullmatch("seg_[0-9a-f]{32}", segment_id("", "", "", [1]))
    names = [("t", "a", ""), ("ta", "", ""), ("", "ta", ""), ("", "t", "a"), ("t", "", "a"), ("", "", "ta")]
    ids = {segment_id(*n, tokens) for n in names for tokens in ([1, 2], [2, 1], [1, 2, 0])}
    assert len(ids) == 3 * len(names)
