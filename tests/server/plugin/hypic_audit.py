"""A second plugin for the server under test: `/server_info` tells what the exact accounting of the scheduler says.

SGLang's HTTP server leaves the RPC socket unbound that the in-process engine asks. Nothing in hypic knows of this file.
"""

from __future__ import annotations

from typing import Any


def activate() -> None:
    """Entry point of `sglang.srt.plugins`; found because the test puts this folder on the server's PYTHONPATH."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", add_audit, HookType.AFTER)


def add_audit(result: Any, scheduler: Any, *_: Any) -> None:
    from hypic.engine.audit import NotIdle, audit

    try:
        audit(scheduler)
        verdict = "ok"
    except (NotIdle, AssertionError) as e:
        verdict = str(e)
    result.internal_state["hypic_audit"] = verdict
