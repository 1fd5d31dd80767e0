"""Methods on the real engine, beside the reference: one model whose vocabulary is looked at in full, one in part."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

from hypic.check import tiny_models
from hypic.config import HypicConfig
from hypic.eval.by_reference import ByReference
from hypic.eval.items import Item, Outcome, Piece
from hypic.eval.methods import choose
from hypic.eval.prompt import Codec
from hypic.eval.reference import Model
from hypic.eval.served import RESULT, Reply, Served, ServedError, compare, with_rest
from hypic.eval.tasks import tasks_of


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(20, 900, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def items() -> list[Item]:
    """Two questions about the same documents, one about the same in another order."""
    a, b, gap = Piece(tokens(90, 1), True), Piece(tokens(70, 2), True), Piece(tokens(3, 3))
    orders = ((a, gap, b), (a, gap, b), (b, gap, a))
    return [
        Item(
            id=f"q{i}",
            dataset="tiny",
            pieces=(Piece(tokens(9, 4)), *order, Piece(tokens(6, 10 + i))),
            closed_book=(Piece(tokens(6, 10 + i)),),
            answers=("",),
            metric="f1",
            max_new_tokens=4,
        )
        for i, order in enumerate(orders)
    ]


@pytest.mark.parametrize(
    ("name", "linked", "whole"), [("qwen35", ["hypic w=8"], 8192), ("llama", ["legolink-4", "legolink-0"], 10)]
)
def test_the_engine_says_what_the_reference_says(name: str, linked: list[str], whole: int) -> None:
    path = tiny_models.build(name)
    codec, model = Codec(path), Model(path)
    tasks = tasks_of(items(), codec)
    methods = choose(["prefix", *linked], hybrid=model.hybrid)
    truth = {(o.item, o.method): o for o in ByReference(model, codec).outcomes(tasks, methods, frozenset())}
    lines: list[str] = []
    config, env = HypicConfig(start_check=False), {"HYPIC_CPU": "1"}
    served = Served(
        str(path),
        codec,
        flags={"max_total_tokens": 4096},
        config=config,
        env=env,
        say=lines.append,
        whole=whole,
        top=500,
    )
    found = [o for o in served.outcomes(tasks, methods, frozenset({("q0", "prefix")})) if isinstance(o, Outcome)]
    assert {(o.item, o.method) for o in found} == truth.keys() - {("q0", "prefix")}, lines[-20:]
    for o in found:
        t = truth[o.item, o.method]
        assert (o.ids, o.text, o.tokens, o.agrees) == (t.ids, t.text, t.tokens, t.agrees)
        assert len(o.kl) == len(t.kl) == (0 if o.method in ("full", "closed_book") else 4)
        if o.method in linked:
            assert o.reused == t.reused and max(o.kl) > 1e-4
            # Of a part of the vocabulary, all other tokens as one, KL is a little smaller.
            lower = 0.8 if whole == 10 else 1 - 1e-3
            assert all(lower * b - 1e-5 <= a <= b * (1 + 1e-3) + 1e-5 for a, b in zip(o.kl, t.kl, strict=True))
        elif o.method == "prefix":  # SGLang keeps states and pages at some places only
            assert 0 <= o.reused <= t.reused
    if name == "llama":
        assert [o.reused for o in found if o.method == "prefix" and o.item == "q1"] == [truth["q1", "prefix"].reused]


def test_an_engine_whose_reply_is_refused_is_ended_however_much_it_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipe is full, so that it waits for a reader, and it does not listen to SIGTERM: it had waited for us, and we for it."""
    program, ended = tmp_path / "child", tmp_path / "ended"
    reply = Reply(number=0, ids=(1,), cached=0, interior=0, plain=["arena_full"], rows="", seconds=0.1)
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"try:\n    while True:\n        print({RESULT + msgspec.json.encode(reply).decode()!r}, flush=True)\n"
        f"finally:\n    pathlib.Path({str(ended)!r}).touch()\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    path = tiny_models.build("llama")
    codec = Codec(path)
    served = Served(str(path), codec, flags={}, config=HypicConfig(), env={}, say=lambda _: None)
    task = tasks_of(items()[:1], codec)[0]
    began = time.monotonic()
    with pytest.raises(ServedError, match=r"computed 1 documents of item q0 in place \(arena_full\)"):
        list(served._linked(choose(["legolink-4"], hybrid=False)[-1], [task], {task.item.id: (reply, task)}, tmp_path))
    assert ended.exists() and time.monotonic() - began < 20


def test_kl_of_a_part_of_the_vocabulary_never_exceeds_that_of_all(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(6, 50, generator=g).log_softmax(-1) for _ in range(2))
    ids = p.topk(8).indices
    for rows, name in ((p, "p"), (q, "q")):
        torch.save({"logprobs": rows.gather(1, ids), "best": rows.argmax(-1), "whole": False}, tmp_path / name)
        torch.save({"logprobs": rows, "best": rows.argmax(-1), "whole": True}, tmp_path / f"{name} all")
    part, agrees = compare(str(tmp_path / "p"), str(tmp_path / "q"))
    everything, same = compare(str(tmp_path / "p all"), str(tmp_path / "q all"))
    by_hand = (p.exp() * (p - q)).sum(-1).tolist()
    assert everything == pytest.approx(by_hand, rel=1e-5) and agrees == same
    assert all(0 < a < b for a, b in zip(part, everything, strict=True))
    assert with_rest(p.gather(1, ids)).exp().sum(-1).tolist() == pytest.approx([1.0] * 6)
