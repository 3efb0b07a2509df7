"""Streams of allocations: what is refused and where, what is live, and the way to JSON and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.memory.stream.events import (
    CATEGORIES,
    Event,
    Moment,
    Stream,
    StreamBuilder,
    StreamError,
)
from tests.unit.memory.stream.peak import peak_of

FORWARD, BACKWARD = Moment("forward", 0, "mm"), Moment("backward", None, "add")


def moments() -> st.SearchStrategy[Moment]:
    return st.builds(
        Moment,
        st.sampled_from(["forward", "backward", "optimizer"]),
        st.none() | st.integers(0, 3),
        st.sampled_from(["mm", "add", ""]),
    )


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    builder = StreamBuilder()
    live: list[int] = []
    for may_free in draw(st.lists(st.booleans(), max_size=30)):
        if live and may_free:
            builder.free(live.pop(draw(st.integers(0, len(live) - 1))), draw(moments()))
        else:
            category = draw(st.sampled_from(CATEGORIES))
            live.append(builder.allocate(draw(st.integers(0, 1 << 40)), draw(moments()), category))
    return builder.done()


@settings(max_examples=50, deadline=None)
@given(streams())
def test_json_round_trip(stream: Stream) -> None:
    again = Stream.from_json(stream.to_json())
    assert again == stream
    assert list(again) == list(stream)


@settings(max_examples=50, deadline=None)
@given(streams())
def test_peak_and_breakdown_by_hand(stream: Stream) -> None:
    live: dict[int, Event] = {}
    totals = []
    for event in stream:
        if event.kind == "allocate":
            live[event.block] = event
        else:
            del live[event.block]
        totals.append(sum(held.size for held in live.values()))
        by_category = dict.fromkeys(CATEGORIES, 0)
        for held in live.values():
            by_category[held.category] += held.size
        assert stream.breakdown(len(totals) - 1) == {key: size for key, size in by_category.items() if size}
    peak = peak_of(stream)
    assert stream.live().tolist() == totals
    assert peak.size == max(totals, default=0) == sum(peak.breakdown.values())
    if totals:
        assert (peak.index, peak.moment) == (totals.index(peak.size), stream[peak.index].moment)


def test_errors_name_the_place() -> None:
    builder = StreamBuilder()
    block = builder.allocate(1, FORWARD)
    with pytest.raises(StreamError, match=r"event 1 \(forward, layer 0, mm\) allocates -5 bytes"):
        builder.allocate(-5, FORWARD)
    with pytest.raises(
        StreamError, match=r"event 1 \(backward, outside layers, add\) frees block 1, which nothing"
    ):
        builder.free(1, BACKWARD)
    builder.free(block, BACKWARD)
    with pytest.raises(
        StreamError, match=r"event 2 \(backward, outside layers, add\) frees block 0 a second time"
    ):
        builder.free(block, BACKWARD)
