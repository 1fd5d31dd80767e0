"""Hooks on SGLang's start-up and on its scheduler loop; thin, the work is in LinkManager and LinkRuntime."""

from __future__ import annotations

import dataclasses
import logging
import select
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import zmq

from hypic.artifact.arena import Arena
from hypic.artifact.store import ArtifactStore
from hypic.config import from_env, unread
from hypic.engine import audit, keys, model, objections, support
from hypic.engine.families import family
from hypic.engine.forward import LinkRuntime
from hypic.engine.manager import LinkManager
from hypic.engine.memory import arena_bytes, none_fits
from hypic.engine.metrics import EngineMetrics
from hypic.engine.request import compile_of, link_of

if TYPE_CHECKING:
    from hypic.engine.cluster.exchange import Exchange

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------- start-up


def check_server_args(_: Any, args: Any) -> None:
    """After ServerArgs.__post_init__: the first code of SGLang that runs with the hooks and may still stop the server."""
    from hypic.engine.plugin import require_applied

    require_applied()
    if unknown := unread():
        logger.warning("hypic: ignored environment variables that it does not have: %s", ", ".join(unknown))
    try:
        support.check_server_args(args, config := from_env())
        objections.check_model(args, config)
    except support.Unsupported as refused:
        refused.server_args = args
        raise


def allocate_arena(model_runner: Any, *_: Any, **__: Any) -> None:
    """Before the KV pools are sized: take the arena's memory, so that SGLang's plan counts it as used. Raises Unsupported."""
    if model_runner.is_draft_worker:
        return
    config, device = from_env(), model_runner.device
    nbytes = arena_bytes(config, model_runner)
    buffer = None
    if config.router and device == "cpu":
        from hypic.engine.cluster.windows import shared_buffer

        buffer = shared_buffer(nbytes)
    model_runner.hypic = LinkRuntime(Arena(nbytes, device, buffer))
    logger.info("hypic: artifact arena of %.1f MiB on %s", nbytes / 2**20, model_runner.device)


def attach_runtime(_: Any, model_runner: Any) -> None:
    """After the attention backends exist: shapes of the artifact, and the start-up self-check."""
    if model_runner.is_draft_worker:
        return
    runtime: LinkRuntime = model_runner.hypic
    config = from_env()
    layout = model.read_layout(model_runner, config.state_dtype)
    support.check_methods(config, hybrid=layout.linear is not None)
    rotary = None
    if config.start_check:
        rotary, runtime.off = model.prove(model_runner, layout)
    elif layout.full is not None:
        from hypic.engine.relocation import find_rotary

        rotary = find_rotary(model_runner.model, layout.full.layer_ids, model_runner.model_config.context_len)
    runtime.attach(model_runner, layout, rotary)
    if layout.linear is not None and runtime.off is None:
        linear = family(layout.linear.family)
        runtime.solved = linear.keeps_solved_chunks(model_runner, layout.linear, proof=config.start_check)
        if runtime.solved:
            logger.info("hypic: T of interiors is made of what SGLang's own pass over them solves")
    smallest = layout.payload_bytes(max(config.min_segment - config.seam_window, 0))
    if smallest > (arena := runtime.arena.buffer.numel()):
        if not config.memory:
            raise support.Unsupported(none_fits(arena, smallest, config.min_segment))
        logger.warning(
            "hypic: not one segment fits into the arena of %d bytes (one of %d tokens takes %d): raise --hypic-memory",
            arena, config.min_segment, smallest,
        )  # fmt: skip
    latent = layout.full is not None and not layout.full.d_v
    if latent and config.attention == "seam":
        raise model.Unsupported(
            "--hypic-attention seam with latent attention (MLA): its kernel reads K and V; use expanded"
        )
    auto = "seam" if model_runner.device == "cuda" and not latent else "expanded"
    runtime.seam_attention = (auto if config.attention == "auto" else config.attention) == "seam"
    if runtime.off is not None:
        logger.error("hypic: position-independent caching is off, requests are served natively: %s", runtime.off)


def attach_manager(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """After Scheduler.__init__: everything it needs is loaded."""
    from hypic.engine import control
    from hypic.engine.plugin import require_applied

    require_applied()
    config, runner = from_env(), scheduler.tp_worker.model_runner
    runtime: LinkRuntime = runner.hypic
    args = scheduler.server_args
    identity = keys.KeyIdentity(
        fingerprint=keys.model_fingerprint(args.model_path, runner.model_config.hf_config, args.load_format),
        dtype=str(runner.dtype),
        tp_rank=scheduler.ps.tp_rank,
        tp_size=scheduler.ps.tp_size,
        method=keys.METHOD,
        seam_window=config.seam_window,
    )
    labels = None
    if args.enable_metrics:
        labels = {"model_name": args.served_model_name, "tp_rank": str(scheduler.ps.tp_rank)}
    manager = LinkManager(
        scheduler,
        config,
        ArtifactStore(runtime.arena),
        runtime.layout,
        identity,
        lambda *what: spawn_compile(scheduler, *what),
        EngineMetrics(labels),
        f"off: {runtime.off}" if runtime.off else None,
    )
    scheduler.hypic = manager
    if args.enable_lora:
        for ref in runner.lora_manager.lora_refs.values():
            manager.learn_adapter(ref.lora_id, ref.lora_name, ref.lora_path or "")
    control.serve(scheduler, manager)
    if config.router:
        join_cluster(scheduler, manager)
    scheduler.hypic_audit = lambda: audit.audit(scheduler)
    scheduler.hypic_dump = lambda path: audit.dump_artifacts(scheduler, path)

    runtime.header = manager.header_of
    runtime.weights_listeners.append(manager.new_weights)


def join_cluster(scheduler: Any, manager: LinkManager) -> None:
    """Make this server a worker of the router that the settings name. Raises InsecureError or zmq.ZMQError."""
    from hypic.engine.cluster.exchange import Exchange
    from hypic.engine.cluster.membership import Membership
    from hypic.engine.cluster.movers import mover_for
    from hypic.engine.cluster.sharing import Sharing
    from hypic.router.messages import Shape
    from hypic.router.transport.security import curve_of, public_key

    config, args, layout = manager.config, scheduler.server_args, manager.layout
    shape = Shape(
        artifact_bytes=layout.payload_bytes(0) + len(manager.header(array("q"), "")),
        artifact_token_bytes=layout.kv_token_bytes,
        seam_window=manager.default.seam_window,
        min_segment=config.min_segment,
        forward_tokens=max(args.chunked_prefill_size or 0, 0),
    )
    member = Membership(
        router=config.router,
        worker=config.worker,
        data=config.data,
        http=f"http://{args.host}:{args.port}",
        capacity=manager.store.capacity,
        shape=shape,
        curve=curve_of(config),
        router_key=public_key(Path(config.router_key)) if config.router_key else b"",
        rank=manager.identity.tp_rank,
        ranks=manager.identity.tp_size,
    )
    exchange = Exchange(
        member, manager.shared_identity, mover_for(manager.store.arena.buffer, config.data, config.transport)
    )
    exchange.start()
    global _exchange
    _exchange = exchange
    manager.sharing = Sharing(manager, exchange)
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.register(exchange.wake_fd, zmq.POLLIN)


def spawn_compile(scheduler: Any, tokens: array, rid: str, parent: Any | None, adapter: str) -> Any:
    """An internal request that prefills one segment alone: no radix sharing, and no token of output.

    With one, SGLang would decode it once more where passes overlap, in front of the link that waits for it, and count it as
    running until something else is decoded.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=0, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    req = Req(
        rid,
        "",
        tokens,
        params,
        lora_id=adapter or None,
        eos_token_ids=scheduler.model_config.hf_eos_token_id,
        vocab_size=scheduler.model_config.vocab_size,
        priority=parent.priority if parent is not None else _no_priority(scheduler),
        extra_key=rid,
    )
    req.tokenizer = scheduler.tokenizer
    req.skip_radix_cache_insert = True
    scheduler.init_req_max_new_tokens(req)
    return req


def _no_priority(scheduler: Any) -> int | None:
    """The priority of a request that names none, as SGLang has it."""
    if not scheduler.enable_priority_scheduling:
        return None
    return sys.maxsize if scheduler.schedule_low_priority_values_first else -sys.maxsize - 1


def hide_compiles_from_load(_: Any, scheduler: Any) -> None:
    """A held request stands for its segments' tokens; with their compiles they would be reported twice."""

    def clients(reqs: list[Any]) -> list[Any]:
        return [r for r in reqs if compile_of(r) is None]

    scheduler.load_inquirer = dataclasses.replace(
        scheduler.load_inquirer,
        get_waiting_queue=lambda: clients(scheduler.waiting_queue),
        get_running_batch=lambda: SimpleNamespace(reqs=clients(scheduler.running_batch.reqs)),
        get_chunked_req=lambda: None if compile_of(scheduler.chunked_req) else scheduler.chunked_req,
    )


# ---------------------------------------------------------------------- the scheduler loop


def add_request_to_queue(original: Callable[..., None], scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if args:
        kwargs["is_retracted"] = args[0]
    scheduler.hypic.enqueue(original, req, **kwargs)


_exchange: Exchange | None = None
"""This process's, for the one class of SGLang that has no way to its scheduler."""


def take_events(received: list[Any] | None, *_: Any) -> list[Any] | None:
    """At rank 0: events come in with clients' requests, in front of those that may need what they bring; SGLang hands both
    to all ranks."""
    if _exchange is None or received is None:
        return None
    return [*_exchange.take(), *received]


def handle_events(scheduler: Any, recv_reqs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """At every rank: events are ours to handle, the rest is SGLang's."""
    sharing = scheduler.hypic.sharing
    if sharing is None or not recv_reqs:
        return None
    from hypic.engine.cluster.events import ClusterEvent

    requests = []
    for received in recv_reqs:
        if isinstance(received, ClusterEvent):
            sharing.handle(received)
        else:
            requests.append(received)
    return (scheduler, requests), {}


def wait_for_artifacts(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    """Nothing can run, and what is held waits for other workers: leave them the processor."""
    sharing = scheduler.hypic.sharing
    if sharing is None or not sharing.busy or scheduler.is_fully_idle():
        return
    if scheduler.idle_sleeper is not None:
        scheduler.idle_sleeper.poller.poll(100)
    else:
        select.select([sharing.exchange.wake_fd], [], [], 0.001)


def before_scheduling(scheduler: Any, *_: Any, **__: Any) -> None:
    scheduler.hypic.sweep()


def after_batch_result(_: Any, scheduler: Any, batch: Any, result: Any) -> None:
    if batch.forward_mode.is_extend():
        scheduler.hypic.on_batch_result(batch)


def abort_on_queued_limit(original: Callable[..., bool], scheduler: Any, recv_req: Any) -> bool:
    """The queue limit counts clients' requests, and pushes out only those (priority scheduling)."""
    queue = scheduler.waiting_queue
    clients = [r for r in queue if compile_of(r) is None]
    if scheduler.max_queued_requests is None or len(clients) == len(queue):
        return original(scheduler, recv_req)
    scheduler.waiting_queue = clients
    try:
        return original(scheduler, recv_req)
    finally:
        left = {id(r) for r in scheduler.waiting_queue}
        scheduler.waiting_queue = [r for r in queue if compile_of(r) is not None or id(r) in left]


def abort_request(original: Callable[..., None], scheduler: Any, recv_req: Any) -> None:
    """While SGLang compares ids, compile requests have an empty one, which only "abort all" matches."""
    compiles = scheduler.hypic.compile_requests()
    names = [r.rid for r in compiles]
    for r in compiles:
        r.rid = ""
    try:
        original(scheduler, recv_req)
    finally:
        for r, rid in zip(compiles, names, strict=True):
            r.rid = rid


def flush_cache(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Compiles that nobody waits for must not make a server busy that is idle for its clients: SGLang dies of it when
    it flushes after a weight update."""
    _drop_lone_compiles(scheduler)
    flushed = original(scheduler, *args, **kwargs)
    if flushed:
        scheduler.hypic.flush()
    return flushed


def _drop_lone_compiles(scheduler: Any) -> None:
    """If only compile requests are in flight: forget them."""
    manager = scheduler.hypic
    if not manager.compiling or manager.held or any(compile_of(r) is None for r in scheduler.waiting_queue):
        return
    if any(compile_of(r) is None and not r.finished() for r in manager.in_flight()):
        return
    _drop_compiles(scheduler, lambda _: True)


def _drop_compiles(scheduler: Any, which: Callable[[Any], bool]) -> None:
    """Take requests back by SGLang's own pause, forget those compile requests; the others go on from the queue."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    paused = scheduler._engine_paused
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    scheduler._engine_paused = paused
    scheduler.waiting_queue = [r for r in scheduler.waiting_queue if compile_of(r) is None or not which(r)]
    scheduler.hypic.sweep()


def after_load_adapter(result: Any, scheduler: Any, recv_req: Any) -> None:
    if result.success:
        scheduler.hypic.learn_adapter(recv_req.lora_id, recv_req.lora_name, recv_req.lora_path)


def unload_adapter(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Drop what was compiled under the adapter, and before that what still is: SGLang unloads it once no client uses it,
    and dies of a batch that needs it."""
    manager, adapter = scheduler.hypic, recv_req.lora_id
    if any(r.lora_id == adapter for r in manager.compile_requests()):
        _drop_compiles(scheduler, lambda r: r.lora_id == adapter)
    result = original(scheduler, recv_req)
    manager.drop_adapter(adapter)
    return result


def after_new_weights(_: Any, worker: Any, *__: Any, **___: Any) -> None:
    _new_weights(worker, "")


def after_weights_from_disk(result: tuple[bool, str], worker: Any, recv_req: Any) -> None:
    """One that failed leaves weights that no other server has."""
    _new_weights(worker, recv_req.model_path if result[0] else f"failed: {recv_req.model_path}")


def _new_weights(worker: Any, source: str) -> None:
    for listener in worker.model_runner.hypic.weights_listeners:
        listener(source)


def get_token_ids_logprobs(
    original: Callable[..., Any],
    logprobs: torch.Tensor,
    token_ids_logprobs: list[list[int] | None],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Rows that asked for nothing (compile requests among them) get an empty tensor, which SGLang can convert, not a list."""
    return original(logprobs, [ids or [] for ids in token_ids_logprobs], *args, **kwargs)


def stream_output(
    original: Callable[..., None], streamer: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None
) -> None:
    if any(getattr(r, "hypic", None) is not None for r in reqs):
        reqs = [r for r in reqs if compile_of(r) is None]
        for r in reqs:
            if (link := link_of(r)) is not None and link.manager is not None:
                link.manager.before_output(r, link)
    original(streamer, reqs, return_logprob, skip_req)
