"""Families of linear layers that artifacts cover, one module each; docs/ARCHITECTURE.md tells how to add one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from hypic.engine.families.base import Family

MODULES = ("gdn", "mamba2", "kda", "lightning")
"""Modules of this package; each has its family as ``FAMILY``, whose name is the module's."""


@cache
def family(name: str) -> Family:
    """The family that LinearShape.family names."""
    found: Family = import_module(f"{__name__}.{name}").FAMILY
    return found


def families() -> list[Family]:
    return [family(name) for name in MODULES]


def family_of_backend(backend: Any) -> Family | None:
    """The family whose layers SGLang's linear-attention backend runs; None if it is none of ours."""
    return next((f for f in families() if f.owns_backend(backend)), None)


def family_of_config(model_config: Any) -> Family | None:
    """The family of the linear layers that SGLang's ModelConfig announces; None if it is none of ours."""
    return next((f for f in families() if f.config(model_config) is not None), None)


def known_families() -> str:
    """For refusals."""
    names = (f"{f.title} ({f.backend.rpartition('.')[2]})" for f in families())
    return f"known are {', '.join(names)}"
