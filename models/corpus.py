"""Real English for the documents, and the tokenizer.

Sentences come from what Python itself carries (``pydoc_data`` and the docstrings of its standard library, PSF licence)
and from the support documents inside the package ``inspect-evals`` (tau2, MIT). Both are read where they are installed
or from a wheel; what is kept is a list of sentences, in ``sentences.txt.xz`` beside the tokenizer.

    python -m models.corpus OUT [--inspect-evals WHEEL]
"""

from __future__ import annotations

import argparse
import ast
import gzip
import inspect
import json
import lzma
import random
import re
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from hypic.check.tiny_tokenizer import save_tokenizer, train_tokenizer

from .words import CHANGING, FIXED, NAMES, VALUES

VOCAB_SIZE = 6144
SENTENCES = "sentences.txt.xz"
_TAU2 = "inspect_evals/tau2/data/domains/"
_SENTENCE = re.compile(r"[A-Z][a-z]*(?:,? [A-Za-z][a-z]*(?:-[a-z]+)?){4,28}\.")


def python_prose() -> Iterator[str]:
    """The language reference behind ``help()`` and the docstrings of the standard library, by file name."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
                yield inspect.cleandoc(doc)


def support_documents(wheel: Path) -> Iterator[str]:
    """Policies, manuals and knowledge-base articles of tau2, from the ``inspect-evals`` wheel."""
    with zipfile.ZipFile(wheel) as z:
        for name in sorted(z.namelist()):
            if not name.startswith(_TAU2):
                continue
            if name.endswith((".txt", ".md")):
                yield z.read(name).decode()
            elif name.endswith("documents.json.gz"):
                yield from _strings(json.loads(gzip.decompress(z.read(name))))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from _strings(value[key])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def sentences(texts: Iterable[str]) -> list[str]:
    """Plain sentences of 6 to 30 words, letters and commas only, each once, sorted."""
    found: set[str] = set()
    for text in texts:
        for paragraph in re.split(r"\n\s*\n|\n\s*[-*#|]", text):
            found.update(_SENTENCE.findall(" ".join(paragraph.split())))
    return sorted(found)


def load_sentences(directory: Path) -> list[str]:
    return lzma.decompress((directory / SENTENCES).read_bytes()).decode().splitlines()


def write_tokenizer(directory: Path, prose: list[str]) -> None:
    """A byte-level BPE in which every word of :mod:`models.words` is one token, with and without a space before it."""
    words = ["system", "user", "assistant", "What", "The"] + [
        f"{space}{word}" for word in (*NAMES, *FIXED, *CHANGING, *VALUES) for space in ("", " ")
    ]
    tokenizer = train_tokenizer([*prose, *(words * 400)], VOCAB_SIZE)
    missed = [word for word in words if len(tokenizer.encode(word).ids) != 1]
    if missed:
        raise ValueError(f"not one token each: {missed}")
    save_tokenizer(tokenizer, directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--inspect-evals", type=Path, metavar="WHEEL", help="wheel of the package, from pip download")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = [*python_prose(), *(support_documents(args.inspect_evals) if args.inspect_evals else ())]
    prose = sentences(texts)
    random.Random(0).shuffle(prose)
    (args.out / SENTENCES).write_bytes(lzma.compress("\n".join(prose).encode(), preset=9))
    write_tokenizer(args.out, [*texts, *prose])
    print(
        f"{len(texts)} texts, {sum(map(len, texts))} characters; {len(prose)} sentences, {sum(map(len, prose))} characters"
    )


if __name__ == "__main__":
    main()
