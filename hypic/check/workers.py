"""P3 and P4 across workers: whoever compiled a segment, the answer is the one that a single worker gives."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from hypic.check.checks import assemble, check_p4, explain, tokens
from hypic.check.judge import Judge
from hypic.check.result import CheckResult, failed
from hypic.check.session import (
    ANSWER_TIMEOUT,
    Answer,
    Prompt,
    SessionError,
    distance,
    method_of,
    read_answer,
    watched_ids,
)
from hypic.config import HypicConfig
from hypic.method import Method
from hypic.router.launch.plan import LaunchError
from hypic.router.launch.running import running

ROUNDS, LAYOUTS = 4, 16
_LENGTHS = (64, 100, 200, 300, 150, 90)

Progress = Callable[[str, int, int], None]


class Endpoint:
    """What the checks use of a :class:`hypic.check.session.Session`, over HTTP: a cluster, or one of its workers.

    Args:
        url: its address.
        config: hypic's settings of its processes.
        vocab_size, dtype: of the model.
    """

    def __init__(self, url: str, config: HypicConfig, vocab_size: int, dtype: str):
        self.url, self.config, self.vocab_size, self.dtype = url, config, vocab_size, dtype
        self.watched = watched_ids(vocab_size)

    def ask(self, prompt: Prompt) -> Answer:
        """Raises SessionError, Aborted."""
        (answer,) = self.ask_together([prompt])
        return answer

    def ask_together(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """The answers to prompts that are sent at once."""

        async def together() -> list[Any]:
            timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT)
            async with aiohttp.ClientSession(self.url, timeout=timeout) as client:
                return await asyncio.gather(*(self._post(client, "/generate", self._body(p)) for p in prompts))

        return [read_answer(out) for out in asyncio.run(together())]

    def method(self, name: str = "") -> Method:
        """A caching method of its processes; their default for ""."""
        return method_of(self.config, name)

    def get(self, path: str) -> Any:
        async def get() -> Any:
            async with aiohttp.ClientSession(self.url) as client, client.get(path) as response:
                return await response.json()

        return asyncio.run(get())

    def flush(self) -> None:
        """Drop radix tree and artifacts, once it is idle."""

        async def flush() -> None:
            deadline = time.monotonic() + ANSWER_TIMEOUT
            async with aiohttp.ClientSession(self.url) as client:
                while (await client.post("/flush_cache", json={})).status != 200:
                    if time.monotonic() > deadline:
                        raise SessionError(f"{self.url}: the cache was not flushed")
                    await asyncio.sleep(0.1)

        asyncio.run(flush())

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "input_ids": list(prompt.ids),
            "hypic": {"segments": [list(s) for s in prompt.segments] or None, "report": True},
            "sampling_params": {"max_new_tokens": prompt.new_tokens, "temperature": 0.0, "ignore_eos": True},
            "extra_key": prompt.tenant or None,
            "return_logprob": True,
            "token_ids_logprob": self.watched,
        }

    async def _post(self, client: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Any:
        try:
            async with client.post(path, json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise SessionError(f"{self.url}{path}: {response.status} {text[:500]}")
                return json.loads(text)
        except (aiohttp.ClientError, OSError) as e:
            raise SessionError(f"{self.url}{path}: {type(e).__name__}: {e}") from None


def check_workers(
    name: str,
    model: str | Path,
    argv: Sequence[str],
    config: HypicConfig,
    workers: int,
    seed: int,
    progress: Progress,
    *,
    rounds: int = ROUNDS,
    layouts: int = LAYOUTS,
    start_seconds: float = 1800.0,
) -> Iterator[CheckResult]:
    """P3 and P4 on a cluster of `workers`, round robin, so that every prompt is scattered.

    Args:
        argv: SGLang's flags besides the model.
        config: hypic's settings. Segments are linked however short.
        rounds, layouts: prompts of P3 and of P4.
    """
    config = msgspec.structs.replace(config, enabled=True, min_segment=0)
    settings = ["--hypic-min-segment", "0", "--hypic-seam-window", str(config.seam_window)]
    judge, left = Judge(name, str(model), seed), ["P3", "P4"]
    progress(f"starting {workers} workers", 0, 1)
    try:
        with running(
            ["--model-path", str(model), *argv, *settings], workers, "round_robin", start_seconds=start_seconds
        ) as url:
            vocab, dtype = model_facts(Path(model))
            cluster = Endpoint(url, config, vocab, dtype)
            info = cluster.get("/server_info")
            cluster.dtype = {"auto": dtype}.get(info["dtype"], info["dtype"])
            alone = [Endpoint(w["http"], config, vocab, cluster.dtype) for w in cluster.get("/workers")["workers"]]
            for check, run in (
                ("P3", lambda: check_p3_across(cluster, alone, judge, seed, rounds)),
                ("P4", lambda: check_p4(cluster, judge, seed, layouts)),  # type: ignore[arg-type]
            ):
                progress(check, 0, 1)
                began = time.perf_counter()
                found = _guarded(check, name, seed, run)
                left.remove(check)
                detail = f"{workers} workers; {found.detail}"
                yield msgspec.structs.replace(found, detail=detail, seconds=time.perf_counter() - began)
    except (LaunchError, SessionError, OSError, ValueError) as e:
        for check in left:
            yield failed(check, name, seed, str(e))


def _guarded(check: str, name: str, seed: int, run: Callable[[], CheckResult]) -> CheckResult:
    try:
        return run()
    except SessionError:
        raise
    except Exception as e:
        return failed(check, name, seed, f"{type(e).__name__}: {e}")


def check_p3_across(
    cluster: Endpoint,
    workers: Sequence[Endpoint],
    judge: Judge,
    seed: int,
    rounds: int = ROUNDS,
    lengths: Sequence[int] = _LENGTHS,
) -> CheckResult:
    """A cold prompt that several workers compile, and one whose artifacts lie here and there, are answered as by one.

    Args:
        workers: each of them, to be asked alone.
        lengths: of the documents of a prompt: long enough that the cluster's policy splits it.
    """
    tally = judge.tally("P3", cluster, pairs=True)  # type: ignore[arg-type]
    rng = random.Random(seed)
    seen: dict[str, int] = {}
    for i in range(rounds):
        documents = [tokens(rng, cluster, n) for n in lengths]  # type: ignore[arg-type]
        cold = assemble(rng, cluster, documents)  # type: ignore[arg-type]
        mixed = assemble(rng, cluster, rng.sample(documents, len(documents)))  # type: ignore[arg-type]
        answers = [cluster.ask(cold)]
        made_by = {s.worker for s in answers[0].report.spans if s.kind == "segment"}
        tally.require(len(made_by) > 1, f"round {i}, cold, was not split: {explain(answers[0])}")
        workers[i % len(workers)].flush()  # of what it holds the others hold some
        answers.append(cluster.ask(mixed))
        truth = workers[(i + 1) % len(workers)]
        for kind, prompt, answer in zip(("cold", "mixed"), (cold, mixed), answers, strict=True):
            one = truth.ask(prompt._replace(tenant=f"P3 alone {i} {kind}"))
            tally.error(distance(answer, one), f"round {i}, {kind}, several workers against one")
            tally.require(answer.ids == one.ids, f"round {i}, {kind}: other tokens")
            for outcome in answer.outcomes:
                seen[outcome] = seen.get(outcome, 0) + 1
    tally.note(f"{rounds} rounds; segments {', '.join(f'{o} {c}' for o, c in sorted(seen.items()))}")
    return tally.result()


def model_facts(model: Path) -> tuple[int, str]:
    """Vocabulary and type of a model in a folder. Raises ValueError."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise SessionError(f"{model}: a folder with a config.json is wanted: {e}") from None
    text = config.get("text_config") or config
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16"
    return int(text["vocab_size"]), str(dtype)
