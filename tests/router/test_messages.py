"""The wire: every message survives it, and whatever is not a message is dropped under a name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.router import messages as m

KEY = bytes(range(m.KEY_BYTES))
ANY = m.ToRouter | m.ToWorker | m.ToSource | m.ToSink
EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(worker="w0", epoch=b"e", identity=b"i", data="ipc:///x", http="http://x", capacity=9, free=8),
    m.Heartbeat(seq=1, queued_tokens=2, running=3, free=4, tokens_per_s=1.5),
    m.Stored(seq=1, keys=(KEY, KEY[::-1]), nbytes=(5, 6)),
    m.Evicted(seq=2, keys=(KEY,)),
    m.Compiled(flight=3, key=KEY, ok=False, reason="arena_full"),
    m.Expecting(request="r1", held=(KEY,), awaited=(), refused=(KEY,)),
    m.Arrived(request="r1", key=KEY, ok=True, seconds=0.25),
    m.Bye(),
    m.Welcome(router=b"r", heartbeat=0.5, dead_after=2.0),
    m.Refused(reason="another model"),
    m.Resync(),
    m.Compile(flight=1, request="r1", key=KEY, tenant="t", adapter="", tokens=bytes(800), deadline=3.0),
    m.Expect(request="r1", segments=(m.Wanted(KEY, "t", "", bytes(16), "w0", "ipc:///x", True),), deadline=3.0),
    m.Reroute(request="r1", key=KEY, source="w1", address=""),
    m.Cancel(request="r1"),
    m.Get(transfer=1, key=KEY, nbytes=1 << 20, chunk=4096, wanted=(0, 7, 2**32 - 1)),
    m.Chunk(transfer=1, index=7, crc=2**32 - 1),
    m.Gone(transfer=1, reason="evicted"),
    m.Pending(transfer=1),
    m.Locate(transfer=5, key=KEY, nbytes=9),
    m.Located(transfer=5, window=b"w", offset=256, stamp=1),
    m.Confirm(transfer=6, key=KEY, stamp=1),
    m.Confirmed(transfer=6, ok=True),
    m.Stop(transfer=1),
)


def reason_of(frame: bytes, kinds: Any = ANY) -> str:
    with pytest.raises(m.Rejected) as e:
        m.decode(frame, kinds)
    assert e.value.reason in m.REJECTIONS
    return e.value.reason


def test_every_kind_has_an_example_and_survives_the_wire() -> None:
    assert {type(x) for x in EXAMPLES} == set(m.KINDS.values()) == set(get_args(ANY))
    for message in EXAMPLES:
        assert m.decode(m.encode(message), ANY) == message
        assert m.decode(memoryview(bytearray(m.encode(message))), ANY) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: type(x).__name__)
def test_what_is_dropped_and_under_which_name(message: m.Message) -> None:
    frame = m.encode(message)
    assert reason_of(frame + b"\0") == "trailing"
    assert reason_of(frame[:3] + bytes([m.PROTOCOL_VERSION + 1]) + frame[4:]) == "version"
    assert reason_of(b"X" + frame[1:]) == "garbage"
    assert reason_of(frame[:5] + b"\x7f" + frame[6:]) == "unknown_kind"
    assert reason_of(frame[:4] + bytes([frame[4] + 1]) + frame[5:] + b"\0") == "invalid", "a field too many"
    assert reason_of(frame + bytes(message.LIMIT)) == "oversized"
    other = m.ToWorker if type(message) in get_args(m.ToRouter) else m.ToRouter
    assert reason_of(frame, other) == "unexpected"
    for n in range(len(frame)):
        assert reason_of(frame[:n]) in ("garbage", "invalid")


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (m.Get(transfer=1, key=KEY, nbytes=2**60, chunk=4096, wanted=(0,)), "a claim of 10 GB and more"),
        (m.Get(transfer=1, key=KEY, nbytes=1, chunk=1, wanted=(0,)), "chunks of a byte"),
        (m.Get(transfer=1, key=KEY, nbytes=1, chunk=4096, wanted=tuple(range(65))), "more credit than there is"),
        (m.Get(transfer=1, key=KEY, nbytes=1, chunk=4096, wanted=()), "nothing"),
        (m.Get(transfer=1, key=b"short", nbytes=1, chunk=4096, wanted=(0,)), "a key of another length"),
        (m.Heartbeat(seq=-1, queued_tokens=0, running=0, free=0), "a negative count"),
        (m.Heartbeat(seq=1, queued_tokens=0, running=0, free=0, tokens_per_s=float("nan")), "not a number"),
        (m.Arrived(request="../../etc", key=KEY, ok=True), "a name that is a path"),
        (m.Hello(worker="w\n0", epoch=b"e", identity=b"i", data="", http="", capacity=0, free=0), "a line break"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_values_out_of_range_are_invalid(frame: m.Message, why: str) -> None:
    assert reason_of(m.encode(frame)) == "invalid", why


def test_fields_that_must_agree() -> None:
    def frame(kind: int, *fields: object) -> bytes:
        return m.MAGIC + bytes([m.PROTOCOL_VERSION]) + msgspec.msgpack.encode([kind, *fields])

    assert reason_of(frame(3, 1, [KEY, KEY], [5])) == "invalid"
    assert reason_of(frame(19, 1, "r", KEY, "", "", bytes(9), 1.0)) == "invalid", "half a token"
    assert reason_of(frame(3, 1.0, [KEY], [5])) == "invalid", "a float is not a count"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_bytes_never_raise_anything_but_rejected(raw: bytes) -> None:
    inbox = m.Inbox(ANY, "test")
    for frame in (raw, m.MAGIC + raw, m.MAGIC + b"\x01" + raw):
        assert inbox.read(frame) is None or m.decode(frame, ANY)
    assert set(inbox.rejected) <= set(m.REJECTIONS) and inbox.rejected.total() >= 1


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=300, deadline=None)
def test_flipped_and_spliced_bytes_are_a_message_or_dropped(message: m.Message, data: st.DataObject) -> None:
    frame = bytearray(m.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not frame:
            break
    try:
        read = m.decode(bytes(frame), ANY)
    except m.Rejected:
        return
    assert m.decode(m.encode(read), ANY) == read


def test_depth_and_claimed_lengths() -> None:
    head = m.MAGIC + bytes([m.PROTOCOL_VERSION])
    assert reason_of(head + b"\x91" * 4000) == "unknown_kind"
    assert reason_of(head + b"\x97\x07\x91" + b"\x91" * 900) in ("garbage", "invalid")
    assert reason_of(head + b"\x94\x03\x01\xdd\xff\xff\xff\xff") == "invalid", "an array of 4 G entries in 3 bytes"
    assert reason_of(head + b"\x92\x11\xdb\xff\xff\xff\xff") == "garbage", "a string of 4 GB"
    assert reason_of(head + b"\x92\x11\xa2\xff\xfe") in ("garbage", "invalid"), "not UTF-8"


def test_the_log_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the call: servers that other tests started in this process set up logging as they like."""
    lines: list[str] = []
    monkeypatch.setattr(m.logger, "warning", lambda text, *args: lines.append(text % args))
    inbox = m.Inbox(ANY, "test")
    for _ in range(1000):
        inbox.read(b"garbage")
    assert inbox.rejected == {"garbage": 1000}
    assert len(lines) == 10 and "test: dropped a frame" in lines[0]


def test_a_message_that_nobody_would_read_is_not_sent() -> None:
    with pytest.raises(ValueError, match="limit"):
        m.encode(m.Compile(flight=1, request="r", key=KEY, tenant="", adapter="", tokens=bytes(16 << 20), deadline=1))


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "PROTOCOL.md").read_text()
    begin, end = "<!-- python -m hypic.router.messages -->\n", "\n<!-- end -->"
    assert page.split(begin)[1].split(end)[0] == m.tables()
