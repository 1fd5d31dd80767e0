"""Prompts as methods get them: token ids with the places of the segments, and what may become an answer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypic.eval.items import Piece


class PromptError(ValueError):
    """An item that cannot be asked; the text says why."""


class Prompt(NamedTuple):
    """``segments`` are [start, end) in ``ids``, in natural order; none ends the prompt."""

    ids: tuple[int, ...]
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def head(self) -> int:
        """Tokens up to the end of the last segment."""
        return self.segments[-1][1] if self.segments else 0


class Codec:
    """Tokens and text of one model: its tokenizer, and the tokens that end an answer.

    Args:
        model: a folder with a tokenizer, or a GGUF file.
    """

    def __init__(self, model: Path) -> None:
        from transformers import AutoTokenizer

        if model.suffix == ".gguf":
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.ends = _ends(model, self.tokenizer)
        self._ids = functools.lru_cache(4096)(self._encode)

    def prompt(self, pieces: Sequence[Piece], *, min_segment: int = 0) -> Prompt:
        """Each piece tokenised by itself. Segments of fewer than ``min_segment`` tokens, empty ones, and one that ends the
        prompt are plain, as they are on the engine. Raises PromptError if there are no tokens at all."""
        ids: list[int] = []
        segments = []
        for piece in pieces:
            start = len(ids)
            ids += self._ids(piece.content) if isinstance(piece.content, str) else piece.content
            if piece.segment and len(ids) - start >= max(min_segment, 1):
                segments.append((start, len(ids)))
        if not ids:
            raise PromptError("a prompt without a token")
        return Prompt(tuple(ids), tuple(s for s in segments if s[1] < len(ids)))

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """``text`` up to the first of ``stop``, and whether there was one."""
    found = [at for s in stop if (at := text.find(s)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _ends(model: Path, tokenizer: Any) -> frozenset[int]:
    import json

    ends: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((model / name).read_text())
        except (OSError, ValueError):
            continue
        eos = found.get("eos_token_id", (found.get("text_config") or {}).get("eos_token_id"))
        ends |= {eos} if isinstance(eos, int) else set(eos or ())
    return frozenset(ends)
