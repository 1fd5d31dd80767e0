"""Host side of a batch with linked or compiling rows: made by the scheduler, read by the forward pass.

Plain Python lists and numpy; nothing here touches a device, so it can be made while the previous batch runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hypic.engine.request import Compile, Link
from hypic.kernels.chain_plans import ChainItem
from hypic.plan import NO_ARTIFACT, LinkLayout, Run

CHAIN_LIMIT = 128
"""A run of at most this many tokens goes through the seam-chain kernel; a longer one through SGLang's chunked kernel."""


@dataclass
class LinkRow:
    """A linked row of the batch: presented tokens [begin, end) of its prompt."""

    link: Link
    layout: LinkLayout
    begin: int
    end: int
    runs: list[Run]
    positions: np.ndarray
    first: bool
    """The chunk that copies the interiors."""
    last: bool
    """The chunk that ends the prompt."""
    checkpoint: tuple[int, int] | None = None
    """(natural position, state slot): keep the linear state after that many tokens in the slot."""


@dataclass
class CompileRow:
    """A compiling row: tokens [begin, end) of its segment."""

    compile: Compile
    pool_row: int
    """Row of req_to_token."""
    begin: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.compile.length


@dataclass
class BatchPlan:
    """Rows of one extend batch that are not ordinary, by row index."""

    links: dict[int, LinkRow] = field(default_factory=dict)
    compiles: dict[int, CompileRow] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.links or self.compiles)


@dataclass
class ChainRow:
    row: int
    fresh: bool
    items: list[ChainItem]


@dataclass
class NativeRow:
    """A run that SGLang's own linear kernel computes."""

    row: int
    start: int
    length: int
    token: int


@dataclass
class Checkpoint:
    row: int
    slot: int


@dataclass
class Stage:
    """One step of a linear layer: the seam chains of all rows, then native runs, then state checkpoints."""

    chains: list[ChainRow] = field(default_factory=list)
    natives: list[NativeRow] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)


def linear_stages(plan: BatchPlan, prefix_lens: list[int], extend_lens: list[int], conv_width: int) -> list[Stage]:
    """Cut the batch into stages. Most batches need one: seams in the chain, query and ordinary rows in the native kernel.

    Args:
        plan: the rows that are not ordinary.
        prefix_lens, extend_lens: of all rows, as presented to SGLang.
        conv_width: K-1.
    """
    stages = [Stage()]
    token = 0
    for row, (prefix, length) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        link = plan.links.get(row)
        if link is None:
            stages[0].natives.append(NativeRow(row, prefix, length, token))
        else:
            _link_stages(stages, row, link, token, conv_width)
        token += length
    return stages


_CHAIN, _NATIVE, _CHECKPOINT = range(3)
"""Order within a stage."""


def _link_stages(stages: list[Stage], row: int, link: LinkRow, token: int, conv_width: int) -> None:
    """Deal the row's pieces to the stages: a piece opens a new stage when its phase has passed in the current one."""
    fresh = link.begin == link.layout.prefix_len and link.layout.hit == 0
    at, phase = 0, -1
    chain: ChainRow | None = None
    for piece_phase, piece in _pieces(link, row, token, conv_width):
        if piece_phase < phase or (piece_phase == phase != _CHAIN):
            at, chain = at + 1, None
        phase = piece_phase
        while len(stages) <= at:
            stages.append(Stage())
        if isinstance(piece, ChainItem):
            if chain is None:
                chain = ChainRow(row, fresh, [])
                stages[at].chains.append(chain)
            chain.items.append(piece)
        elif isinstance(piece, NativeRow):
            stages[at].natives.append(piece)
        else:
            stages[at].checkpoints.append(piece)
        fresh = False


def _pieces(
    link: LinkRow, row: int, token: int, conv_width: int
) -> Iterator[tuple[int, ChainItem | NativeRow | Checkpoint]]:
    for run in _split_at_checkpoint(link):
        payload, own, shift = NO_ARTIFACT, 0, 0
        if run.segment != NO_ARTIFACT:
            segment = link.link.segments[run.segment]
            assert segment.artifact is not None
            payload = segment.artifact.base
            own = min(conv_width, max(segment.length - link.link.seam_window, 0))
            shift = segment.start
        length, first = run.length, token + run.offset
        if length > CHAIN_LIMIT:
            yield _NATIVE, NativeRow(row, run.start, length, first)
            first, length = first + length, 0
        if length or payload != NO_ARTIFACT:
            yield _CHAIN, ChainItem(first, length, payload, own, shift)
        if link.checkpoint is not None and run.length and run.start + run.length == link.checkpoint[0]:
            yield _CHECKPOINT, Checkpoint(row, link.checkpoint[1])


def _split_at_checkpoint(link: LinkRow) -> Iterator[Run]:
    """The runs, none of which goes on behind the checkpoint, be it with tokens or with an artifact."""
    for run in link.runs:
        cut = link.checkpoint[0] - run.start if link.checkpoint is not None else 0
        if 0 < cut < run.length or (0 < cut == run.length and run.segment != NO_ARTIFACT):
            yield Run(run.offset, cut, run.start, NO_ARTIFACT)
            yield Run(run.offset + cut, run.length - cut, run.start + cut, run.segment)
        else:
            yield run
