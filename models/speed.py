"""Time of a training step at each level, and where it goes at the last.

python -m models.speed [--tokens 65536] [--device cuda]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from .stream import draw
from .task import LEVELS, World
from .train import Trainer, parse


def main() -> None:
    args = parse(["--out", "/dev/null", *sys.argv[1:]])
    torch.set_float32_matmul_precision("high")
    trainer, world = Trainer(args), World(Path(args.data))
    cuda = args.device == "cuda"
    for level in range(args.top + 1):
        tokens = args.tokens // (2 if level < 3 else 1)
        made = draw(world, level, max(1, tokens // LEVELS[level].tokens), ("speed", level))
        times = []
        for _ in range(12):
            begin = time.perf_counter()
            trainer.update(made, 1.0)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        best = sorted(times)[len(times) // 2]
        memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        print(
            f"level {level}: {made.ids.shape}, median of {len(times)} {1e3 * best:.1f} ms a step, "
            f"{made.ids.size / best:,.0f} tokens/s, "
            f"first {times[0]:.2f} s, {memory:.1f} GiB",
            flush=True,
        )
    kinds = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if cuda else [])
    with torch.profiler.profile(activities=kinds) as profile:
        trainer.update(made, 1.0)
        if cuda:
            torch.cuda.synchronize()
    by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    print(profile.key_averages().table(sort_by=by, row_limit=25, max_name_column_width=60))


if __name__ == "__main__":
    main()
