"""SGLang on a machine without a GPU: an out-of-tree platform and plain-torch stand-ins for its Triton functions.

SGLang finds both halves through entry points. They stay inactive unless ``HYPIC_CPU=1`` (set by ``hypic serve`` where
there is no GPU), so that installing hypic changes nothing on a GPU machine.
"""

from __future__ import annotations

import os

CPU_MODE = "HYPIC_CPU"
PLATFORM = "hypic.platform_cpu.platform:CpuPlatform"


def cpu_mode() -> bool:
    """Whether this process was asked to run SGLang on the CPU."""
    return os.environ.get(CPU_MODE) == "1"


def activate_platform() -> str | None:
    """Entry point of ``sglang.srt.platforms``: the platform's class path, or None to stay out of the way."""
    return PLATFORM if cpu_mode() else None


def activate_hooks() -> None:
    """Entry point of ``sglang.srt.plugins``: register the hook table of CPU mode."""
    if cpu_mode():
        from hypic.engine.model_classes import offer

        from .hooks import register

        register()
        offer()
