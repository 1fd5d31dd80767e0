"""Store keys, the model fingerprint, and the radix namespace of linked requests (docs/SEMANTICS.md, keys)."""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

import msgspec

from hypic.method import SEAM, Method

METHOD = SEAM
"""The caching method of a server's identity: seam window recomputed, interior joined by (T, S) and relocated KV."""

_NAMESPACE = "\x1fhypic:"


def _digest(*parts: bytes) -> bytes:
    """Digest of the parts with their lengths, so that no two splits of the same bytes agree."""
    h = hashlib.blake2b(digest_size=24)
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.digest()


def artifact_key(identity: bytes, tenant: str, adapter: str, tokens: array[int], method: str = "") -> bytes:
    """Store key of a segment: everything an artifact is a function of, plus the tenant it may be shared within.

    Args:
        identity: digest of the server's KeyIdentity, for its default method.
        tenant: the request's cache salt.
        adapter: name of the LoRA adapter (:func:`adapter_name`; "" for the base model).
        tokens: ids, of type "q".
        method: tag of another method (:meth:`hypic.method.Method.tag`).
    """
    return _digest(identity, tenant.encode(), adapter.encode(), tokens.tobytes(), method.encode())


def link_namespace(extra_key: str | None, tenant: str, seam_window: int, method: str = METHOD) -> str:
    """Radix `extra_key` of a linked request: the original one plus method, w and the tenant with its length.

    SGLang joins cache_salt, extra_key and adapter with nothing between; the length keeps ("a", "bc") and ("ab", "c")
    apart. Span boundaries live in the marked token ids (:func:`hypic.plan.mark_interiors`).
    """
    return f"{extra_key or ''}{_NAMESPACE}{method}:{seam_window}:{len(tenant)}:{tenant}"


class KeyIdentity(msgspec.Struct, frozen=True):
    """What all artifacts of one server (and rank) have in common.

    Attributes:
        weights: which updates there were; "" for the weights of the launch.
    """

    fingerprint: str
    dtype: str
    tp_rank: int
    tp_size: int
    method: str
    seam_window: int
    weights: str = ""

    @property
    def digest(self) -> bytes:
        """Of all but the rank: a segment has one key at all ranks, each of which holds its part in a store of its own."""
        return _digest(msgspec.msgpack.encode(msgspec.structs.replace(self, tp_rank=0)))

    def of(self, method: Method, dummy: int) -> KeyIdentity:
        """The identity of artifacts for a method; `dummy` is the token that its dummies are."""
        kind = f"{method.kind}:{method.dummies}x{dummy}" if method.dummies else method.kind
        return msgspec.structs.replace(self, method=kind, seam_window=method.seam_window)

    def next_weights(self, source: str = "", complete: bool = False) -> KeyIdentity:
        """Identity after `update_weights*`: nothing compiled before is found again.

        Args:
            source: which files they came from (:func:`checkpoint`); "" if they came from none.
            complete: nothing of the weights before is left, so servers with another past agree.
        """
        before = "" if complete else self.weights
        return msgspec.structs.replace(self, weights=_digest(before.encode(), source.encode()).hex())


def model_fingerprint(model_path: str, hf_config: Any, load_format: str = "auto") -> str:
    """Digest of the config and of the weight files' names, sizes and mtimes, and of the weight index.

    Reads no weights. For a model that is not a local folder, the config and the path identify it.
    """
    config = json.dumps(
        hf_config.to_dict() if hasattr(hf_config, "to_dict") else vars(hf_config), sort_keys=True, default=str
    )
    parts = [config.encode(), str(load_format).encode()]
    folder = Path(model_path)
    parts += _files(folder, ".index.json") if folder.is_dir() else [model_path.encode()]
    return _digest(*parts).hex()


def checkpoint(path: str) -> str:
    """What tells the files of a checkpoint from others, without reading weights; the path itself if it is no local folder."""
    folder = Path(path)
    return _digest(*_files(folder, ".json")).hex() if folder.is_dir() else path


def covers(path: str, launched: str) -> bool:
    """Whether a checkpoint has every tensor that the one of the launch has, as far as safetensors say."""
    there, needed = _tensors(Path(path)), _tensors(Path(launched))
    return bool(needed) and needed <= there


def _tensors(folder: Path) -> set[str]:
    from safetensors import safe_open

    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found.update(tensors.keys())
    return found


def adapter_name(name: str, path: str) -> str:
    """What all servers that have loaded this LoRA adapter call it, whatever id SGLang drew for it in each of them.

    "" if they cannot agree: it is in no local folder.

    Reads no weights: their files' names, sizes and mtimes, and the configuration.
    """
    folder = Path(path)
    return _digest(name.encode(), *_files(folder, ".json")).hex() if folder.is_dir() else ""


def _files(folder: Path, read: str) -> list[bytes]:
    """Weight files as a directory shows them, and digests of those whose names end in `read`."""
    parts = []
    for f in sorted(folder.iterdir()):
        if f.suffix in (".safetensors", ".bin", ".pt", ".gguf"):
            stat = f.stat()
            parts.append(f"{f.name}:{stat.st_size}:{stat.st_mtime_ns}".encode())
        elif f.name.endswith(read):
            parts.append(hashlib.blake2b(f.read_bytes(), digest_size=16).digest())
    return parts
