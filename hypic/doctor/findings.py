"""What the doctor found, in the form of ``hypic doctor --json``."""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, kw_only=True):
    """A package, its version (null: not installed), and what is wrong with it."""

    name: str
    version: str | None
    problem: str | None = None


class Platform(msgspec.Struct, kw_only=True):
    """Where the server would run: "cpu" or "gpu", a description, and memory in bytes."""

    mode: str
    description: str
    memory_total: int
    memory_free: int


class HookFinding(msgspec.Struct, kw_only=True):
    """A row of a hook table. ``problem`` is null where the hook is in force in this process."""

    table: str
    target: str
    kind: str
    reason: str
    problem: str | None


class RefusedFlag(msgspec.Struct, kw_only=True):
    """A flag of SGLang that stops hypic's server. ``given``: it is among the flags the doctor was called with."""

    flag: str
    reason: str
    given: bool = False


class LayerFamily(msgspec.Struct, kw_only=True):
    """Layers of one kind, with the shape on one rank."""

    family: str
    layers: int
    shape: str


class SegmentSize(msgspec.Struct, kw_only=True):
    """Bytes of the artifact of a segment of so many tokens on one rank, and how many of them the arena holds."""

    tokens: int
    bytes: int
    fit: int


class ModelFinding(msgspec.Struct, kw_only=True):
    """What hypic would do with a model.

    Attributes:
        path: as given.
        architecture: from its config; null where that could not be read.
        problems: why it cannot be served with hypic, or in vain; empty if it can.
        tested: hypic's own tests cover the architecture. Else the start-up self-check alone decides.
        dtype, tp_size, seam_window: what sizes depend on.
        families: layers that an artifact covers.
        transition_bytes, state_bytes, conv_bytes: T, S and conv windows of an artifact, whatever the segment's length.
        token_bytes: K and V of one interior token.
        weight_bytes: of its weight files, on all ranks together; 0 where there are none in its folder, null where it
            is no folder.
        arena_bytes: memory for artifacts on one rank; ``arena_source`` says where the figure is from.
        segments: sizes of artifacts.
    """

    path: str
    architecture: str | None = None
    problems: list[str] = []
    tested: bool = False
    dtype: str | None = None
    tp_size: int = 1
    seam_window: int = 0
    families: list[LayerFamily] = []
    transition_bytes: int = 0
    state_bytes: int = 0
    conv_bytes: int = 0
    token_bytes: int = 0
    weight_bytes: int | None = None
    arena_bytes: int = 0
    arena_source: str = ""
    segments: list[SegmentSize] = []


class Findings(msgspec.Struct, kw_only=True):
    """All of it. ``problems`` is what keeps hypic from working; empty if nothing does."""

    supported_sglang: str
    versions: list[Version]
    platform: Platform | None = None
    hooks: list[HookFinding] = []
    refused_flags: list[RefusedFlag] = []
    model: ModelFinding | None = None
    problems: list[str] = []
