"""Training on a small shape: it learns, stops in time, and goes on from what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from models.gates import load_weights
from models.task import World
from models.train import Trainer, parse, read_resume, train

from .conftest import SMALL

COMMON = ["--device", "cpu", "--no-bf16", "--shape", json.dumps(SMALL), "--tokens", "1600", "--workers", "1"]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]


def test_learns_and_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = [*COMMON, "--top", "0", "--threads", "1", "--lr", "4e-3"]
    train(parse(["--out", str(first), "--minutes", "5", "--steps", "60", *common]))
    start, *_, end = lines(first)
    assert start["event"] == "start" and end["event"] == "end" and end["step"] == 60
    assert end["held_out"]["level0"]["end_loss"] < 7.0 < 8.7  # of a uniform guess among 6144 tokens: 8.7
    kept, where = read_resume(first)
    assert int(where["step"]) == 60  # with all its time left the learning rate had not begun to fall
    weights = load_weights(first / "weights.safetensors")
    embedding = weights.hf.model.embed_tokens.weight
    torch.testing.assert_close(embedding, kept["p.hf.model.embed_tokens.weight"].bfloat16().float())

    train(
        parse(["--out", str(second), "--resume", str(first), "--run", "1", "--minutes", "5", "--steps", "62", *common])
    )
    assert [row["step"] for row in lines(second)] == [60, 62]
    moved = (read_resume(second)[0]["p.hf.model.embed_tokens.weight"] - kept["p.hf.model.embed_tokens.weight"]).abs()
    assert 0 < moved.max() < 0.01


def test_time_ends_it_and_the_checkpoint_is_from_before_the_fall(tmp_path: Path) -> None:
    train(
        parse(["--out", str(tmp_path), "--minutes", "0.15", "--decay", "0.6", "--top", "0", "--threads", "1", *COMMON])
    )
    end = lines(tmp_path)[-1]
    assert end["event"] == "end" and 9 <= end["seconds"] < 20
    assert int(read_resume(tmp_path)[1]["step"]) < end["step"]


def test_batches_are_drawn_from_the_seed_alone(world: World) -> None:
    from models.stream import draw

    a, b, other = (draw(world, 0, 3, seed) for seed in ((0, 0, 1), (0, 0, 1), (0, 1, 1)))
    assert (a.ids == b.ids).all() and (a.text_at == b.text_at).all()
    assert (a.ids != other.ids).any()
    flat = a.ids.ravel()
    assert (flat[a.answer_at + 1] == a.answer).all() and (flat[a.text_at + 1] == a.text).all()


def test_mostly_the_present_level(tmp_path: Path) -> None:
    trainer = Trainer(parse(["--out", str(tmp_path), *COMMON]))
    trainer.level = 3
    levels = [trainer.plan(i)[0] for i in range(400)]
    assert levels.count(3) > 200 and levels.count(4) > 30 and levels.count(0) > 5 and levels.count(5) > 20
