"""The peak of a stream's live bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mux.memory.stream.events import Category, Moment, Stream


@dataclass(frozen=True)
class Peak:
    """The peak of live bytes.

    Attributes:
        size: Requested bytes, without rounding.
        index: The first event that reaches it; -1 if the stream is empty.
        moment: Time of that event.
        breakdown: These bytes by category; categories without any are left out.
    """

    size: int
    index: int
    moment: Moment | None
    breakdown: Mapping[Category, int]


def peak_of(stream: Stream) -> Peak:
    """The peak of a stream."""
    live = stream.live()
    if not live:
        return Peak(0, -1, None, {})
    size = max(live)
    index = live.index(size)
    return Peak(size, index, stream.moment(index), stream.breakdown(index))
