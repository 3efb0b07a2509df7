"""Blocks put into a stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.memory import untraced
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder
from megatron_mux.memory.stream.insertion import (
    InsertedBlock,
    bucket_sizes,
    buckets,
    inserted,
    scaled,
    workspaces,
)

AT = Moment("forward")


def a_step() -> Stream:
    """One product forwards, one backwards, an operator with scratch; two steps."""
    builder = StreamBuilder()
    builder.allocate(100, Moment("load"), category=Category.PARAMETERS)
    for _ in range(2):
        x = builder.allocate(10, Moment("forward", 0, "mm"), category=Category.ACTIVATIONS)
        y = builder.allocate(10, Moment("backward", 0, "mm"), category=Category.GRADIENTS)
        z = builder.allocate(8, Moment("backward", 0, untraced.CUDNN), category=Category.WORKSPACE)
        builder.free(z, Moment("backward", 0))
        builder.free(x, Moment("optimizer"))
        builder.free(y, Moment("clear"))
    return builder.done()


def test_a_workspace_for_each_thread_right_after_the_first_product() -> None:
    blocks = workspaces(a_step(), 7)
    assert [(block.before, block.size, block.moment.phase) for block in blocks] == [
        (2, 7, "forward"),
        (3, 7, "backward"),
    ]
    told = [f"{event.kind} {event.block} {event.size}" for event in inserted(a_step(), blocks)][:6]
    assert told == [
        "allocate 0 100",
        "allocate 1 10",
        "allocate 2 7",
        "allocate 3 10",
        "allocate 4 7",
        "allocate 5 8",
    ]


def test_buckets_hold_each_gradient_of_one_step_before_the_first() -> None:
    (block,) = buckets(a_step())
    assert (block.before, block.size, block.category) == (1, 10, Category.COMMUNICATION)


def test_what_operators_take_may_be_less_or_more() -> None:
    stream = a_step()
    sizes = [size for size, code in zip(stream.sizes, range(7), strict=True)]
    assert list(scaled(stream, most=False).sizes) == [0 if size == 8 else size for size in sizes]
    assert list(scaled(stream, most=True).sizes) == [16 if size == 8 else size for size in sizes]


@given(st.data())
def test_what_was_there_stays_as_it_was(data: st.DataObject) -> None:
    builder, live = StreamBuilder(), list[int]()
    for size in data.draw(st.lists(st.integers(1, 9), max_size=12)):
        if data.draw(st.booleans()) and live:
            builder.free(live.pop(data.draw(st.integers(0, len(live) - 1))), AT)
        live.append(builder.allocate(size, AT))
    stream = builder.done()
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=4))
    new = Moment("new")
    found = inserted(stream, [InsertedBlock(place, 1000, Category.OTHER, new) for place in places])
    assert Stream.from_json(found.to_json()) == found, "blocks are numbered in order"
    old = [(event.kind, event.size) for event in found if event.moment != new]
    assert old == [(event.kind, event.size) for event in stream]
    expected = list(stream.live())
    kept = [live for live, event in zip(found.live(), found, strict=True) if event.moment != new]
    before = [sum(place <= index for place in places) for index in range(len(stream))]
    assert kept == [live + 1000 * count for live, count in zip(expected, before, strict=True)]


def test_buckets_are_full_at_one_and_at_25_mib() -> None:
    assert list(bucket_sizes([])) == []
    assert list(bucket_sizes([MIB // 2])) == [MIB // 2]
    assert list(bucket_sizes([MIB // 2, MIB, 24 * MIB, 2 * MIB, 3])) == [3 * MIB // 2, 26 * MIB, 3]
