"""One in-process engine with hypic switched on, driven by the checks.

What a check says is a :class:`Prompt`, what it gets is an :class:`Answer` with the distribution of every step. An engine
that dies, hangs or serves without the plugin ends in a :class:`SessionError`, never in a check that waits or passes.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from hypic.check.engines import environ_with, start_engine
from hypic.config import HypicConfig
from hypic.method import Method, parse_methods
from hypic.platform_cpu import CPU_MODE
from hypic.report import BOUGHT, HITS, Report

ANSWER_TIMEOUT = 600.0
"""Seconds after which a request is lost: a busy laptop needs a few, a GPU minutes while Mamba2's kernels are tuned."""

_WATCHED_IN_FULL = 4096
_WATCHED_SAMPLE = 1024

_ENVIRONMENT = {
    # A leak must reach the audit, which names the slots, and not end the scheduler by SGLang's own count.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
}


class SessionError(RuntimeError):
    """The engine cannot be used: it did not start, died, hangs, or runs without hypic."""


class Aborted(RuntimeError):
    """The request was aborted before its end."""


class Prompt(NamedTuple):
    """A request of a check.

    Attributes:
        ids: tokens of the prompt.
        segments: [start, end) of each segment; () is what stock SGLang would be sent.
        new_tokens: length of the answer, greedy.
        tenant: its ``cache_salt``. Tenants share neither artifacts nor radix entries, so a new one finds nothing cached.
        method: the caching method; "" for the session's default.
    """

    ids: Sequence[int]
    segments: Sequence[tuple[int, int]] = ()
    new_tokens: int = 4
    tenant: str = ""
    method: str = ""


class Answer(NamedTuple):
    """An answer and the distributions it was chosen from.

    Attributes:
        ids: its tokens.
        logprobs: [len(ids), watched token ids] float32. Stock SGLang loses the first row of some requests that are
            retracted under overlap scheduling; the rows are those of the last tokens then.
        cached_tokens: as SGLang reports it.
        retractions: how often the request was retracted.
        report: hypic's report.
    """

    ids: list[int]
    logprobs: torch.Tensor
    cached_tokens: int
    retractions: int
    report: Report

    @property
    def outcomes(self) -> list[str]:
        """What became of each segment."""
        return [s.outcome or "" for s in self.report.spans if s.kind == "segment"]

    @property
    def linked(self) -> tuple[tuple[int, int], ...]:
        """The segments that were served from artifacts, or from the radix tree that once got them from there."""
        served = (*HITS, "hit_radix", *BOUGHT)
        return tuple((s.start, s.start + s.tokens) for s in self.report.spans if s.outcome in served)


def distance(a: Any, b: Any) -> float:
    """Largest difference of two answers' logprobs over the steps whose history they share (``ids`` and ``logprobs``)."""
    worst = 0.0
    lost = max(len(a.ids) - len(a.logprobs), len(b.ids) - len(b.logprobs))
    for i in range(min(len(a.ids), len(b.ids))):
        if i >= lost:
            x, y = (one.logprobs[i - len(one.ids)] for one in (a, b))
            worst = max(worst, float((x - y).abs().nan_to_num(nan=torch.inf).max()))
        if a.ids[i] != b.ids[i]:
            return worst if i >= lost else math.inf
    return worst


class Session:
    """A running engine. Use as a context manager; have one alive at a time.

    Args:
        model: path or name of a model.
        config: hypic's settings; it is switched on whatever they say.
        env: further environment variables of the engine's processes.
        flags: fields of SGLang's ServerArgs.

    Raises:
        SessionError: the engine does not start, or runs without hypic.
    """

    def __init__(
        self, model: str | Path, config: HypicConfig, *, env: Mapping[str, str] | None = None, **flags: Any
    ) -> None:
        self.config = msgspec.structs.replace(config, enabled=True)
        self._engine = _start(model, _ENVIRONMENT | self.config.to_env() | dict(env or {}), flags)
        try:
            self._own_crashes()
            self.settings: dict[str, Any] = self._run(self._engine.tokenizer_manager.get_internal_state())[0]
            self.audit()
        except BaseException:
            self.close()
            raise
        model_config = self._engine.tokenizer_manager.model_config
        self.vocab_size: int = model_config.vocab_size
        self.dtype = str(model_config.dtype).removeprefix("torch.")
        self.watched = watched_ids(self.vocab_size)
        """Token ids whose logprobs are compared at every step: all of a small vocabulary, a sample of a large one."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._engine.shutdown()

    # ------------------------------------------------------------------ requests

    def ask(self, prompt: Prompt) -> Answer:
        """The answer to one prompt, alone. Raises SessionError, Aborted."""
        return self._run(self.answer(prompt))

    def ask_together(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """The answers to prompts that are sent at once."""

        async def together() -> list[Answer]:
            return await asyncio.gather(*(self.answer(p) for p in prompts))

        return self._run(together())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine that uses :meth:`answer` and :meth:`abort` on the engine's event loop."""
        return self._run(work)

    async def answer(self, prompt: Prompt, rid: str | None = None) -> Answer:
        """As :meth:`ask`, within :meth:`run`; ``rid`` is what :meth:`abort` takes."""
        from hypic.engine.http.inprocess import agenerate

        request = agenerate(
            self._engine,
            input_ids=list(prompt.ids),
            segments=[list(s) for s in prompt.segments] or None,
            sampling_params={"max_new_tokens": prompt.new_tokens, "temperature": 0.0, "ignore_eos": True},
            extra_key=prompt.tenant or None,
            method=prompt.method or None,
            return_logprob=True,
            token_ids_logprob=self.watched,
            rid=rid,
        )
        return read_answer(await self._patiently(request))

    def method(self, name: str = "") -> Method:
        """A caching method of the session; its default for ""."""
        return method_of(self.config, name)

    def abort(self, rid: str) -> None:
        """What SGLang does when a client disconnects."""
        self._engine.tokenizer_manager.abort_request(rid)

    def abort_all(self) -> None:
        """Abort everything in flight, internal requests included."""
        self._engine.tokenizer_manager.abort_request(abort_all=True)

    # ------------------------------------------------------------------ the scheduler

    def audit(self) -> None:
        """Exact accounting of the idle scheduler (:func:`hypic.engine.audit.audit`), once it is idle.

        Raises:
            AssertionError: naming what leaked or was freed twice.
            SessionError: the scheduler does not become idle, or has no plugin.
        """
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while True:
            self._require_alive()
            try:
                self._engine.collective_rpc("hypic_audit")
                return
            except AssertionError as e:
                text = str(e)
            if "has no attribute 'hypic_audit'" in text:
                raise SessionError("the engine runs without hypic; `hypic doctor` says why")
            if not text.startswith("NotIdle"):
                raise AssertionError(text)
            if time.monotonic() > deadline:
                raise SessionError(f"the scheduler is still busy after {ANSWER_TIMEOUT:.0f} s without requests")
            time.sleep(0.05)

    def dump(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every artifact in the arena, by the id of its segment (:func:`hypic.engine.audit.dump_artifacts`).

        Parts of rank 1 and on are called "T@1" and so forth.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "artifacts.pt")
            self._engine.collective_rpc("hypic_dump", path=path)
            ranks = [torch.load(f"{path}.{r}", weights_only=True) for r in range(self.settings["tp_size"])]
        artifacts: dict[str, dict[str, torch.Tensor]] = ranks[0]
        for rank, others in enumerate(ranks[1:], start=1):
            if others.keys() != artifacts.keys():
                raise SessionError(
                    f"rank {rank} holds {len(others)} artifacts, rank 0 {len(artifacts)}, not the same ones"
                )
            for segment, parts in others.items():
                artifacts[segment] |= {f"{part}@{rank}": value for part, value in parts.items()}
        return artifacts

    def flush(self) -> None:
        """Drop radix tree and artifacts, once the scheduler is idle."""
        with suppress(AssertionError):
            self.audit()
        if not self._run(self._engine.tokenizer_manager.flush_cache()).success:
            raise SessionError("the cache of the idle scheduler was not flushed")

    # ------------------------------------------------------------------ the process

    def _own_crashes(self) -> None:
        """SGLang answers the death of a child by killing this whole process; a check must live to report it."""
        manager = self._engine.tokenizer_manager
        manager.signal_handler_class = _CalmSignalHandler
        manager._subprocess_watchdog.stop()

    def _require_alive(self) -> None:
        for process in self._engine.tokenizer_manager._subprocess_watchdog._processes:
            if not process.is_alive():
                raise SessionError(f"process {process.name} of the engine died (exit code {process.exitcode})")

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._engine.loop.run_until_complete(work)

    async def _patiently(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work``, unless the engine dies or takes longer than ANSWER_TIMEOUT."""
        task = asyncio.ensure_future(work)
        deadline = time.monotonic() + ANSWER_TIMEOUT
        try:
            while not task.done():
                await asyncio.wait([task], timeout=1.0)
                if not task.done():
                    self._require_alive()
                    if time.monotonic() > deadline:
                        raise SessionError(f"no answer within {ANSWER_TIMEOUT:.0f} s")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


class _CalmSignalHandler:
    """Stands in for SGLang's, which kills the process tree on SIGQUIT from a dying child."""

    def __init__(self, _: Any) -> None:
        pass

    def sigterm_handler(self, *_: Any) -> None:
        raise SystemExit(143)

    def running_phase_sigquit_handler(self, *_: Any) -> None:
        pass


def _ignore_signal(*_: Any) -> None:
    pass


def _start(model: str | Path, env: Mapping[str, str], flags: dict[str, Any]) -> Any:
    with environ_with(env):
        _activate_here()
        try:
            if os.environ.get(CPU_MODE) == "1":
                return start_engine(model, **flags)
            from sglang.srt.entrypoints.engine import Engine

            return Engine(
                model_path=str(model),
                **{"log_level": "error", "skip_server_warmup": True, **flags},
                custom_sigquit_handler=_ignore_signal,
            )
        except (SessionError, KeyboardInterrupt):
            raise
        except BaseException as e:  # SGLang also exits
            raise SessionError(f"the engine did not start: {type(e).__name__}: {e}") from e


def _activate_here() -> None:
    """Put the hooks of the HTTP process in force, also where SGLang has loaded its plugins before hypic was switched on."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    from hypic.engine import plugin

    if plugin.table().problems():
        plugin.activate()
        HookRegistry.apply_hooks()
    plugin.require_applied()


def method_of(config: HypicConfig, name: str = "") -> Method:
    """A caching method by its name; the configuration's default for ""."""
    methods = parse_methods(config.methods, config.seam_window)
    return methods[name] if name else next(iter(methods.values()))


def watched_ids(vocab_size: int) -> list[int]:
    """Token ids whose logprobs are compared."""
    if vocab_size <= _WATCHED_IN_FULL:
        return list(range(vocab_size))
    return sorted({i * vocab_size // _WATCHED_SAMPLE for i in range(_WATCHED_SAMPLE)})


def read_answer(out: dict[str, Any]) -> Answer:
    """What SGLang gives out for a request of a check. Raises Aborted."""
    meta = out["meta_info"]
    if (meta.get("finish_reason") or {}).get("type") == "abort":
        raise Aborted(meta["finish_reason"].get("message") or "")
    rows = [[entry[0] for entry in step] for step in meta["output_token_ids_logprobs"]]
    return Answer(
        ids=list(out["output_ids"]),
        logprobs=torch.tensor(rows, dtype=torch.float32),
        cached_tokens=meta["cached_tokens"],
        retractions=meta.get("num_retractions", 0),
        report=msgspec.convert(meta["hypic"], Report),
    )
