"""Which year does this article of the Free On-line Dictionary of Computing name?

Articles that name one year, several as documents; asked for are years that no other document names. The dictionary (GFDL)
comes from the Debian package dict-foldoc and stays in the cache.
"""

from __future__ import annotations

import gzip
import io
import re
import subprocess
import tarfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from hypic.eval.data import fetch
from hypic.eval.data.common import Loaded, Wanted, enough, question, sets
from hypic.eval.data.errors import DataError
from hypic.eval.items import Item

PACKAGE = "dict-foldoc"
_FILES = ("foldoc.dict.dz", "foldoc.index")
_YEAR = re.compile(r"(?<!\d)(1[89]\d\d|20[0-2]\d)(?!\d)")
_STAMP = re.compile(r"\n\s*\(\d{4}-\d\d-\d\d\)\s*$")  # when the article was last changed
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_LENGTH = range(200, 2001)
_TASK = "Answer the question about articles of the Free On-line Dictionary of Computing. Give only the answer."


class Article(NamedTuple):
    name: str
    text: str
    year: str


def load(wanted: Wanted) -> Loaded:
    """Options: ``documents`` in a prompt (8), ``questions`` about the same documents (4), ``path``: the .deb, or a folder
    with foldoc.dict.dz and foldoc.index."""
    wanted.only("documents", "questions", "path")
    size = wanted.number("documents", 8, 1, 256)
    asked = min(size, wanted.number("questions", 4, 1, 256))
    path = wanted.path() or fetch.deb(PACKAGE, wanted.cache)
    pool = articles(path)
    wanted.require(size, pool, f"{path} has {len(pool)} articles that name one year")
    rng, notes, items = wanted.rng(), Counter[str](), list[Item]()
    for number, chosen in enumerate(sets(pool, size, rng)):
        if enough(wanted, items):
            break
        # An article whose year another one names too stays a document, but is not asked about: what answers it is unsure.
        years = Counter(a.year for a in chosen)
        askable = [a for a in chosen if years[a.year] == 1]
        for article in rng.sample(askable, min(asked, len(askable))):
            if not enough(wanted, items):
                text = f'Which year does the article "{article.name}" name?'
                items.append(
                    question(
                        wanted,
                        [a.text for a in chosen],
                        _TASK,
                        text,
                        [article.year],
                        notes,
                        id=f"foldoc/{wanted.seed}-{number}-{article.name}",
                        lead="The year is",
                        metric="contains",
                        max_new_tokens=8,
                    )
                )
    common = Counter(i.answers[0] for i in items).most_common(1)
    if common:
        notes["right if the most common year is always said, %"] = round(100 * common[0][1] / len(items))
    source = f"{path.name} sha256 {fetch.sha256(path)}" if path.is_file() else str(path)
    return Loaded(
        wanted, items, source=source, licence="GFDL 1.1 or later, Denis Howe, http://www.foldoc.org/", notes=notes
    )


def articles(path: Path) -> list[Article]:
    """Articles that name one year, in the order of the index. Raises DataError."""
    words, index = _read(path)
    out: dict[str, Article] = {}
    for number, line in enumerate(index.splitlines(), 1):
        try:
            name, start, length = line.split("\t")[:3]
            at = _number(start)
            text = words[at : at + _number(length)].decode()
        except ValueError:
            raise DataError(f"{path}: foldoc.index:{number}: {line[:60]!r} is not word, offset, length") from None
        title, _, body = _STAMP.sub("", text.rstrip()).partition("\n")
        body = textwrap.dedent(body.strip("\n")).strip()
        years = set(_YEAR.findall(body))
        plain = f"{title}\n{re.sub(r'[{}]', '', body)}\n\n"
        # One article stands under several words of the index: it is taken under the first line of its own text.
        if len(years) == 1 and not _YEAR.search(title) and len(plain) in _LENGTH and not name.startswith("00-database"):
            out.setdefault(title, Article(title, plain, years.pop()))
    return list(out.values())


def _read(path: Path) -> tuple[bytes, str]:
    """The dictionary's text and index, from a folder or a .deb. Raises DataError."""
    try:
        if path.is_dir():
            packed, index = ((path / name).read_bytes() for name in _FILES)
        else:
            out = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=True).stdout
            with tarfile.open(fileobj=io.BytesIO(out)) as tar:
                members = {Path(m.name).name: m for m in tar.getmembers()}
                packed, index = (tar.extractfile(members[name]).read() for name in _FILES)  # type: ignore[union-attr]
        return gzip.decompress(packed), index.decode()
    except FileNotFoundError as e:
        raise DataError(f"{path}: {e}: unpack it elsewhere and give path=FOLDER with {' and '.join(_FILES)}") from None
    except (subprocess.CalledProcessError, tarfile.TarError, KeyError, OSError, EOFError, UnicodeDecodeError) as e:
        raise DataError(f"{path}: {e!r}: it is no {PACKAGE} package, delete it or give another path=") from None


def _number(text: str) -> int:
    """dictd's base 64. Raises ValueError."""
    value = 0
    for digit in text:
        value = value * 64 + _DIGITS.index(digit)
    return value
