"""``python -m hypic.router.transport.measure``: artifacts between two processes of a host: GB/s, round trip.

Three ways: copied out of a window, ZeroMQ over ipc, ZeroMQ over TCP with CURVE. In host memory, or with ``--device cuda``
between GPUs, the first and the last that there are. What arrives is compared. A way that fails is told, and leaves the others
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import os
import shutil
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hypic.bench.provenance import machine
from hypic.engine.cluster.movers import Mover, mover_for
from hypic.engine.cluster.windows import shared_buffer
from hypic.router.transport import Peer
from hypic.router.transport.security import Curve, make_folder, make_keys
from hypic.router.transport.zmq_blobs import CHUNK, WINDOW, ZmqTransport

KEY, SMALL = bytes(24), bytes([1]) * 24
SMALL_BYTES = 4096
START_SECONDS = 60.0
"""For a process to import torch and open its GPU."""
FETCH_SECONDS = 20.0
_OPTIONAL = ("mooncake", "mooncake-tcp")


def _mover(way: str, nbytes: int, device: str) -> tuple[Mover, torch.Tensor]:
    """The engine's own, over an arena."""
    arena = shared_buffer(nbytes + SMALL_BYTES)
    if device != "cpu":
        arena = torch.empty(arena.numel(), dtype=torch.uint8, device=device)
    return mover_for(arena, "ipc://", way if way in _OPTIONAL or way == "window" else "socket"), arena


def _content(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def _devices(kind: str) -> tuple[str, str]:
    """Of the source and of the sink."""
    return ("cpu", "cpu") if kind == "cpu" else ("cuda:0", f"cuda:{torch.cuda.device_count() - 1}")


def _serve(pipe: Connection, address: str, curve: Curve | None, nbytes: int, way: str, device: str) -> None:
    async def run() -> None:
        transport = ZmqTransport(address, curve)
        bound = await transport.start()
        mover, arena = _mover(way, nbytes, _devices(device)[0])
        arena.copy_(_content(arena.numel()))
        await mover.offer(transport, KEY, 0, nbytes)
        await mover.offer(transport, SMALL, nbytes, SMALL_BYTES)
        pipe.send((bound, transport.public_key))
        await asyncio.to_thread(pipe.recv)
        await transport.close()

    asyncio.run(run())


async def _fetch(
    peer: Peer, folder: Path, curve: Curve | None, args: argparse.Namespace, mover: Mover, arena: torch.Tensor
) -> tuple[list[float], float]:
    address = "tcp://127.0.0.1:0" if curve else f"ipc://{folder}/sink"
    transport = ZmqTransport(address, curve, chunk=args.chunk, window=args.window)
    await transport.start()
    nbytes = args.mib << 20
    rates, trips = [], []
    for _ in range(args.reps + 1):
        receipt, _ = await mover.fetch(transport, peer, KEY, 0, nbytes, 0, FETCH_SECONDS)
        rates.append(receipt.nbytes / (receipt.waited + receipt.seconds) / 1e9)
    for _ in range(100):
        receipt, _ = await mover.fetch(transport, peer, SMALL, nbytes, SMALL_BYTES, 0, 10)
        trips.append(receipt.waited + receipt.seconds)
    await transport.close()
    if not torch.equal(arena.cpu(), _content(arena.numel())):
        raise RuntimeError("what arrived is not what was sent")
    return rates[1:], statistics.median(trips)


def _between(args: argparse.Namespace, way: str, folder: Path) -> dict[str, Any]:
    """One way, with a process of its own at the other end."""
    curves: list[Curve | None] = [None, None]
    if way == "tcp+curve":
        keys, allowed = folder / "keys", folder / "allowed"
        keys.mkdir()
        allowed.mkdir()
        secrets = []
        for name in ("source", "sink"):
            public, secret = make_keys(keys, name)
            shutil.copy(public, allowed)
            secrets.append(secret)
        curves = [Curve(s, allowed) for s in secrets]
    address = f"ipc://{folder}/source" if way != "tcp+curve" else "tcp://127.0.0.1:0"
    nbytes = args.mib << 20
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_serve, args=(theirs, address, curves[0], nbytes, way, args.device), daemon=True)
    child.start()
    theirs.close()  # so that its end is heard
    try:
        mover, arena = _mover(way, nbytes, _devices(args.device)[1])
        if not ours.poll(START_SECONDS):
            raise TimeoutError("the source did not start")
        peer = Peer(*ours.recv())
        with ThreadPoolExecutor(1) as thread:  # as in a worker, where another one makes the mover
            rates, trip = thread.submit(asyncio.run, _fetch(peer, folder, curves[1], args, mover, arena)).result()
        ours.send(None)
        child.join(10)
    finally:
        child.kill()
    rate = {"median": statistics.median(rates), "min": min(rates), "max": max(rates), "n": len(rates)}
    return {"gb_per_s": rate, "round_trip_ms": 1e3 * trip}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Each way: GB/s from the call to the last byte in place, and the time of a request for 4 KiB and its answer; or why not."""
    out: dict[str, Any] = {}
    for way in ("window", "ipc", "tcp+curve", *args.also):
        folder = make_folder()
        try:
            out[way] = _between(args, way, folder)
        except (RuntimeError, OSError, EOFError) as e:
            out[way] = {"failed": f"{type(e).__name__}: {e}"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hypic.router.transport.measure", description=__doc__)
    parser.add_argument("--mib", type=int, default=160, help="size of the blob (160: 2,048 tokens of Qwen3.5-35B-A3B)")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--also", action="append", choices=_OPTIONAL, default=[], help="ways that need a package")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--window", type=int, default=WINDOW)
    args = parser.parse_args()
    result = measure(args)
    settings = {
        "blob_mib": args.mib,
        "chunk": args.chunk,
        "window": args.window,
        "load": os.getloadavg()[0],
        "device": args.device,
    }
    print(json.dumps({"ways": result, **settings, "machine": machine()}))
    sys.exit(any("failed" in told for told in result.values()))


if __name__ == "__main__":
    main()
