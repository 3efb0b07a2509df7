"""Measuring links: what bytes take is told from latency and noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import pytest

from megatron_mux.moe import measure_links
from megatron_mux.moe.measure_links import LinkMeter, Transfer
from megatron_mux.runtime import Parallel

LATENCY, SPEED = 1e-3, 1e9


def measured(monkeypatch: pytest.MonkeyPatch, delays: Iterator[float], most: int = 1 << 28) -> Transfer:
    """What a link of 1 GB/s is taken for whose transfers are delayed in turns."""
    monkeypatch.setattr(measure_links, "_MOST_BYTES", most)

    def time(self: LinkMeter, links: Sequence[tuple[int, int]], size: int) -> float:
        return LATENCY + size / SPEED + next(delays)

    monkeypatch.setattr(LinkMeter, "_time", time)
    return LinkMeter(Parallel.alone("cpu"), seconds=5e-3).measure([(0, 1)])


def test_latency_is_no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, repeat(0.0))
    assert found.bandwidth == pytest.approx(SPEED) and found.latency == pytest.approx(LATENCY)


@pytest.mark.parametrize(
    "delays",
    [
        # The first transfers are delayed, small ones more: they would take longer than large ones.
        [0.0, 2.0] * 3,
        # Of three large transfers two have lost a packet, and wait for 200 ms.
        [0.2, 0.0] * 2,
        [0.03, 0.0, 0.02, 0.0, 0.005, 0.0],
    ],
    ids=["pauses", "lost packets", "pauses in each of the first"],
)
def test_what_delays_some_transfers_makes_no_link_fast_or_slow(
    delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(monkeypatch, iter([0.1] * 2 + delays + [0.0] * 100))
    assert found.bandwidth == pytest.approx(SPEED)


def test_a_link_that_noise_hides_is_not_taken_for_faster_than_it_was_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for short in (2.0, 57e-6):  # small transfers take longer than large ones, or almost as long
        pauses = iter([0.1] * 2 + [0.0, short] * 100)
        assert 0 < measured(monkeypatch, pauses, most=1 << 16).bandwidth < SPEED
