"""How a prompt is written for one model: its chat template, and what fits its context."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypic.eval.data.errors import DataError
from hypic.eval.items import Piece

_PLACE = "HYPIC-PROMPT"


class Template:
    """Prompts as one model reads them.

    Args:
        tokenizer: Hugging Face's; None for plain text without a limit.
        chat: the prompt is a user's message in the tokenizer's chat template; None for "if it has one".
        context: tokens that prompt and answer may have together; None for no limit.

    Thinking is turned off where a template knows ``enable_thinking``: answers of a few tokens leave no room for it.
    """

    def __init__(self, tokenizer: Any = None, *, chat: bool | None = None, context: int | None = None) -> None:
        if tokenizer is None and (chat or context):
            raise DataError("a chat template or a limit needs a tokenizer")
        has = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has:
            raise DataError("the tokenizer has no chat template: leave chat out, or give the model one")
        self.tokenizer = tokenizer
        self.chat = has if chat is None else chat
        self.context = context
        # A tokenizer that puts BOS in front of every text: pieces are tokenised without it, so it is written out.
        self._bos = tokenizer.decode(tokenizer.encode("")[:1]) if tokenizer is not None and _adds_bos(tokenizer) else ""

    def write(
        self,
        pieces: Sequence[Piece],
        max_new_tokens: int,
        notes: Counter[str] | None = None,
        *,
        chat: bool = True,
        lead: str | None = None,
    ) -> tuple[Piece, ...]:
        """The prompt made of ``pieces`` of text, segments as they were.

        What is longer than the context loses whole segments, the one nearest to the middle of the prompt first: LongBench
        cuts the middle out of the token string, which would leave two torn segments. If one segment is left, its middle
        goes.

        Args:
            max_new_tokens: room for the answer.
            notes: counts "prompts cut", "segments dropped" and "segments shortened".
            chat: false writes plain text even for a chat model.
            lead: words that the answer begins with, written for the model: small ones then say what was asked for instead
                of repeating the question. Plain text has "Answer:" before them. None: the prompt ends with ``pieces``.
        Raises:
            DataError: the template changes the prompt, or what is not a segment is too long by itself.
        """
        if chat and self.chat:
            start, end = self._frame(pieces)
            frame = (start, end + (lead or ""))
        else:
            frame = (self._bos, "" if lead is None else f"\nAnswer: {lead}".rstrip())
        if self.context is not None:
            room = self.context - max_new_tokens - sum(map(self._count, frame))
            pieces = self._fit(list(pieces), room, notes if notes is not None else Counter())
        whole = [Piece(frame[0]), *pieces, Piece(frame[1])]
        joined: list[Piece] = []
        for piece in whole:  # plain neighbours are one piece: fewer seams between tokens
            if joined and not piece.segment and not joined[-1].segment:
                joined[-1] = Piece(f"{joined[-1].content}{piece.content}")
            else:
                joined.append(piece)
        return tuple(p for p in joined if p.content)

    def _frame(self, pieces: Sequence[Piece]) -> tuple[str, str]:
        """What the chat template puts around the message. Raises DataError unless it is just that."""
        message = "".join(str(p.content) for p in pieces)
        start, found, end = self._render(_PLACE).partition(_PLACE)
        if not found or self._render(message) not in (start + message + end, start + message.strip() + end):
            raise DataError("the chat template changes what a user says, so segments cannot be found in it")
        return start, end

    def _render(self, message: str) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def _fit(self, pieces: list[Piece], room: int, notes: Counter[str]) -> list[Piece]:
        sizes = [self._count(str(p.content)) for p in pieces]
        if sum(sizes) <= room:
            return pieces
        notes["prompts cut"] += 1
        while sum(sizes) > room:
            segments = [i for i, p in enumerate(pieces) if p.segment]
            if not segments:
                raise DataError(f"{sum(sizes)} tokens besides the documents do not fit into {room}")
            if len(segments) == 1:
                left = room - (sum(sizes) - sizes[segments[0]])
                if left < 2:
                    raise DataError(
                        f"{sum(sizes) - sizes[segments[0]]} tokens besides the documents do not fit into {room}"
                    )
                notes["segments shortened"] += 1
                pieces[segments[0]] = Piece(self._shorten(str(pieces[segments[0]].content), left), True)
                break
            middle = sum(sizes) / 2
            victim = min(segments, key=lambda i: abs(sum(sizes[:i]) + sizes[i] / 2 - middle))
            notes["segments dropped"] += 1
            del pieces[victim], sizes[victim]
        return pieces

    def _shorten(self, text: str, size: int) -> str:
        """The first and the last tokens of a text, ``size`` at most: joining them may make other tokens, so look again."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        for keep in range(size, 1, -1):
            half = keep // 2
            short = self.tokenizer.decode(ids[:half]) + self.tokenizer.decode(ids[len(ids) - half :])
            if self._count(short) <= size:
                return short
        raise DataError(f"no part of a document fits into {size} tokens")


def _adds_bos(tokenizer: Any) -> bool:
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and list(tokenizer.encode(""))[:1] == [bos]
