"""Caching methods: how a segment is compiled, and how it is linked. A server has one or more, a request picks one.

| name | compiled | linked |
| --- | --- | --- |
| ``seam`` | alone | the first w tokens recomputed, w being ``--hypic-seam-window`` |
| ``seam-N`` | alone | the same with w = N |
| ``legolink-0`` | behind dummy tokens, which take the attention sink and are dropped | nothing recomputed |

Without linear layers these are EPIC's LegoLink-w and LegoLink-0 (arXiv 2410.15332).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

SEAM, LEGOLINK_0 = "seam", "legolink-0"
DUMMIES = 4
"""Dummy tokens in front of a segment that is compiled for LegoLink-0. SGLang keeps room for five tokens behind the longest
prompt that it takes, so a compile has room for them wherever the segment has room in a prompt."""


class MethodError(ValueError):
    """A list of methods that makes no sense; the text says what does."""


class Method(NamedTuple):
    """A method of a server.

    Attributes:
        name: as requests and settings say it.
        kind: SEAM or LEGOLINK_0.
        seam_window: w.
        dummies: tokens that a segment is compiled behind.
    """

    name: str
    kind: str
    seam_window: int
    dummies: int = 0

    def tag(self, default: Method) -> str:
        """What tells its artifacts from those of a server's default method; "" if nothing does."""
        mine, usual = (f"{m.kind}:{m.seam_window}:{m.dummies}" for m in (self, default))
        return "" if mine == usual else mine


def parse_methods(names: str, seam_window: int) -> dict[str, Method]:
    """Methods by name, the default one first. Raises MethodError.

    Args:
        names: separated by commas.
        seam_window: of "seam".
    """
    out: dict[str, Method] = {}
    for name in (part.strip() for part in names.split(",")):
        m = re.fullmatch(r"seam(?:-([1-9]\d{0,5}))?", name)
        if name in out or (m is None and name != LEGOLINK_0):
            raise MethodError("write seam, seam-N with a seam window N, legolink-0, or several with commas, each once")
        if m is None:
            out[name] = Method(name, LEGOLINK_0, 0, DUMMIES)
        else:
            out[name] = Method(name, SEAM, int(m[1]) if m[1] else seam_window)
    return out


def dummy_token(config: Any) -> int:
    """The token that dummies are, given a model's text configuration: the one that begins texts, where the model has one."""
    given = (getattr(config, f"{name}_token_id", None) for name in ("bos", "pad", "eos"))
    return next((t for t in given if isinstance(t, int)), 0)
