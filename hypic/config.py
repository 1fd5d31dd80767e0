"""The one typed configuration of the plugin: HYPIC_* variables, set by the CLI's ``--hypic-*`` flags.

SGLang starts its scheduler and detokenizer as separate processes; environment variables are what reaches all of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from hypic.method import MethodError, parse_methods

OFFICIAL_SEPARATOR = "<<PIC_SEP>>"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "t": 10**12, "ti": 2**40}

_OTHER_VARIABLES = {
    "HYPIC_CPU", "HYPIC_CACHE", "HYPIC_API_KEY", "HYPIC_DUMMY_HORIZON", "HYPIC_MODELS",
    *(f"HYPIC_ROUTER_{name}" for name in ("BIND", "COSTS", "POLICY", "STATUS", "TOKEN")),
}  # fmt: skip
"""Read elsewhere."""

STOCK = {"HYPIC_ENABLED": "0", "HYPIC_MODELS": "1"}
"""Environment of a stock engine that a command of ours starts: nothing is hooked, but the models that SGLang 0.5.17 has all parts
of and does not register are there, so that they can be compared, too."""


class ConfigError(ValueError):
    """A ``--hypic-*`` flag or HYPIC_* variable that cannot be used; the text names it and the remedy."""


def _are_methods(names: str) -> bool:
    try:
        return bool(parse_methods(names, 1))
    except MethodError:
        return False


STATE_DTYPES = ("auto", "float32", "bfloat16", "int8")

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seam_window": (lambda n: n >= 1, "must be at least 1 token"),
    "methods": (_are_methods, "write seam, seam-N with a seam window N, legolink-0, or several with commas, each once"),
    "min_segment": (lambda n: n >= 0, "must not be negative"),
    "attention": (lambda way: way in ("auto", "seam", "expanded"), "write auto, seam or expanded"),
    "memory": (lambda n: n >= 0, "must not be negative"),
    "state_dtype": (lambda name: name in STATE_DTYPES, "write auto, float32, bfloat16 or int8"),
    "segment_memory": (lambda n: n >= 0, "must not be negative"),
    "pin_percent": (lambda n: 0 <= n <= 90, "write 0 to 90: what is not pinned needs room, too"),
    "router": (lambda a: not a or a.startswith(("ipc://", "tcp://")), "write ipc:///PATH or tcp://HOST:PORT"),
    "worker": (lambda n: bool(re.fullmatch(r"[A-Za-z0-9_-]{0,64}", n)), "write letters, digits, - and _, at most 64"),
    "transport": (
        lambda way: way in ("auto", "window", "socket", "mooncake", "mooncake-tcp"),
        "write auto, window, socket, mooncake or mooncake-tcp",
    ),
    "data": (lambda a: not a or a.startswith(("ipc://", "tcp://")), "write ipc:///PATH or tcp://HOST:PORT"),
}


class HypicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one server.

    Attributes:
        enabled: the plugin hooks SGLang only when true (HYPIC_ENABLED, set by ``hypic serve``).
        seam_window: w, tokens recomputed at the head of each cached segment (seam window, see docs/SEMANTICS.md).
        methods: names of the caching methods that requests may pick, separated by commas; the first is the default.
        min_segment: segments shorter than this many tokens are plain spans.
        memory: bytes of the artifact arena; 0 (no flag, no variable) lets the engine choose.
        separator: cut prompts at this string without a per-request opt-in (clients of the official fork); "" is off.
        start_check: prove relocation and composition on the loaded model before serving.
        attention: full attention of linked rows: "seam" (our kernel), "expanded" (the backend's), or "auto".
        state_dtype: of S and T in artifacts, one of STATE_DTYPES (:func:`artifact_dtypes`).
        segment_memory: bytes that the tokens of segments with an id may take; more are refused.
        pin_percent: share of the arena that pinned segments may take.
        force_link: link segments however short they are (their artifact may be empty); for checks only.
        router: address of the router's control socket that this server is a worker of; "" serves alone.
        worker: its name there.
        data: address of the socket that serves its artifacts to other workers.
        transport: how artifacts come from other workers: "window" (mapped memory, inside a host), "socket",
            "mooncake" (RDMA between hosts), "mooncake-tcp" (to try it out), or "auto".
        curve_secret: file of this worker's CURVE key pair; needed for tcp addresses.
        curve_allowed: folder of the public keys that may connect to it.
        router_key: file of the router's public key.
    """

    enabled: bool = False
    seam_window: int = 8
    methods: str = "seam"
    min_segment: int = 64
    memory: int = 0
    separator: str = ""
    start_check: bool = True
    attention: str = "auto"
    state_dtype: str = "auto"
    segment_memory: int = 256 << 20
    pin_percent: int = 50
    force_link: bool = False
    router: str = ""
    worker: str = ""
    data: str = ""
    transport: str = "auto"
    curve_secret: str = ""
    curve_allowed: str = ""
    router_key: str = ""

    def __post_init__(self) -> None:
        for name, (holds, remedy) in _RULES.items():
            if not holds(value := getattr(self, name)):
                raise ConfigError(f"--hypic-{name.replace('_', '-')} {value}: {remedy}")

    def to_env(self) -> dict[str, str]:
        """The HYPIC_* variables that :func:`from_env` reads back as this config."""
        out = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "memory" and not value:
                continue
            out["HYPIC_" + name.upper()] = str(int(value)) if isinstance(value, bool) else str(value)
        return out


def artifact_dtypes(setting: str, model: str) -> tuple[str, str]:
    """The types of S and of a dense T for the setting and the model's type.

    "auto" takes float32 for float32, else int8; that is for T, in rows with a scale each, beside S in bfloat16.
    Rounding both to bfloat16 (u = 2^-8) changes a join h T + S by at most u (|h T| + |S|). T is a product of contractions, so
    errors of earlier joins do not grow: after n joins they add up to at most u times the sum of those norms (docs/SEMANTICS.md).
    """
    if setting == "auto":
        setting = "float32" if model == "float32" else "int8"
    return ("bfloat16", "int8") if setting == "int8" else (setting, setting)


def parse_bytes(text: str) -> int:
    """``"512MiB"``, ``"2g"``, ``"1048576"`` -> bytes, more than 0. Raises ConfigError."""
    m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if not m:
        raise ConfigError(f"cannot read {text!r} as a size: write for example 512MiB, 2GiB or a number of bytes")
    if (nbytes := int(float(m.group(1)) * _UNITS[m.group(2) or ""])) == 0:
        raise ConfigError("no room for any segment; leave it out for a size that suits the machine")
    return nbytes


def from_env(env: Mapping[str, str] = os.environ) -> HypicConfig:
    """Read HYPIC_*; unset variables keep their defaults. Raises ConfigError naming the variable."""
    values: dict[str, Any] = {}
    for name in HypicConfig.__struct_fields__:
        var = "HYPIC_" + name.upper()
        if var not in env:
            continue
        try:
            values[name] = read_setting(name, env[var])
        except ConfigError as e:
            raise ConfigError(f"{var}={env[var]!r}: {e}") from None
    return HypicConfig(**values)


def unread(env: Mapping[str, str] = os.environ) -> list[str]:
    """HYPIC_* variables that nothing reads, each with the one that may be meant."""
    known = {"HYPIC_" + name.upper() for name in HypicConfig.__struct_fields__} | _OTHER_VARIABLES
    told = []
    for name in sorted(n for n in env if n.startswith("HYPIC_") and n not in known):
        meant = get_close_matches(name, known, n=1, cutoff=0.8)
        told.append(name + (f" (did you mean {meant[0]}?)" if meant else ""))
    return told


def read_setting(name: str, raw: str) -> Any:
    """The value that text gives to a field of HypicConfig. Raises ConfigError with the remedy alone."""
    value = _read(name, raw, getattr(HypicConfig(), name))
    holds, remedy = _RULES.get(name, (lambda _: True, ""))
    if not holds(value):
        raise ConfigError(remedy)
    return value


def _read(name: str, raw: str, default: Any) -> Any:
    if isinstance(default, bool):
        if raw.lower() not in ("0", "1", "true", "false", ""):
            raise ConfigError("write 0 or 1")
        return raw.lower() in ("1", "true")
    if name in ("memory", "segment_memory"):
        return parse_bytes(raw)
    if isinstance(default, int):
        if not re.fullmatch(r"\s*-?\d+\s*", raw):
            raise ConfigError("write a whole number")
        return int(raw)
    return raw
