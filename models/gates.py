"""The gates of issue 3: does the model need its state, its attention, its seams, and does a link answer like full recompute?

    python -m models.gates WEIGHTS --out gates.json [--device cuda] [--sequences 48] [--seeds 3]

Accuracy is the share of answer tokens that are the most likely ones, each question a turn of its own after all documents;
KL is from full recompute to the method, over the answer token's distribution. Everything runs in float32 on the weights as
they are served (bfloat16).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .linked import compile_documents, linked_hidden
from .network import Network, build
from .task import KINDS, LEVELS, World, make

HERE = Path(__file__).parent / "almanac"
METHODS: dict[str, dict[str, Any]] = {
    "full": dict(w=float("inf")),
    "hypic w=8": dict(w=8),
    "hypic w=4": dict(w=4),
    "hypic w=2": dict(w=2),
    "hypic w=1": dict(w=1),
    "hypic w=0": dict(w=0),
    "additive w=8": dict(w=8, state="additive"),
    "decay-only w=8": dict(w=8, state="decay"),
    "last segment's state w=8": dict(w=8, state="last"),
    "state path zeroed": dict(w=8, state="zero"),
    "KV path zeroed": dict(w=8, kv=False),
}


def load_weights(path: Path) -> Network:
    """A network of ``weights.safetensors`` (models/train.py) or of a served folder."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    if path.is_dir():
        from .network import load

        return Network(load(path))
    with safe_open(path, "pt") as f:
        shape = json.loads((f.metadata() or {}).get("shape", "{}"))
    model = build(shape)
    model.model.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    return Network(model.eval())


@torch.no_grad()
def examine(
    net: Network,
    world: World,
    level: int,
    seed: int,
    sequences: int,
    rows: int,
    methods: list[str],
    close: bool = True,
) -> dict[str, Any]:
    """Right answers and KL of every method on ``sequences`` held-out sequences, ``rows`` at a time."""
    device = net.hf.lm_head.weight.device
    kinds: list[np.ndarray] = []
    right: dict[str, list[np.ndarray]] = {m: [] for m in methods}
    kl: dict[str, list[np.ndarray]] = {m: [] for m in methods}
    for first in range(0, sequences, rows):
        n = min(rows, sequences - first)
        samples = [
            make(
                world,
                LEVELS[level],
                random.Random(f"gates {seed} {first} {i}"),
                shape=random.Random(f"shape {seed} {first}"),
                full=True,
                close=close,
            )
            for i in range(n)
        ]
        ids = torch.from_numpy(np.stack([s.ids for s in samples])).long().to(device)
        at = torch.tensor([[i, q.at - 1] for i, s in enumerate(samples) for q in s.questions], device=device)
        answers = torch.tensor([q.answer for s in samples for q in s.questions], device=device)
        kinds.append(np.array([q.kind - 1 for s in samples for q in s.questions]))
        documents = samples[0].documents
        compiled = compile_documents(net, ids, documents)
        reference: Tensor | None = None
        for method in methods:
            hidden = linked_hidden(net, ids, documents, compiled=compiled, **METHODS[method])
            logprobs = net.logits(hidden[at[:, 0], at[:, 1]]).log_softmax(-1)
            if reference is None:
                reference = logprobs
            right[method].append((logprobs.argmax(-1) == answers).cpu().numpy())
            kl[method].append((reference.exp() * (reference - logprobs)).sum(-1).cpu().numpy())
    kind = np.concatenate(kinds)
    return {
        method: {
            name: {
                "n": int(chosen.sum()),
                "accuracy": round(float(np.concatenate(right[method])[chosen].mean()), 4),
                "kl": round(float(np.concatenate(kl[method])[chosen].mean()), 5),
            }
            for name, chosen in (("all", kind >= 0), *((k, kind == i) for i, k in enumerate(KINDS)))
        }
        for method in methods
    }


def judge(table: dict[str, Any]) -> dict[str, bool]:
    """The gates, on one seed's table."""

    def acc(method: str, kind: str = "all") -> float:
        return table[method][kind]["accuracy"]

    return {
        "full >= 0.95": acc("full") >= 0.95,
        "full >= 0.95 on each kind": min(acc("full", k) for k in KINDS) >= 0.95,
        "w=8 within 2 points of full": abs(acc("full") - acc("hypic w=8")) <= 0.02,
        "KL of w=8 < 0.02": table["hypic w=8"]["all"]["kl"] < 0.02,
        "additive >= 25 points down on upd": acc("full", "upd") - acc("additive w=8", "upd") >= 0.25,
        "strad <= 0.1 at w=0": acc("hypic w=0", "strad") <= 0.1,
        "strad within 2 points of full at w=8": abs(acc("full", "strad") - acc("hypic w=8", "strad")) <= 0.02,
        "KV path zeroed costs >= 20 points": acc("hypic w=8") - acc("KV path zeroed") >= 0.2,
        "state path zeroed costs >= 20 points": acc("hypic w=8") - acc("state path zeroed") >= 0.2,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--level", type=int, default=len(LEVELS) - 1)
    parser.add_argument("--sequences", type=int, default=96, help="per seed, of up to 40 questions each")
    parser.add_argument("--rows", type=int, default=8, help="sequences at once; they share their boundaries")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--data", type=Path, default=HERE)
    parser.add_argument(
        "--close", action=argparse.BooleanOptionalAction, default=True, help="updates in neighbouring documents"
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    net = load_weights(args.weights).to(args.device)
    world = World(args.data, held_out=True)
    methods = ["full", *(m for m in args.methods if m != "full")]
    result: dict[str, Any] = {"level": LEVELS[args.level]._asdict(), "close": args.close, "sequences": args.sequences}
    result["seeds"] = []
    for seed in range(args.seeds):
        begin = time.monotonic()
        table = examine(net, world, args.level, seed, args.sequences, args.rows, methods, args.close)
        gates = judge(table) if set(methods) == set(METHODS) else {}
        result["seeds"].append({"seed": seed, "methods": table, "gates": gates})
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"seed {seed}: {time.monotonic() - begin:.0f} s, n = {table['full']['all']['n']}")
        for method, row in table.items():
            cells = [f"{k} {v['accuracy']:.3f} (KL {v['kl']:.3f})" for k, v in row.items()]
            print(f"  {method:26}" + "  ".join(cells), flush=True)
        for gate, met in gates.items():
            print(f"  {'met ' if met else 'MISSED'} {gate}", flush=True)


if __name__ == "__main__":
    main()
