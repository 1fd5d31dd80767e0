"""``--hypic-*`` flags among SGLang's."""

from __future__ import annotations

import pytest

from hypic.commands.flags import take_hypic_flags
from hypic.config import ConfigError, HypicConfig

BASE = HypicConfig(enabled=True, min_segment=7)


def test_ours_are_taken_and_sglangs_stay_in_order() -> None:
    ours = ["--hypic-seam-window", "16", "--hypic-memory=2GiB", "--hypic-no-start-check"]
    argv = ["model", *ours, "--dtype", "bfloat16", "--port", "3"]
    rest, config = take_hypic_flags(argv, BASE)
    assert rest == ["model", "--dtype", "bfloat16", "--port", "3"]
    assert config == HypicConfig(enabled=True, min_segment=7, seam_window=16, memory=2 << 30, start_check=False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hypic-bogus", "3"], "--hypic-bogus: hypic has --hypic-seam-window, "),
        (["--hypic-memory", "2 potatoes"], "--hypic-memory '2 potatoes': cannot read"),
        (["--hypic-memory", "0"], "--hypic-memory '0': no room"),
        (["--hypic-memory"], "--hypic-memory '': cannot read"),
        (["--hypic-seam-window=0"], "--hypic-seam-window '0': must be at least 1"),
        (["--hypic-state-dtype", "int4"], "--hypic-state-dtype 'int4': write auto, float32, bfloat16 or int8"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_named_with_its_remedy(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        take_hypic_flags(argv, BASE)
    assert str(error.value).startswith(said)
