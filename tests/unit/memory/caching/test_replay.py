"""Streams replayed: golden timelines worked out by hand, peaks and their moments, and where memory ends."""

from __future__ import annotations

from megatron_mux.memory.caching.replay import Replay, replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import Moment, Stream, StreamBuilder

EXPANDABLE = Settings(expandable_segments=True)


def stream(*steps: str) -> Stream:
    """Blocks by name: "a 30" allocates 30 MiB, "-a" frees them. The moment's operator is the step itself."""
    builder = StreamBuilder()
    made: dict[str, int] = {}
    for step in steps:
        moment = Moment("forward", None, step)
        if step.startswith("-"):
            builder.free(made[step[1:]], moment)
        else:
            name, size = step.split()
            made[name] = builder.allocate(int(float(size) * MIB), moment)
    return builder.done()


def timeline(found: Replay) -> list[tuple[float, float]]:
    """MiB in use and reserved after each event."""
    pairs = zip(found.allocated, found.reserved, strict=True)
    return [(allocated / MIB, reserved / MIB) for allocated, reserved in pairs]


STEP = stream("w 30", "a 5", "b 14", "-a", "c 12", "-b", "d 16", "-w", "-c", "-d")


def test_golden_timeline() -> None:
    found = replay(STEP)
    assert timeline(found) == [
        (30, 30),  # a segment of its own
        (35, 50),  # 5 of 20 MiB
        (50, 50),  # 14 of the 15 left: what would stay over is no more than 1 MiB, so all 15 are taken
        (45, 50),
        (57, 62),  # the 5 MiB are too few for 12
        (42, 62),  # a and b are one again: 20 MiB
        (58, 62),  # 16 of them
        (28, 62),
        (16, 62),
        (0, 62),
    ]
    assert (found.peak_allocated, found.peak_reserved) == (58 * MIB, 62 * MIB)
    assert found.peak_allocated_at == 6
    assert found.peak_allocated_moment == Moment("forward", None, "d 16")
    assert found.out_of_memory is None


def test_golden_timeline_of_expandable_segments() -> None:
    assert timeline(replay(STEP, EXPANDABLE)) == [
        (30, 40),  # two pages
        (35, 40),  # 5 of the 10 left
        (49, 60),  # 14: the 5 at the end and a page
        (44, 60),
        (56, 80),  # 11 are left at the end, 5 in the hole: another page for 12
        (42, 80),
        (58, 80),  # in the hole of 19
        (28, 80),
        (16, 80),
        (0, 80),
    ]


def test_memory_ends() -> None:
    found = replay(STEP, Settings(capacity=60 * MIB))
    assert found.out_of_memory == 4  # no segment is free as a whole for c
    assert len(found.reserved) == 4
    assert found.peak_reserved == 50 * MIB


def test_a_tensor_without_elements_takes_nothing() -> None:
    assert timeline(replay(stream("a 0", "b 0.5", "-a"))) == [(0, 0), (0.5, 2), (0.5, 2)]
