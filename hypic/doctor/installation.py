"""The installed packages, the machine, and the hook tables, put in force in this process as a server would."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from hypic.doctor.findings import HookFinding, Platform, RefusedFlag, Version
from hypic.engine.hook import SUPPORTED_SGLANG, HookTable, find_problem, is_applied
from hypic.engine.support import REFUSALS

_PYTHON = (3, 11)
_NEEDED = ("hypic", "sglang", "torch", "transformers")
_OPTIONAL = ("triton", "pydantic", "fastapi")


def versions() -> list[Version]:
    """Python and the packages that hypic's behaviour depends on."""
    python = Version(name="python", version=platform.python_version())
    if sys.version_info < _PYTHON:
        python.problem = f"hypic needs Python {_PYTHON[0]}.{_PYTHON[1]} or newer"
    found = [python]
    for name in (*_NEEDED, *_OPTIONAL):
        version = _version(name)
        problem = None
        if version is None and name in _NEEDED:
            problem = "not installed: pip install 'hypic[gpu]', or make setup in a checkout where there is no GPU"
        elif name == "sglang" and version != SUPPORTED_SGLANG:
            problem = f"hypic supports {SUPPORTED_SGLANG}"
        found.append(Version(name=name, version=version, problem=problem))
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(cpu: bool) -> Platform:
    """The device that ``hypic serve`` would take here."""
    if cpu:
        memory = _host_memory()
        text = f"{os.cpu_count()} cores, {platform.machine()}; SGLang through hypic's CPU platform"
        return Platform(
            mode="cpu", description=text, memory_total=memory["MemTotal"], memory_free=memory["MemAvailable"]
        )
    import torch

    free, total = torch.cuda.mem_get_info()
    count = torch.cuda.device_count()
    text = f"{count} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return Platform(mode="gpu", description=text, memory_total=total, memory_free=free)


def _host_memory() -> dict[str, int]:
    """Entries of /proc/meminfo in bytes."""
    entries = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in entries}


def apply_hooks(cpu: bool) -> list[HookTable]:
    """Load SGLang's plugins as every process of a server does; the tables that are then to be in force."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from hypic.engine import plugin

    tables = [plugin.table()]
    if cpu:
        from hypic.platform_cpu.hooks import TABLE

        tables.append(TABLE)
    return tables


def hook_findings(table: HookTable) -> list[HookFinding]:
    """Every row of a table, and whether it fits the installed SGLang and is in force."""
    rows = []
    for hook in table.hooks:
        problem = find_problem(hook)
        if problem is None and not is_applied(hook):
            problem = f"{hook.target}: not applied"
        rows.append(
            HookFinding(table=table.name, target=hook.target, kind=hook.kind, reason=hook.reason, problem=problem)
        )
    return rows


def table_problems(table: HookTable) -> list[str]:
    """What is wrong with a table, beside its rows: SGLang did not run the plugin, the front end cannot be prepared."""
    return [p for p in table.problems() if not any(p.startswith(f"{hook.target}:") for hook in table.hooks)]


def refused_flags() -> list[RefusedFlag]:
    """What ``hypic serve`` refuses, with the reasons."""
    return [RefusedFlag(flag=r.flag, reason=r.reason) for r in REFUSALS]
