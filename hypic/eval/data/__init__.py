"""Data sets of ``hypic eval``, by name.

| spec | what |
| --- | --- |
| ``almanac`` | the synthetic task of the model in models/almanac; options level, questions |
| ``longbench:TASK=FILE`` | LongBench's JSONL; TASK is hotpotqa, triviaqa, multi_news or gov_report |
| ``foldoc`` | which year does this article of the Free On-line Dictionary of Computing name? |
| ``debian`` | the synopsis of a Debian package from its description |
| ``support`` | which support document says this? |

Options follow a colon: ``foldoc:documents=16,questions=4``. ``path=FILE`` gives what is downloaded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hypic.eval.data import almanac, debian, foldoc, longbench, support
from hypic.eval.data.common import Loaded, Wanted
from hypic.eval.data.errors import DataError
from hypic.eval.data.fetch import default_cache
from hypic.eval.data.template import Template

__all__ = ["LOADERS", "DataError", "Loaded", "Template", "load"]

LOADERS: Mapping[str, Callable[[Wanted], Loaded]] = {
    "almanac": almanac.load,
    "longbench": longbench.load,
    "foldoc": foldoc.load,
    "debian": debian.load,
    "support": support.load,
}


def load(spec: str, template: Template, n: int | None = None, seed: int = 0, *, cache: Path | None = None) -> Loaded:
    """Items of the data set that ``spec`` names.

    Args:
        spec: a name, with options behind a colon.
        template: how prompts are written for the model.
        n: how many items, drawn with ``seed``; None for all there are (not of ``almanac``, which has no end).
        cache: where downloads are kept; ``~/.cache/hypic``, or HYPIC_CACHE, if None.
    Raises:
        DataError: the spec, a file or a download is at fault; the text says what to do.
    """
    name, _, rest = spec.partition(":")
    if name not in LOADERS:
        raise DataError(f"no data set {name!r}: there are {', '.join(LOADERS)}")
    if n is not None and n < 1:
        raise DataError(f"{spec}: n = {n}; ask for at least one item")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value or key in options:
            raise DataError(f"{spec}: {part!r} should read option=value, each option once")
        options[key] = value
    return LOADERS[name](Wanted(spec, template, n, seed, cache or default_cache(), options))
