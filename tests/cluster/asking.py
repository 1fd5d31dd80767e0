"""Prompts for a cluster, and what is looked at in their answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypic.check.session import Prompt
from tests.cases.driving import Writer
from tests.cluster.launched import Cluster

SEGMENTS, LENGTH = 9, 512
ANEW = {"compiled", "received"}
"""Outcomes of cold segments, by the worker that links them and by others; which of them compile is for measured speeds to say."""


def generate(prompt: Prompt, **fields: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": prompt.new_tokens}
    options = {"segments": [list(s) for s in prompt.segments], "report": True}
    return {"input_ids": prompt.ids, "sampling_params": params, "hypic": options, "return_logprob": True, **fields}


def segments(meta: dict[str, Any]) -> list[dict[str, Any]]:
    return [s for s in meta["hypic"]["spans"] if s["kind"] == "segment"]


def same_answer(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["output_ids"] == b["output_ids"] and a["text"] == b["text"]
    pairs = zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True)
    assert all(abs(x[0] - y[0]) < 1e-4 and x[1] == y[1] for x, y in pairs)


def long_prompt(write: Writer, n: int = SEGMENTS, length: int = LENGTH, **fields: Any) -> Prompt:
    return write.prompt(20, *write.documents(n, length), 20, new_tokens=6, **fields)


def ask_several(
    cluster: Cluster, write: Writer, ask: Callable[[Prompt], dict[str, Any]]
) -> tuple[Prompt, dict[str, Any]]:
    """A cold prompt that several workers compiled, and its answer. On a busy machine measured speeds may leave all to one of
    them: then another prompt is asked. Raises AssertionError."""
    found = []
    for _ in range(6):
        prompt = long_prompt(write)
        answer = ask(prompt)
        found = segments(answer["meta_info"])
        if len({s["worker"] for s in found}) > 1 and "received" in {s["outcome"] for s in found} <= ANEW:
            return prompt, answer
    raise AssertionError(f"never compiled by several workers: {found}")


@contextmanager
def drained(cluster: Cluster, *workers: str) -> Iterator[None]:
    """They get nothing new in the block."""
    cluster.ask("/workers", {"drain": workers})
    try:
        yield
    finally:
        cluster.ask("/workers", {"resume": workers})


def pinned(cluster: Cluster) -> dict[str, float]:
    """Bytes of pinned artifacts, by worker that has any."""
    read = {name: cluster.worker(name).metrics().read("hypic:pinned_bytes") for name in cluster.workers()}
    return {name: nbytes for name, nbytes in read.items() if nbytes}
