"""Public traces: small files with their schemas."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypic.traces.format import TraceError, TraceRequest
from hypic.traces.readers import TraceWarning, kind_of, read
from hypic.traces.summary import summarise

MOONCAKE = """\
{"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 27482, "input_length": 1300, "output_length": 9, "hash_ids": [46, 47, 49], "type": "chat"}
{"timestamp": 30535, "input_length": 1024, "output_length": 26, "hash_ids": [46, 50]}
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURST = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,API log
118.5,GPT-4,417,276,693,Conversation log
"""


def file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    path = file(tmp_path, MOONCAKE)
    assert kind_of(path) == "mooncake"
    with pytest.warns(TraceWarning, match="no more than a prefix cache"):
        found = list(read(path))
    assert [r.timestamp for r in found] == [0, 0, 3053]
    assert [s.len for s in found[0].segments] == [512, 512, 276] and [s.len for s in found[2].segments] == [512, 512]
    ids = [[s.id for s in r.segments] for r in found]
    assert ids[0][:2] == ids[1][:2] and ids[0][2] != ids[1][2] and ids[2][0] == ids[0][0] and ids[2][1] != ids[0][1]
    summary = summarise(found)
    assert summary.prefix == summary.pic == (1024 + 512) / 3624


def test_mooncake_blocks_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = file(tmp_path, MOONCAKE.replace("[46, 50]", "[46, 50, 51]"))
    with pytest.warns(TraceWarning), pytest.raises(TraceError, match=r"trace:3: 3 hash_ids for 1024 tokens"):
        list(read(path))


@pytest.mark.parametrize(("text", "gap"), [(AZURE_2023, 4314.579), (AZURE_2024, 7.405)], ids=["2023", "2024"])
def test_azure(tmp_path: Path, text: str, gap: float) -> None:
    path = file(tmp_path, text)
    assert kind_of(path) == "azure"
    first, second = read(path)
    assert first.timestamp == 0 and second.timestamp == pytest.approx(gap, abs=1e-3)
    assert (first.input_length, first.output_length) == tuple(map(int, text.splitlines()[1].split(",")[1:]))
    assert first.segments == []


def test_burstgpt_leaves_out_and_counts_what_failed(tmp_path: Path) -> None:
    path = file(tmp_path, BURST)
    assert kind_of(path) == "burstgpt"
    with pytest.warns(TraceWarning, match="1 requests without an answer"):
        first, second = read(path)
    assert first == TraceRequest(0.0, 472, 18, meta={"model": "ChatGPT", "log_type": "Conversation log"})
    assert (second.timestamp, second.input_length, second.output_length) == (113500, 417, 276)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (AZURE_2023.replace("GeneratedTokens", "Generated"), "auto", "trace:1: neither"),
        (AZURE_2023.replace("GeneratedTokens", "Generated"), "azure", "trace:1: no column 'GeneratedTokens'"),
        (AZURE_2023.replace(",396,", ",many,"), "auto", "trace:3: .*many"),
        (AZURE_2023.replace(",396,109", ",396"), "auto", "trace:3: "),
        (AZURE_2023.replace(":50.9", ":40.9"), "auto", "trace:3: .*sort"),
        (BURST.replace("Log Type", "Type"), "burstgpt", "trace:1: no column 'Log Type'"),
        (BURST.replace("118.5", "4"), "auto", "trace:4: .*sort"),
        ("", "auto", "trace:1: neither"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, kind: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(read(file(tmp_path, text), kind))


def test_our_own_traces_are_known_by_their_segments(tmp_path: Path) -> None:
    line = (
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1], "segments": [{"id": 1, "len": 9}]}\n'
    )
    assert kind_of(file(tmp_path, line)) == "hypic"
    assert kind_of(file(tmp_path, '{"timestamp": 0, "input_length": 9, "output_length": 1}\n')) == "hypic"
