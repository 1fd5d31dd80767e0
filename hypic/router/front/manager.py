"""SGLang's TokenizerManager without a scheduler: each prompt goes to the worker that the router names, over HTTP.

Everything before a prompt is sent, and everything after its answer is there, is SGLang's own code: validation, templates,
tokenising, batches, ``n`` > 1, streams, disconnects. The hooks of :mod:`hypic.engine.http` are in force in this process, so
a prompt arrives here with its plan, and its report leaves as it does from a worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import aiohttp
import fastapi
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from hypic.config import HypicConfig
from hypic.router.actions import Prompt
from hypic.router.front.everywhere import Everywhere
from hypic.router.front.placing import beginning, plan_of, segments, unshared
from hypic.router.front.segments import RoutedSegments
from hypic.router.front.wire import Assembly, WorkerError, body, refusal
from hypic.router.front.workers import Workers
from hypic.router.schedule import NoWorkers
from hypic.router.service import Router, Ticket, WorkerLost
from hypic.segment import RequestSpans

logger = logging.getLogger(__name__)

TRIES = 4
"""Workers that a prompt is given to, one after the other, while nothing of its answer went out."""
_ABORTED_WITHIN = 10.0
REPORT = "hypic"


class Unroutable(ValueError):
    """A request that the router cannot pass on."""

    status_code = 501


class _Flight:
    """A prompt on its way."""

    def __init__(self, state: Any, tokenized: Any, combine: str | None):
        self.state, self.tokenized, self.combine = state, tokenized, combine
        self.rid = tokenized.rid
        self.arrived = time.monotonic()
        self.ticket: Ticket | None = None
        self.shown = False
        """Something of the answer went out to the client."""
        self.task: asyncio.Task[None]


class RouterManager(Everywhere, TokenizerManager):
    """Args: SGLang's, and the router, the client to its workers, and the plugin's settings."""

    def __init__(self, server_args: Any, port_args: Any, *, router: Router, workers: Workers, config: HypicConfig):
        self.router, self.workers, self._config = router, workers, config
        self._flights: dict[str, _Flight] = {}
        self._together: dict[str, str] = {}
        """The worker that computed a prompt for its n choices, by the client's request id."""
        self._background: set[asyncio.Task[Any]] = set()
        self.outcomes: Counter[str] = Counter()
        self.unshared: Counter[str] = Counter()
        """Prompts whose segments are compiled where they are linked, by reason."""
        self.retries = 0
        self._adapter_names, self._renewed = {}, {}
        from hypic.router.front.metrics import RouterMetrics

        # Workers are forked from a process that has imported this module, and they say where metrics are shared between
        # processes before prometheus_client is imported, which decides then.
        self.metrics = RouterMetrics(self)
        super().__init__(server_args, port_args)
        self.__dict__.pop("update_lora_adapter_communicator")  # ours instead of SGLang's, which awaits a scheduler
        self.hypic_segments = RoutedSegments(self, config)
        router.reachable = self.reachable

    @property
    def running(self) -> int:
        """Prompts under way."""
        return len(self._flights)

    async def close(self) -> None:
        for flight in list(self._flights.values()):
            flight.task.cancel()
        await asyncio.gather(*(f.task for f in self._flights.values()), *self._background, return_exceptions=True)
        await self.router.close()
        await self.workers.close()

    # ------------------------------------------------------------------ instead of a scheduler

    def init_ipc_channels(self, port_args: Any) -> None:
        self.send_to_scheduler = self.recv_from_detokenizer = self.tokenizer_ipc_name = None
        self.load_snapshot_reader = None

    def auto_create_handle_loop(self) -> None:
        """Nothing to read from; signals are the server's."""

    def alive(self) -> Mapping[str, str]:
        return {name: hello.http for name, hello in self.router.coordinator.hellos().items()}

    async def _tokenize_one_request(self, obj: Any) -> Any:
        if what := refusal(obj):
            text = f"the router does not pass on {what}; ask a worker directly (GET /workers lists them)"
            raise Unroutable(text) if getattr(obj, "stream", False) else fastapi.HTTPException(501, text)
        return await super()._tokenize_one_request(obj)

    def _should_use_batch_tokenization(self, batch_size: int, requests: Any) -> bool:
        return False  # each prompt is checked, and placed, by itself

    def _send_one_request(self, tokenized_obj: Any) -> None:
        tokenized_obj.time_stats.set_api_server_dispatch_time()
        state = self.rid_to_state[tokenized_obj.rid]
        logical = self.child_rid_to_logical_rid.get(tokenized_obj.rid)
        flight = _Flight(state, tokenized_obj, self._together.get(logical or ""))
        flight.task = asyncio.create_task(self._serve(flight, logical))
        self._flights[flight.rid] = flight
        flight.task.add_done_callback(lambda _: self._flights.pop(flight.rid, None))
        state.dispatched = True
        tokenized_obj.time_stats.set_api_server_dispatch_finish_time()

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        if not isinstance(obj, AbortReq):
            raise Unroutable(f"the router does not pass on {type(obj).__name__}; ask a worker directly")
        for flight in list(self._flights.values()):
            if obj.abort_all or flight.rid == obj.rid:
                self._abort(flight)

    async def _handle_abort_finish_reason(
        self, out: dict[str, Any], state: Any, is_stream: bool
    ) -> dict[str, Any] | None:
        reason = out["meta_info"]["finish_reason"]
        status = reason.get("status_code")
        if not is_stream and reason.get("router") and status not in (None, 400, 500, 503):
            raise fastapi.HTTPException(status, reason["message"])
        if isinstance(status, int):  # what came as JSON is what the OpenAI endpoints know an error of the engine by
            with suppress(ValueError):
                reason["status_code"] = HTTPStatus(status)
        return await super()._handle_abort_finish_reason(out, state, is_stream)

    def _remove_req_state(self, rid: str, lifecycle_id: object | None = None) -> Any:
        self._together.pop(rid, None)
        return super()._remove_req_state(rid, lifecycle_id)

    # ------------------------------------------------------------------ one prompt

    async def _serve(self, flight: _Flight, logical: str | None) -> None:
        state = flight.state
        assembly = Assembly(state, bool(state.obj.stream), self.incremental_streaming_output)
        try:
            for _ in range(TRIES):
                try:
                    await self._attempt(flight, assembly, logical)
                    return
                except (WorkerLost, aiohttp.ClientError, OSError) as e:
                    if flight.ticket is not None:
                        if not isinstance(e, WorkerLost):
                            self.router.disown(flight.ticket.worker)
                        self.router.end(flight.ticket, f"{flight.ticket.worker} was lost")
                    logger.warning("request %s: worker lost (%r)", flight.rid, e)
                    if flight.shown:
                        lost = f"worker {flight.ticket.worker if flight.ticket else ''} was lost after"
                        raise WorkerError(
                            500, f"{lost} {len(state.output_ids)} tokens; send the request again"
                        ) from None
                    self.retries += 1
                    assembly.start_over()
            raise WorkerError(503, f"{TRIES} workers were lost one after the other")
        except NoWorkers as e:
            self._fail(flight, WorkerError(503, str(e)))
        except WorkerError as e:
            self._fail(flight, e)
        except asyncio.CancelledError:
            if flight.ticket is not None:
                self.router.cancel(flight.ticket)
            raise
        except Exception as e:
            logger.exception("request %s", flight.rid)
            self._fail(flight, WorkerError(500, f"Internal server error: {e}"))

    async def _attempt(self, flight: _Flight, assembly: Assembly, logical: str | None) -> None:
        """Give it to one worker and pass on what comes back."""
        flight.ticket = None
        plan = plan_of(flight.tokenized)
        prompts = self._prompts(flight, plan)
        combine = self.router.holder(prompts) if plan.name and prompts else flight.combine
        begins = beginning(flight.tokenized, plan, flight.state.obj.lora_path)
        total = len(flight.tokenized.input_ids)
        flight.ticket = ticket = await self.router.submit(flight.rid, prompts, total, combine, flight.arrived, begins)
        self.metrics.forward.observe(time.monotonic() - flight.arrived)
        if logical is not None and logical in self.rid_to_state:
            self._together.setdefault(logical, ticket.worker)
        reading = asyncio.create_task(self._read(flight, ticket, assembly))
        lost = asyncio.create_task(ticket.lost.wait())
        try:
            await asyncio.wait((reading, lost), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise WorkerLost(ticket.worker)
            reading.result()
        finally:
            for task in (reading, lost):
                task.cancel()
            await asyncio.gather(reading, lost, return_exceptions=True)

    async def _read(self, flight: _Flight, ticket: Ticket, assembly: Assembly) -> None:
        first = True
        async for chunk in self.workers.generate(ticket.http, body(flight.state.obj, flight.tokenized, ticket.request)):
            if first:
                first = False
                self.router.first_token(ticket)
                self.metrics.first_token.observe(time.monotonic() - flight.arrived)
                if flight.state.time_stats.first_token_time == 0.0:
                    flight.state.time_stats.set_first_token_time()
            reason = chunk["meta_info"].get("finish_reason")
            if reason is not None:
                self._report(chunk["meta_info"], ticket, reason)
            if (out := assembly.add(chunk)) is not None:
                self._give(flight, out)

    def _report(self, meta: dict[str, Any], ticket: Ticket, reason: Any) -> None:
        """It ended: note that, and put the router's part into the report, which leaves as it does from a scheduler."""
        aborted = isinstance(reason, dict) and reason.get("type") == "abort"
        self._over(ticket, f"aborted {reason.get('status_code') or ''}".strip() if aborted else "answered")
        if isinstance(report := meta.get(REPORT), dict):
            routed = {"worker": ticket.worker, "timeline": ticket.timeline.for_report()}
            meta[REPORT] = [json.dumps({**report, "router": routed})]

    def _prompts(self, flight: _Flight, plan: RequestSpans) -> list[Prompt]:
        """Segments that workers may compile for each other."""
        adapter = self.adapter_name(flight.tokenized.lora_id)
        if why := unshared(flight.tokenized, plan, adapter):
            self.unshared[why] += 1
            return []
        if not (identity := self.router.coordinator.identity):
            return []
        costs, methods = self.router.measured.costs, self.hypic_segments.methods
        return segments(flight.tokenized, plan, identity, methods, self._config.min_segment, costs, adapter)

    # ------------------------------------------------------------------ ends

    def _give(self, flight: _Flight, out: dict[str, Any]) -> None:
        state = flight.state
        if state.finished:
            state.time_stats.set_finished_time()
            out["meta_info"]["e2e_latency"] = state.time_stats.get_e2e_latency()
            if self.rid_to_state.get(flight.rid) is state:
                self._remove_req_state(flight.rid)
            if self.enable_lora and state.obj.lora_path:
                self._do(self.lora_registry.release(state.obj.lora_id))
        flight.shown = flight.shown or bool(state.obj.stream)
        state.out_list.append(out)
        state.event.set()

    def _fail(self, flight: _Flight, error: WorkerError) -> None:
        """End with an error, in the form that SGLang's handlers know from their scheduler."""
        outcome = f"error {error.status}" if error.status else "aborted"
        if flight.ticket is not None:
            self._over(flight.ticket, outcome)
        else:
            self.outcomes[outcome] += 1
        state = flight.state
        state.finished = True
        reason = {"type": "abort", "message": str(error), "router": True}
        if error.status:
            reason["status_code"] = error.status
        meta = {
            "id": flight.rid,
            "finish_reason": reason,
            "prompt_tokens": len(flight.tokenized.input_ids),
            "completion_tokens": len(state.output_ids),
            "cached_tokens": 0,
            "reasoning_tokens": 0,
            "weight_version": self.config_value("weight_version"),
        }
        self._give(flight, {"text": state.get_text(), "output_ids": state.output_ids.copy(), "meta_info": meta})

    def _over(self, ticket: Ticket, outcome: str) -> None:
        self.router.end(ticket, outcome)
        self.outcomes[outcome] += 1

    def _abort(self, flight: _Flight) -> None:
        ticket = flight.ticket
        if ticket is None:  # it waits for its place
            flight.task.cancel()
            self._fail(flight, WorkerError(0, "Abort before it was placed"))  # without a status, as SGLang's own aborts
            return
        self.router.cancel(ticket)
        self._do(self.workers.abort(ticket.http, flight.rid))
        asyncio.get_running_loop().call_later(_ABORTED_WITHIN, flight.task.cancel)

    def _do(self, what: Any) -> None:
        task = asyncio.ensure_future(what)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
