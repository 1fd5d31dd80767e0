"""Train the model from scratch, or go on, for so many minutes on one device.

    python -m models.train --out OUT --minutes 8 [--resume FOLDER]

OUT receives ``curve.jsonl`` (a line every few seconds, and one per evaluation), ``weights.safetensors`` (bfloat16, what
``models.export`` turns into the served folder) and ``resume-*.safetensors``: float32 parameters and Adam's second moments
from *before* the learning rate went down, which ``--resume`` takes. All files stay under 16 MiB.

The learning rate warms up, stays, and falls to zero over the last part of the time given; the level of the task rises by
itself once the accuracy on it does (``models/task.py``).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from .network import Network, build
from .step import Graphs, Inputs
from .stream import Batch, Stream, draw
from .task import KINDS, LEVELS, World

HERE = Path(__file__).parent / "almanac"
ADVANCE = 0.85
"""Accuracy at which the next level begins."""
_TEXT_WEIGHT = 0.1
_READ = 20  # steps between looks at the metrics, each of which waits for the device
_WARMUP = 200
_METRICS = 3 * len(KINDS) + 4


class Trainer:
    """The model, its optimizer and where it stands."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        decays = tuple(float(x) for x in args.decays.split(","))
        self.net = Network(build(json.loads(args.shape), seed=args.seed, decays=decays)).to(self.device)
        matrices = [p for p in self.net.parameters() if p.dim() >= 2]
        others = [p for p in self.net.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        cuda = self.device.type == "cuda"
        self.rate: Any = torch.tensor(args.lr, device=self.device) if cuda else args.lr
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.98), eps=1e-9, fused=cuda, capturable=cuda
        )
        self.sums: dict[int, Tensor] = {}
        self.graphs = Graphs(self) if cuda else None
        self.step = self.tokens = self.level = self.level_step = 0
        self.warm_from, self.scale = 0, 1.0
        self.accuracy: dict[int, float] = {}

    def plan(self, index: int) -> tuple[int, int, Any]:
        """Mostly the present level, some of the next and of those before, and a little of the last.

        What the last level asks does not fit into the states, so the attention layers have something to learn early on.
        """
        rng = random.Random(f"{self.args.seed} {self.args.run} {index}")
        draw = rng.random()
        level = self.level
        if draw < 0.15:
            level = min(level + 1, self.args.top)
        elif draw < 0.35:
            level = rng.randint(0, level)
        elif draw < 0.45 and level > 0:
            level = self.args.top
        tokens = self.args.tokens // (2 if level < 3 else 1)
        return level, max(1, tokens // LEVELS[level].tokens), (self.args.seed, self.args.run, index)

    def losses(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The loss, and its parts: per kind sum of right answers, number, sum of losses; text loss, end loss, loss, 1."""
        n = len(inputs.answer)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16):
            hidden = self.net(inputs.ids, inputs.restarts).flatten(0, 1)
            logits = self.net.logits(hidden[torch.cat([inputs.answer_at, inputs.text_at])])
        targets = torch.cat([inputs.answer, inputs.text])
        each = F.cross_entropy(logits.float(), targets, reduction="none")
        answers, kind = each[:n], inputs.kind
        known = (kind > 0).float()
        texts = (each[n:] * inputs.text_known).sum() / inputs.text_known.sum()
        loss = (answers * known).sum() / known.sum() + _TEXT_WEIGHT * texts
        right = (logits[:n].argmax(-1) == inputs.answer).float()
        parts = []
        for k in range(1, len(KINDS) + 1):
            one = (kind == k).float()
            parts += [(right * one).sum(), one.sum(), (answers * one).sum()]
        ends = (kind == len(KINDS) + 1).float()
        parts += [texts, (answers * ends).sum() / ends.sum(), loss, torch.ones_like(loss)]
        return loss, torch.stack([p.detach() for p in parts])

    def run(self, inputs: Inputs, sums: Tensor) -> None:
        """One step on ``inputs``; adds its parts to ``sums``."""
        loss, parts = self.losses(inputs)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        sums += parts

    def update(self, made: Batch, rate: float) -> None:
        """One step; its parts are added to ``self.sums[made.level]``."""
        now = self.args.lr * rate * self.scale * min(1.0, (self.step - self.warm_from + 1) / _WARMUP)
        if self.graphs:
            self.rate.fill_(now)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = now
        if made.level not in self.sums:
            self.sums[made.level] = torch.zeros(_METRICS, device=self.device)
        if self.graphs:
            self.graphs.run(made, self.sums[made.level])
        else:
            self.run(Inputs.of(made, self.device), self.sums[made.level])
        self.step += 1
        self.tokens += made.ids.size

    def read(self) -> dict[int, list[float]]:
        """The sums since the last call, per level seen; waits for the device."""
        read = {level: t.tolist() for level, t in self.sums.items()}
        for t in self.sums.values():
            t.zero_()
        return {level: t for level, t in read.items() if sum(t[1 : 3 * len(KINDS) : 3])}

    @torch.no_grad()
    def evaluate(self, held_out: list[Batch]) -> dict[str, Any]:
        rows = {}
        for made in held_out:
            parts = self.losses(Inputs.of(made, self.device))[1].tolist()
            rows[f"level{made.level}"] = _summary(parts)
        return rows

    def state(self) -> dict[str, Tensor]:
        named = dict(self.net.named_parameters())
        kept = {f"p.{n}": p.detach().clone() for n, p in named.items()}
        for n, p in named.items():
            if p in self.optimizer.state:
                kept[f"v.{n}"] = self.optimizer.state[p]["exp_avg_sq"].bfloat16()
        return kept

    def restore(self, kept: dict[str, Tensor], where: dict[str, Any]) -> None:
        """Parameters and second moments; the first moments start anew, so the learning rate warms up again."""
        named = dict(self.net.named_parameters())
        if {k[2:] for k in kept if k[0] == "p"} != set(named):
            raise SystemExit("the checkpoint is of a model of another shape")
        with torch.no_grad():
            for n, p in named.items():
                p.copy_(kept[f"p.{n}"])
                if f"v.{n}" not in kept:
                    continue
                if p not in self.optimizer.state:
                    step = torch.zeros((), device=self.rate.device if self.graphs else "cpu")
                    self.optimizer.state[p] = {
                        "step": step,
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                state = self.optimizer.state[p]  # in place: captured graphs know these tensors
                state["step"].fill_(1000.0)
                state["exp_avg"].zero_()
                state["exp_avg_sq"].copy_(kept[f"v.{n}"])
        self.step, self.tokens, self.level = (int(where[k]) for k in ("step", "tokens", "level"))
        self.warm_from = self.level_step = self.step

    def where(self) -> dict[str, int]:
        return {"step": self.step, "tokens": self.tokens, "level": self.level}


def _summary(parts: list[float]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for i, kind in enumerate(KINDS):
        right, n, loss = parts[3 * i : 3 * i + 3]
        if n:
            row[kind] = round(right / n, 4)
            row[f"{kind}_loss"] = round(loss / n, 4)
    texts, ends, _, steps = parts[-4:]
    return row | {"text_loss": round(texts / steps, 4), "end_loss": round(ends / steps, 5)}


def write_resume(out: Path, kept: dict[str, Tensor], where: dict[str, int]) -> None:
    """In parts of at most 16.2 MB, each complete before it takes its name."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, t in kept.items():
        size += t.nbytes
        if size > 16.2e6 and parts[-1]:
            parts.append({})
            size = t.nbytes
        parts[-1][name] = t.cpu().contiguous()
    meta = {k: str(v) for k, v in where.items()} | {"parts": str(len(parts))}
    for i, part in enumerate(parts):
        save_file(part, out / f".resume-{i}", metadata=meta)
    for i in range(len(parts)):
        (out / f".resume-{i}").rename(out / f"resume-{i}.safetensors")


def read_resume(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(folder / "resume-0.safetensors", "pt") as f:
        where = f.metadata()
    kept: dict[str, Tensor] = {}
    for i in range(int(where["parts"])):
        kept |= load_file(folder / f"resume-{i}.safetensors")
    return kept, where


def write_weights(out: Path, trainer: Trainer) -> None:
    state = {n: p.detach().bfloat16().cpu().contiguous() for n, p in trainer.net.hf.model.state_dict().items()}
    meta = {k: str(v) for k, v in trainer.where().items()} | {
        "shape": trainer.args.shape,
        "seed": str(trainer.args.seed),
    }
    save_file(state, out / ".weights", metadata=meta)
    (out / ".weights").rename(out / "weights.safetensors")


def train(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    end, falling = begin + 60 * args.minutes, 60 * args.minutes * args.decay
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(args.threads)
    stream = Stream(args.data, lambda index: trainer.plan(index), args.workers, args.restarts)
    trainer = Trainer(args)
    if args.resume:
        trainer.restore(*read_resume(args.resume))
    curve = (args.out / "curve.jsonl").open("a", buffering=1)

    def log(**row: Any) -> None:
        row = {"run": args.run, "seconds": round(time.monotonic() - begin, 1), **trainer.where(), **row}
        curve.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    world = World(args.data, held_out=True)
    held_out = [draw(world, i, max(2, args.tokens // LEVELS[i].tokens), ("eval", i)) for i in range(args.top + 1)]
    held_out.append(
        draw(world, args.top, max(2, args.tokens // LEVELS[args.top].tokens), ("full", args.top), full=True)
    )
    log(event="start", parameters=sum(p.numel() for p in trainer.net.parameters()), torch=torch.__version__)
    good = (trainer.state(), trainer.where())
    stable = None
    read_at, read_tokens, kept_at = time.monotonic(), trainer.tokens, time.monotonic()
    try:
        while (now := time.monotonic()) < end and trainer.step < args.steps:
            rate = min(1.0, max(0.0, end - now) / falling) if falling else 1.0
            if rate < 1.0 and stable is None:
                stable = (trainer.state(), trainer.where())
            trainer.update(stream.next(), rate)
            if trainer.step % _READ == 0:
                read = trainer.read()
                if not all(x == x and abs(x) < 1e9 for t in read.values() for x in t):
                    trainer.scale /= 2
                    trainer.restore(*good)
                    log(event="not finite: back to the last good state at half the learning rate")
                    continue
                _advance(trainer, read, log, (now - begin) / (60 * args.minutes))
                if trainer.step % (5 * _READ) == 0:
                    speed = (trainer.tokens - read_tokens) / (time.monotonic() - read_at)
                    read_at, read_tokens = time.monotonic(), trainer.tokens
                    rows = {f"level{k}": _summary(t) for k, t in read.items()}
                    log(tokens_per_second=round(speed), rate=round(rate, 3), train=rows)
            if time.monotonic() - kept_at > args.keep:
                kept_at = time.monotonic()
                good = (trainer.state(), trainer.where())
                if stable is None:
                    write_resume(args.out, *good)
                write_weights(args.out, trainer)
                log(event="evaluation", held_out=trainer.evaluate(held_out))
        write_resume(args.out, *(stable or (trainer.state(), trainer.where())))
        write_weights(args.out, trainer)
        log(event="end", held_out=trainer.evaluate(held_out), memory_gib=_memory())
    finally:
        stream.close()


def _memory() -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else None


def _advance(trainer: Trainer, read: dict[int, list[float]], log: Any, share_of_time: float) -> None:
    """Raise the level where all kinds are answered well enough, or where the time would otherwise run out."""
    level = trainer.level
    if level in read:
        parts = read[level]
        rates = [parts[3 * i] / parts[3 * i + 1] for i in range(len(KINDS)) if parts[3 * i + 1]]
        now = sum(rates) / len(rates)
        before = trainer.accuracy.get(level, now)
        trainer.accuracy[level] = 0.5 * before + 0.5 * now
    late = share_of_time > 0.15 * (level + 1) and trainer.step - trainer.level_step > 200
    passed = trainer.accuracy.get(level, 0.0) >= ADVANCE
    if level < trainer.args.top and (passed or (late and trainer.args.hurry)):
        trainer.level, trainer.level_step = level + 1, trainer.step
        log(event="level", accuracy=round(trainer.accuracy.get(level, 0.0), 3), passed=passed)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="of training, from the start of the process on")
    parser.add_argument("--decay", type=float, default=0.2, help="share of the time in which the learning rate falls")
    parser.add_argument("--resume", type=Path, help="folder with resume-*.safetensors")
    parser.add_argument("--run", type=int, default=0, help="number of the run: other runs see other data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--tokens", type=int, default=65536, help="per step; half of it on the first three levels")
    parser.add_argument("--steps", type=int, default=10**9, help="stop there even if time is left")
    parser.add_argument("--top", type=int, default=len(LEVELS) - 1, help="last level")
    parser.add_argument(
        "--hurry", action=argparse.BooleanOptionalAction, default=True, help="raise the level when late"
    )
    parser.add_argument("--keep", type=float, default=60.0, help="seconds between checkpoints with an evaluation")
    parser.add_argument("--workers", type=int, default=12, help="processes that make data")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, default=True, help="autocast of the projections"
    )
    parser.add_argument("--decays", default="0.3,0.0003", help="log decay per token of the first and last linear layer")
    parser.add_argument("--restarts", type=float, default=0.3, help="share of sequences as models.stream.draw tells")
    parser.add_argument("--shape", default="{}", help="JSON, in place of entries of models.network.SHAPE")
    parser.add_argument("--data", type=Path, default=HERE, help="folder with the tokenizer and sentences")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
