"""Settings: what HYPIC_* may hold, and what an unusable value is answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic.config import ConfigError, HypicConfig, from_env, parse_bytes, unread
from hypic.method import DUMMIES, Method, dummy_token, parse_methods

configs = st.builds(
    HypicConfig,
    enabled=st.booleans(),
    seam_window=st.integers(1, 64),
    methods=st.sampled_from(["seam", "legolink-0", "seam,seam-16,legolink-0"]),
    min_segment=st.integers(0, 10**6),
    memory=st.integers(0, 2**45),
    separator=st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0")),
    start_check=st.booleans(),
    attention=st.sampled_from(["auto", "seam", "expanded"]),
    force_link=st.booleans(),
)


@given(configs)
def test_the_environment_carries_every_setting(config: HypicConfig) -> None:
    assert from_env({"PATH": "/bin", **config.to_env()}) == config


def test_nothing_set_is_the_default() -> None:
    assert from_env({}) == HypicConfig()
    assert from_env({"HYPIC_ENABLED": ""}) == HypicConfig()


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("HYPIC_ENABLED", "yes", "write 0 or 1"),
        ("HYPIC_START_CHECK", "2", "write 0 or 1"),
        ("HYPIC_SEAM_WINDOW", "eight", "whole number"),
        ("HYPIC_SEAM_WINDOW", "", "whole number"),
        ("HYPIC_SEAM_WINDOW", "0", "at least 1"),
        ("HYPIC_METHODS", "", "write seam"),
        ("HYPIC_METHODS", "seam,seam", "each once"),
        ("HYPIC_METHODS", "seam-0", "write seam"),
        ("HYPIC_METHODS", "legolink-4", "write seam"),
        ("HYPIC_SEGMENT_MEMORY", "much", "write for example 512MiB"),
        ("HYPIC_PIN_PERCENT", "91", "0 to 90"),
        ("HYPIC_MIN_SEGMENT", "-1", "must not be negative"),
        ("HYPIC_MIN_SEGMENT", "6.5", "whole number"),
        ("HYPIC_MEMORY", "much", "write for example 512MiB"),
        ("HYPIC_MEMORY", "-5", "write for example 512MiB"),
        ("HYPIC_MEMORY", "0", "leave it out"),
        ("HYPIC_ATTENTION", "flash", "auto, seam or expanded"),
    ],
)
def test_an_unusable_value_is_named_with_its_remedy(variable: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_env({variable: value})
    text = str(error.value)
    assert variable in text and repr(value) in text and remedy in text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2 GiB", 2 << 30),
        ("2g", 2 * 10**9),
        ("1.5Ki", 1536),
        (" 3kb ", 3000),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1,5g", "0x10", "12 potatoes"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="512MiB, 2GiB or a number of bytes"):
        parse_bytes(text)


def test_methods_of_a_server() -> None:
    """The first is the default; "seam" has the server's window, "legolink-0" dummies in place of one."""
    methods = parse_methods("legolink-0, seam,seam-16", 8)
    assert list(methods.values()) == [
        Method("legolink-0", "legolink-0", 0, DUMMIES),
        Method("seam", "seam", 8),
        Method("seam-16", "seam", 16),
    ]


@pytest.mark.parametrize(
    ("tokens", "dummy"), [((5, 6, 7), 5), ((None, 6, 7), 6), ((None, None, [1, 2]), 0), ((0, 6, 7), 0)]
)
def test_dummies_are_the_token_that_begins_texts(tokens: Any, dummy: int) -> None:
    names = (f"{name}_token_id" for name in ("bos", "pad", "eos"))
    assert dummy_token(SimpleNamespace(**dict(zip(names, tokens, strict=True)))) == dummy


def test_variables_that_nothing_reads() -> None:
    env = {
        "HYPIC_SEAM_WINDWO": "4", "HYPIC_MEMROY": "1GiB", "HYPIC_STUFF_OF_MINE": "1", "HYPIC_SEAM_WINDOW": "4",
        "HYPIC_ROUTER_TOKEN": "x", "PATH": "y",
    }  # fmt: skip
    assert unread(env) == [
        "HYPIC_MEMROY (did you mean HYPIC_MEMORY?)",
        "HYPIC_SEAM_WINDWO (did you mean HYPIC_SEAM_WINDOW?)",
        "HYPIC_STUFF_OF_MINE",
    ]
