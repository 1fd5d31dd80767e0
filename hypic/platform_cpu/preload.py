"""What every scheduler does before it looks at its model, done once by the process that they are forked from.

SGLang imports all of its model classes to find one, hooks import their targets, and each hook that SGLang applies is sought
in all modules: seconds of each start. The hooks of CPU mode are the same for all engines and are applied here; those of the
plugin depend on the engine's environment and are not. Imported by the fork server, and nowhere else.
"""

from __future__ import annotations

import logging

import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler  # noqa: F401
from sglang.srt.plugins.hook_registry import HookRegistry

from hypic.config import HypicConfig
from hypic.engine import http
from hypic.engine.hook import HookTable, find_problem
from hypic.engine.plugin import SCHEDULER_HOOKS
from hypic.platform_cpu.hooks import TABLE


def main() -> None:
    plugin = (*SCHEDULER_HOOKS, *http.hooks(HypicConfig(enabled=True)))
    for hook in plugin:
        find_problem(hook)
    # SGLang applies all hooks of a target at once, or none of those that come later.
    shared = {hook.target for hook in plugin}
    HookTable(TABLE.name, [hook for hook in TABLE.hooks if hook.target not in shared]).register()
    HookRegistry.apply_hooks()
    # Some of its many models need what is not installed; a scheduler would keep that to itself at --log-level error.
    logging.getLogger("sglang.srt.models.registry").setLevel(logging.ERROR)
    import sglang.srt.models.registry  # noqa: F401


main()
