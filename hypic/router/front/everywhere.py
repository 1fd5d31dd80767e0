"""What goes to all workers: SGLang's control methods, answered by asking each worker's own endpoint.

SGLang's endpoints call these, so who may call them is decided where it always is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import FlushCacheReqOutput, LoadLoRAAdapterReqInput, LoRAUpdateOutput

from hypic.router.front.workers import Workers
from hypic.router.service import Router


class Everywhere:
    """Mixed into SGLang's TokenizerManager."""

    workers: Workers
    router: Router

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
            return [LoRAUpdateOutput(success=False, error_message=failed)]
        loaded = next((a[1].get("loaded_adapters") for a in answers.values() if isinstance(a[1], dict)), None)
        return [LoRAUpdateOutput(success=True, loaded_adapters=loaded)]

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
        failed = _failures(await self._ask("POST", "/update_weights_from_disk", body))
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
