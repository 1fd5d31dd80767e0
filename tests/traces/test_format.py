"""The format: what is written is read back, and whatever is wrong is named with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hypic.traces.format import Span, TraceError, TraceRequest, read_native, write
from tests.traces.helpers import request

GOOD: dict[str, Any] = {"timestamp": 5, "input_length": 10, "output_length": 2, "segments": [{"id": "a", "len": 7}]}


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    spans = [Span("a", 3, token_ids=[1, 2, 3]), Span("b", 4, text="b b b b"), Span(7, 2, plain=True)]
    requests = [
        request(*spans, tenant="t", conversation="c", turn=0, meta={"x": [1]}),
        TraceRequest(1.5, 600, 2, hash_ids=[0, 1]),
    ]
    assert write(requests, tmp_path / "t.jsonl") == 2
    assert list(read_native(tmp_path / "t.jsonl")) == requests


def test_a_file_is_read_line_by_line(tmp_path: Path) -> None:
    found = read_native(lines(tmp_path / "t.jsonl", GOOD, "", "broken"))
    assert next(found).input_length == 10
    with pytest.raises(TraceError, match=r"t\.jsonl:3: "):
        next(found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"segmnets": []}, "segmnets"),
        ({"input_length": 6}, "7 tokens, more than input_length 6"),
        ({"input_length": "10"}, "input_length"),
        ({"output_length": 0}, "output_length 0"),
        ({"timestamp": -1}, "timestamp -1"),
        ({"segments": [{"id": "a", "len": 0}]}, "len 0"),
        ({"segments": [{"id": "a"}]}, "len"),
        ({"segments": [{"id": "a", "len": 2, "token_ids": [1]}]}, "1 token_ids, but len 2"),
        ({"segments": [{"id": "a", "len": 1, "token_ids": [-1]}]}, "negative"),
        ({"segments": [{"id": "a", "len": 1, "token_ids": [1], "text": "x"}]}, "give one"),
        ({"turn": 1}, "come together"),
        ({"turn": -1, "conversation": 1}, "counts from 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError) as e:
        list(read_native(lines(tmp_path / "t.jsonl", GOOD, GOOD | changes)))
    assert str(e.value).startswith(f"{tmp_path}/t.jsonl:2: ") and said in str(e.value)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (GOOD | {"timestamp": 4}, "sort the file by time"),
        (GOOD | {"segments": [{"id": "a", "len": 6}]}, "has 6 tokens, at .*:1 it had 7"),
        (GOOD | {"segments": [{"id": "a", "len": 7, "text": "other"}]}, "another content than at .*:1"),
    ],
)
def test_lines_that_contradict_each_other_are_named(tmp_path: Path, second: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(read_native(lines(tmp_path / "t.jsonl", GOOD, second)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(read_native(tmp_path / "none.jsonl"))
