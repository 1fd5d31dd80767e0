"""``python -m hypic.bench.ballast MIB``: holds the first GPU's memory, but for so many MiB, until its standard input ends."""

from __future__ import annotations

import sys

import torch

if __name__ == "__main__":
    torch.cuda.init()
    torch.empty(1, device="cuda")  # the context is there before the rest is measured
    free, _ = torch.cuda.mem_get_info()
    if (take := free - (int(sys.argv[1]) << 20)) < 0:
        sys.exit(f"{free >> 20} MiB are free, not {sys.argv[1]}")
    held = torch.empty(take, dtype=torch.uint8, device="cuda")
    print(torch.cuda.mem_get_info()[0] >> 20, flush=True)
    sys.stdin.read()
