"""Costs that follow what is seen."""

from __future__ import annotations

import pytest

from hypic.router.costs import Costs
from hypic.router.measured import BUILT_IN, Measured
from hypic.router.rate import Rate, extended
from hypic.router.schedule import Cluster, Segment, Worker, place


def test_transfers_that_overlap_share_a_pipe() -> None:
    """Two of 1 GB in the same second are 2 GB/s, not 1; another worker's pipe is another."""
    measured = Measured(BUILT_IN)
    measured.arrived("w0", 10**9, 1.0, now=10.0)
    assert measured.costs.transfer_gb_s == pytest.approx(1.0)
    measured.arrived("w0", 10**9, 1.0, now=10.0)
    assert measured.costs.transfer_gb_s == pytest.approx(2.0)
    measured.arrived("w1", 10**9, 1.0, now=10.0)
    assert measured.costs.transfer_gb_s == pytest.approx(1.5), "the mean of both pipes, each a second long"
    measured.arrived("w0", 0, 1.0, now=30.0)
    assert measured.costs.transfer_gb_s == pytest.approx(1.5), "of unknown size: says nothing"


def test_an_answer_that_waited_for_a_pass_is_no_slow_message() -> None:
    measured = Measured(BUILT_IN)
    measured.round_trip(0.01)
    assert measured.costs.message_s == pytest.approx(0.005), "the first counts, whatever was built in"
    measured.round_trip(1.0)
    assert measured.costs.message_s == pytest.approx(0.0055)
    measured.round_trip(0.002)
    assert measured.costs.message_s == pytest.approx(0.001), "the fastest is nearest to the truth"


def test_a_rate_is_an_average_over_the_last_seconds_of_work() -> None:
    """A short part that was lucky counts for little, an hour of work long ago for nothing."""
    rate = Rate()
    rate.add(1000, 1.0)
    assert (rate.rate, rate.seconds) == (1000, 1.0)
    rate.add(200, 0.01)
    assert 1000 < rate.rate < 1250
    window = extended(extended(None, 1000, 1.0, now=10.0), 200, 0.01, now=20.0)
    assert window.rate == pytest.approx(rate.rate), "the same where nothing overlaps"
    rate.add(10_000, 100.0)
    assert rate.rate == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(("gb_s", "scattered"), [(10.0, True), (0.0001, False)])
def test_the_threshold_is_measured(gb_s: float, scattered: bool) -> None:
    """The same request is scattered or not as transfers turn out to be fast or slow."""
    measured = Measured(Costs(tokens_per_s=1000, transfer_gb_s=1.0, link_s=0.1))
    seconds = 1e6 / (gb_s * 1e9)
    measured.arrived("w0", 10**6, seconds, now=10.0)
    cluster = Cluster(measured.costs)
    cluster.workers = {name: Worker(name) for name in ("w0", "w1")}
    segments = [Segment(bytes([i]) * 24, 500, 10**6) for i in range(4)]
    assert place(cluster, segments).scattered is scattered
