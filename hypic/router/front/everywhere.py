"""What goes to all workers: SGLang's control methods, answered by asking each worker's own endpoint.

SGLang's endpoints call these, so who may call them is decided where it always is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import FlushCacheReqOutput, LoadLoRAAdapterReqInput, LoRAUpdateOutput

from hypic.engine.keys import adapter_name
from hypic.router import messages as m
from hypic.router.front.segments import RoutedSegments
from hypic.router.front.workers import Workers
from hypic.router.service import Router

logger = logging.getLogger(__name__)

UPDATE = "/update_weights_from_disk"


class Everywhere:
    """Mixed into SGLang's TokenizerManager."""

    workers: Workers
    router: Router
    server_args: Any
    lora_registry: Any
    hypic_segments: RoutedSegments
    _adapter_names: dict[str, str]
    """By SGLang's id in this process."""
    _update: dict[str, Any] | None = None
    """The last update of weights from disk that all workers took: one that is started again has the weights of its launch."""
    _launched: bytes = b""
    """The identity of those, before the first update."""
    _renewed: dict[bytes, bool]
    """Runs of workers that were given the update, once each, and whether they took it."""

    def alive(self) -> Mapping[str, str]:
        """HTTP addresses of the workers by name."""
        raise NotImplementedError

    async def flush_cache(self, timeout_s: float | None = None) -> FlushCacheReqOutput:
        answers = await self._ask("POST", f"/flush_cache?timeout={timeout_s or 0.0}")
        self.router.coordinator.cluster.prefixes.clear()
        failed = _failures(answers)
        return FlushCacheReqOutput(success=not failed, message=failed)

    async def update_lora_adapter_communicator(self, obj: Any) -> list[LoRAUpdateOutput]:
        """SGLang's own (un)loading goes on from here with the router's list of adapters."""
        if isinstance(obj, LoadLoRAAdapterReqInput):
            body = {"lora_name": obj.lora_name, "lora_path": obj.lora_path, "pinned": bool(obj.pinned)}
            answers = await self._ask("POST", "/load_lora_adapter", body)
        else:
            answers = await self._ask("POST", "/unload_lora_adapter", {"lora_name": obj.lora_name})
        if failed := _failures(answers):
            if isinstance(obj, LoadLoRAAdapterReqInput):  # nowhere, then: it may be tried again
                some = {name: http for name, http in self.alive().items() if answers.get(name, (0,))[0] == 200}
                await self.workers.ask_all(some, "POST", "/unload_lora_adapter", {"lora_name": obj.lora_name})
            return [LoRAUpdateOutput(success=False, error_message=failed)]
        self.adapter_name(obj.lora_id, obj if isinstance(obj, LoadLoRAAdapterReqInput) else None)
        loaded = next((a[1].get("loaded_adapters") for a in answers.values() if isinstance(a[1], dict)), None)
        return [LoRAUpdateOutput(success=True, loaded_adapters=loaded)]

    def adapter_name(self, adapter: str | None, ref: Any = None) -> str:
        """What workers call an adapter of ours; "" if they cannot agree, or for none. Its files are looked at once.

        Args:
            ref: it, while SGLang has not yet written it down.
        """
        if not adapter:
            return ""
        if adapter not in self._adapter_names:
            known = self.lora_registry.get_all_adapters().values()
            ref = ref or next((r for r in known if r.lora_id == adapter), None)
            self._adapter_names[adapter] = adapter_name(ref.lora_name, ref.lora_path or "") if ref else ""
        return self._adapter_names[adapter]

    async def _load_adapters(self, http: str) -> set[str]:
        """Have a worker load those that were loaded while we served, if it has not. Returns their names."""
        if not self.server_args.enable_lora:
            return set()
        given = {ref.lora_name for ref in self.server_args.lora_paths or ()}
        later = {n: ref for n, ref in self.lora_registry.get_all_adapters().items() if n not in given}
        if later:
            _, models = (await self.workers.ask_all({"": http}, "GET", "/v1/models"))[""]
            there = {model["id"] for model in models["data"]} if isinstance(models, dict) else set()
            for name in later.keys() - there:
                body = {"lora_name": name, "lora_path": later[name].lora_path, "pinned": bool(later[name].pinned)}
                status, answer = (await self.workers.ask_all({"": http}, "POST", "/load_lora_adapter", body))[""]
                if status != 200:
                    logger.warning("the worker at %s did not load adapter %s: %s", http, name, answer)
        return set(later)

    async def reachable(self, hello: m.Hello) -> bool:
        """Whether a worker answers; then it has the cluster's weights and adapters, and knows the names of all segments."""
        http = hello.http
        if not await self.workers.answers(http):
            return False
        if self._update is not None and hello.identity == self._launched:
            if hello.epoch not in self._renewed:
                status, answer = (await self.workers.ask_all({"": http}, "POST", UPDATE, self._update))[""]
                self._renewed[hello.epoch] = status == 200
                if status != 200:
                    logger.error(
                        "worker %s did not take the cluster's weights, and is refused: %s", hello.worker, answer
                    )
            if self._renewed[hello.epoch]:
                return False  # it introduces itself anew, as what it is now
        loaded = None
        while loaded != (now := await self._load_adapters(http)):
            loaded = now
            if not await self.hypic_segments.introduce(http):
                return False
        return True

    async def get_internal_state(self) -> list[dict[Any, Any]]:
        answers = await self._ask("GET", "/server_info")
        return [
            {"worker": name, **state}
            for name, (_, body) in answers.items()
            if isinstance(body, dict)
            for state in body.get("internal_states", ())
        ]

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[bool, str, int | None]:
        fields = ("model_path", "load_format", "abort_all_requests", "weight_version", "flush_cache")
        body = {f: v for f in fields if (v := getattr(obj, f, None)) is not None}
        before = self.router.coordinator.identity
        answers = await self._ask("POST", UPDATE, body)
        hellos = self.router.coordinator.hellos()
        late = {name: h.http for name, h in hellos.items() if h.identity == before and name not in answers}
        if late:  # started again meanwhile
            answers |= await self.workers.ask_all(late, "POST", UPDATE, body)
        if not (failed := _failures(answers)):
            self._launched, self._update = self._launched or before, body
        return not failed, failed or "Succeeded to update model weights on all workers.", None

    async def start_profile(self, req: Any = None) -> None:
        await self._ask("POST", "/start_profile")

    async def stop_profile(self) -> None:
        await self._ask("POST", "/stop_profile")

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, tuple[int, Any]]:
        return await self.workers.ask_all(self.alive(), method, path, body)


def _failures(answers: Mapping[str, tuple[int, Any]]) -> str:
    """The workers that failed with what they said; "" if none did."""
    if not answers:
        return "no worker is alive"

    def text(body: Any) -> str:
        if isinstance(body, dict):
            return str(body.get("error_message") or body.get("message") or body.get("error") or body)
        return str(body).strip()

    return "; ".join(f"{name}: {text(body)}" for name, (status, body) in answers.items() if status != 200)
