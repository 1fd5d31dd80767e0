"""One engine in a process of its own: answers a Job's requests, prints a Reply each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from hypic.eval.served import RESULT, Ask, Job, Reply
from hypic.platform_cpu import cpu_mode, fork_server

LINKED = ("hit_device", "hit_radix", "compiled", "waited")


def answers(job: Job) -> Iterator[Reply]:
    """Start the engine, answer in order."""
    engine = _start(job)
    try:
        vocab = engine.tokenizer_manager.model_config.vocab_size
        for number, ask in enumerate(job.asks):
            yield _Asking(engine, job, vocab).reply(number, ask)
    finally:
        engine.shutdown()


class _Asking:
    def __init__(self, engine: Any, job: Job, vocab: int) -> None:
        self._engine, self._job, self._vocab = engine, job, vocab
        self._whole = vocab <= job.whole

    def reply(self, number: int, ask: Ask) -> Reply:
        sampling = {"max_new_tokens": ask.max_new, "temperature": 0.0, "stop": list(ask.stop)}
        scored = ask.scored and not ask.forced
        began = time.perf_counter()
        out = self._send(ask, ask.ids, sampling, **(self._watch() if scored else {}))
        seconds = time.perf_counter() - began
        ids, meta = tuple(out["output_ids"]), out["meta_info"]
        path = Path(self._job.folder, f"{number}.pt")
        if scored:
            self._save(path, meta.get("output_token_ids_logprobs"), meta["output_top_logprobs"])
        elif ask.scored:
            self._force(ask, path)
        interior, plain = _interior(meta) if self._job.hypic else (0, [])
        return Reply(
            number=number,
            ids=ids,
            cached=meta["cached_tokens"],
            interior=interior,
            plain=plain,
            rows=str(path) if ask.scored else "",
            seconds=seconds,
        )

    def _force(self, ask: Ask, path: Path) -> None:
        """The forced tokens go in as the end of the prompt, whose logprobs are those of its tokens given all before."""
        looked = torch.load(ask.rows, weights_only=True)["ids"]
        union = sorted(set(looked.flatten().tolist()))
        watch = {**self._watch(union), "logprob_start_len": len(ask.ids) - 1}
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        meta = self._send(ask, (*ask.ids, *ask.forced), sampling, **watch)["meta_info"]
        n = len(ask.forced)
        self._save(path, meta["input_token_ids_logprobs"][-n:], meta["input_top_logprobs"][-n:], looked)

    def _watch(self, ids: list[int] | None = None) -> dict[str, Any]:
        top = 1 if self._whole or ids else self._job.top
        watched = list(range(self._vocab)) if self._whole else ids
        return {"return_logprob": True, "top_logprobs_num": top, "token_ids_logprob": watched}

    def _save(self, path: Path, watched: Any, top: Any, looked: torch.Tensor | None = None) -> None:
        """Rows of (logprob, token, text) as tensors; ``looked`` picks tokens of each row."""
        best = torch.tensor([row[0][1] for row in top])
        rows = top if looked is None and not self._whole else watched
        ids = torch.tensor([[entry[1] for entry in row] for row in rows])
        logprobs = torch.tensor([[entry[0] for entry in row] for row in rows], dtype=torch.float32)
        if looked is not None and not self._whole:
            places = torch.searchsorted(ids, looked)
            ids, logprobs = looked, logprobs.gather(1, places)
        torch.save({"ids": ids, "logprobs": logprobs, "best": best, "whole": self._whole}, path)

    def _send(self, ask: Ask, ids: tuple[int, ...], sampling: dict[str, Any], **fields: Any) -> Any:
        if self._job.hypic:
            from hypic.engine.http.inprocess import generate

            bounds = [list(s) for s in ask.segments] or None
            return generate(self._engine, input_ids=list(ids), segments=bounds, sampling_params=sampling, **fields)
        return self._engine.generate(input_ids=list(ids), sampling_params=sampling, **fields)


def _interior(meta: dict[str, Any]) -> tuple[int, list[str]]:
    """Tokens of interiors that were linked, compiled for this request or before it, and why other segments were not."""
    report = meta["hypic"]
    spans = [s for s in report["spans"] if s["kind"] == "segment"]
    w = report["seam_window"]
    linked = [s for s in spans if s["outcome"] in LINKED]
    others = [s.get("reason") or s["outcome"] for s in spans if s["outcome"] not in LINKED and s["tokens"] > w]
    return sum(s["tokens"] - w for s in linked), others


def _start(job: Job) -> Any:
    if cpu_mode():
        from hypic.check.engines import start_engine

        fork_server.inherit()
        return start_engine(job.model, **job.flags)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.engine import Engine

    return Engine(**{"model_path": job.model, "log_level": "error", "skip_server_warmup": True, **job.flags})


if __name__ == "__main__":
    for found in answers(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)):
        print(RESULT + msgspec.json.encode(found).decode(), flush=True)
