"""The ``--hypic-*`` flags of commands that take those of ``hypic serve`` among SGLang's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

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
_OTHER_NAMES = {"tensor_parallel_size": "tp_size", "data_parallel_size": "dp_size", "expert_parallel_size": "ep_size"}
"""argparse destinations of SGLang's flags that differ from the field of ServerArgs."""


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


def server_fields(argv: Sequence[str]) -> dict[str, Any]:
    """SGLang's command line as fields of ServerArgs: those that were given. Imports SGLang.

    Raises:
        ConfigError: a flag that SGLang does not have, or a value that it cannot use.
    """
    if not argv:
        return {}
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="", add_help=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        action.required = False
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: neither hypic nor SGLang has it; `hypic serve --sglang-help` lists SGLang's flags"
        )
    return {_OTHER_NAMES.get(k, k): v for k, v in vars(found).items() if v != parser.get_default(k)}


class _Parser(argparse.ArgumentParser):
    """Its errors are ours; argparse prints all of SGLang's flags in front of them, and ends the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
