"""What things take: measured figures that placement and simulation reckon with. Read from TOML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

NonNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class CostsError(ValueError):
    """A costs file that cannot be used; the text names the field."""


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured on one kind of worker.

    Attributes:
        source: where the figures are from.
        tokens_per_s: compile speed of full forward passes.
        forward_s: what a forward pass takes at least, however few tokens it has.
        forward_tokens: tokens of the largest forward pass (SGLang's chunked prefill size).
        link_s: link of a request without segments: its own forward pass.
        link_segment_s: added by each segment.
        link_token_s: added by each token that is computed at the link (plain spans, seams).
        message_s: one message from one process to another.
        transfer_gb_s: rate at which one worker receives artifacts.
        artifact_bytes: fixed part of an artifact.
        artifact_token_bytes: its part for each interior token.
        seam_window: w.
    """

    source: str = ""
    tokens_per_s: Positive
    forward_s: NonNegative = 0.0
    forward_tokens: Annotated[int, Meta(ge=1)] = 8192
    link_s: NonNegative = 0.0
    link_segment_s: NonNegative = 0.0
    link_token_s: NonNegative = 0.0
    message_s: NonNegative = 0.0
    transfer_gb_s: Positive
    artifact_bytes: Annotated[int, Meta(ge=0)] = 0
    artifact_token_bytes: Annotated[int, Meta(ge=0)] = 0
    seam_window: Annotated[int, Meta(ge=0)] = 8

    def forward_seconds(self, tokens: int, tokens_per_s: float = 0.0) -> float:
        """One forward pass that compiles `tokens`: bound by arithmetic or by what any pass costs."""
        return max(self.forward_s, tokens / (tokens_per_s or self.tokens_per_s))

    def compile_seconds(self, tokens: int, tokens_per_s: float = 0.0) -> float:
        """Passes for `tokens` that fill them one after the other."""
        full, rest = divmod(tokens, self.forward_tokens)
        seconds = full * self.forward_seconds(self.forward_tokens, tokens_per_s)
        return seconds + (self.forward_seconds(rest, tokens_per_s) if rest else 0.0)

    def artifact_nbytes(self, tokens: int, seam_window: int | None = None) -> int:
        w = self.seam_window if seam_window is None else seam_window
        return self.artifact_bytes + self.artifact_token_bytes * max(tokens - w, 0)

    def transfer_seconds(self, nbytes: int) -> float:
        return nbytes / (self.transfer_gb_s * 1e9)

    def link_seconds(self, segments: int, plain_tokens: int) -> float:
        computed = plain_tokens + segments * self.seam_window
        return self.link_s + segments * self.link_segment_s + computed * self.link_token_s


def read_costs(path: Path) -> Costs:
    """Raises CostsError."""
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    try:
        return decode(path.read_bytes(), type=Costs)
    except (OSError, ValueError) as e:  # msgspec's and tomllib's errors are ValueErrors
        raise CostsError(f"{path}: {e}") from None
