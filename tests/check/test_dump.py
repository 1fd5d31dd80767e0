"""A dump of two TP ranks holds both parts of every artifact, and notices that they do not hold the same ones."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from hypic.artifact.arena import Arena
from hypic.artifact.layout import ArtifactLayout, LinearShape
from hypic.artifact.store import ArtifactStore, Request
from hypic.check.session import Session, SessionError
from hypic.engine.audit import dump_artifacts
from hypic.segment import span_id

LAYOUT = ArtifactLayout(LinearShape((0,), 2, 4, 3, 5, 3, "float32", "float32", "mamba2", "log_decay"), None)
SEGMENTS = [array("q", range(start, start + 20)) for start in (0, 100)]


def rank(number: int, segments: list[array]) -> Any:
    """The scheduler of a rank, whose artifacts are filled with the segment's number and the rank's."""
    store = ArtifactStore(Arena(1 << 16, "cpu"))
    for i, tokens in enumerate(segments):
        artifacts = store.reserve([Request(bytes([i]), tokens, "", 64, LAYOUT.payload_bytes(12))])
        assert artifacts is not None
        payload = store.arena.buffer[artifacts[0].base :][: LAYOUT.payload_bytes(12)]
        for part in LAYOUT.parts(payload, 12).values():
            part.fill_(10 * i + number)
        store.commit(artifacts[0])
    manager = SimpleNamespace(store=store, layout=LAYOUT, method_of=lambda _: SimpleNamespace(seam_window=8))
    return SimpleNamespace(hypic=manager, ps=SimpleNamespace(tp_rank=number))


def session(ranks: list[Any]) -> Session:
    """A session whose engine is these ranks, asked one after the other."""

    class Engine:
        def collective_rpc(self, name: str, path: str) -> None:
            for scheduler in ranks:
                dump_artifacts(scheduler, path)

    made = Session.__new__(Session)
    made._engine, made.settings = Engine(), {"tp_size": len(ranks)}
    return made


def test_parts_of_all_ranks_are_there() -> None:
    found = session([rank(0, SEGMENTS), rank(1, SEGMENTS)]).dump()
    assert found.keys() == {span_id(s) for s in SEGMENTS}
    for i, tokens in enumerate(SEGMENTS):
        parts = found[span_id(tokens)]
        assert parts.keys() == {"T", "S", "conv", "T@1", "S@1", "conv@1"}
        assert all((value == 10 * i + ("@1" in name)).all() for name, value in parts.items())
        assert parts["T"].shape == (1, 2)


def test_ranks_that_hold_other_artifacts_are_found() -> None:
    with pytest.raises(SessionError, match="rank 1 holds 1 artifacts, rank 0 2"):
        session([rank(0, SEGMENTS), rank(1, SEGMENTS[:1])]).dump()
