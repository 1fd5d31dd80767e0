"""The ``--hypic-*`` flags of commands that take those of ``hypic serve`` among SGLang's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hypic.config import ConfigError, HypicConfig, read_setting

_PREFIX = "--hypic-"
_SETTINGS = (
    "seam_window",
    "methods",
    "min_segment",
    "memory",
    "separator",
    "attention",
    "state_dtype",
    "segment_memory",
    "pin_percent",
)
_CLUSTER = ("router", "worker", "data", "transport", "curve_secret", "curve_allowed", "router_key")
_NO_START_CHECK = "no_start_check"


def take_hypic_flags(argv: Sequence[str], base: HypicConfig) -> tuple[list[str], HypicConfig]:
    """SGLang's part of `argv`, and `base` with what the ``--hypic-*`` flags in it say.

    Raises:
        ConfigError: a flag that hypic does not have, or a value that it cannot use.
    """
    rest: list[str] = []
    given: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith(_PREFIX):
            rest.append(word)
            continue
        flag, equals, text = word.partition("=")
        name = flag.removeprefix(_PREFIX).replace("-", "_")
        if name == _NO_START_CHECK and not equals:
            given["start_check"] = False
        elif name in _SETTINGS or name in _CLUSTER:
            given[name] = setting(name, text if equals else next(words, ""))
        else:
            raise ConfigError(f"{flag}: hypic has {', '.join(map(flag_of, (*_SETTINGS, _NO_START_CHECK)))}")
    return rest, msgspec.structs.replace(base, **given)


def flag_of(name: str) -> str:
    """``seam_window`` -> ``--hypic-seam-window``."""
    return _PREFIX + name.replace("_", "-")


def setting(name: str, text: str) -> Any:
    """The value of a setting that was given as text on the command line. Raises ConfigError naming the flag."""
    try:
        return read_setting(name, text)
    except ConfigError as error:
        raise ConfigError(f"{flag_of(name)} {text!r}: {error}") from None
