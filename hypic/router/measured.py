"""Costs that follow what workers say: sizes from their Hello, the rate of transfers and of messages as they are seen.

Compile speeds are each worker's own and live in :class:`hypic.router.schedule.Worker`.
"""

from __future__ import annotations

import msgspec

from hypic.router import messages as m
from hypic.router.costs import Costs
from hypic.router.rate import Window, extended

BUILT_IN = Costs(
    source="built in, until measured",
    tokens_per_s=10_000,
    forward_s=0.02,
    link_s=0.05,
    message_s=0.001,
    transfer_gb_s=1.0,
)
"""What is reckoned with before anything was measured. Cautious about what a worker does, hopeful about what scatter gains:
the first long request must be scattered for anything to be measured."""

_RISE = 1.1
"""Factor by which a message may seem to take longer with each answer: most that are late waited for a forward pass of the
worker's, which the load view knows of."""
_FROM_SHAPE = ("artifact_bytes", "artifact_token_bytes", "seam_window", "forward_tokens")


class Measured:
    """`costs`, kept up to date."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self._windows: dict[str, Window] = {}
        """Transfers into each worker."""
        self._answered = False

    def hello(self, hello: m.Hello) -> None:
        """Sizes of this model's artifacts and passes; 0 is unknown."""
        said = {name: getattr(hello.shape, name) for name in _FROM_SHAPE}
        self.costs = msgspec.structs.replace(self.costs, **{k: v for k, v in said.items() if v})

    def arrived(self, worker: str, nbytes: int, seconds: float, now: float) -> None:
        """`worker` received an artifact, in `seconds` up to `now`."""
        if nbytes <= 0:
            return
        self._windows[worker] = extended(self._windows.get(worker), nbytes / 1e9, seconds, now)
        pipes = self._windows.values()
        rate = sum(w.rate * w.seconds for w in pipes) / sum(w.seconds for w in pipes)
        self.costs = msgspec.structs.replace(self.costs, transfer_gb_s=rate)

    def round_trip(self, seconds: float) -> None:
        """A worker answered a message."""
        most = _RISE * self.costs.message_s if self._answered else seconds / 2
        self.costs = msgspec.structs.replace(self.costs, message_s=min(seconds / 2, most))
        self._answered = True
