"""Predicts the peak memory of a process from a recorded stream: how much, when, of what, and how certain that is.

Untraced memory is inserted into the recorded stream, and all of it is replayed through the caching allocator. The CUDA
context and NCCL's buffers come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_mux.gpus import Gpu
from megatron_mux.memory import untraced
from megatron_mux.memory.caching.replay import Replay, replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.stream.events import Moment, Stream
from megatron_mux.memory.stream.insertion import InsertedBlock, inserted, scaled, workspaces

FRAGMENTATION, CONTEXT, COMMUNICATORS = "fragmentation", "context", "nccl"
_PHASES = {
    "load": "while the model is loaded",
    "join": "while tasks join",
    "inputs": "while a batch is put on the GPU",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "clear": "while gradients are cleared",
}


@dataclass(frozen=True)
class Prediction:
    """Memory of a step on a GPU.

    Attributes:
        stream: Allocations and frees, untraced ones inserted.
        settings: Allocator options. With a capacity, cached blocks are released before it is exceeded.
        added: Indices of the recorded events before which blocks were inserted, in order.
    """

    stream: Stream
    settings: Settings
    communicators: int
    added: tuple[int, ...] = ()

    @cached_property
    def replay(self) -> Replay:
        """Replay of the stream through the allocator."""
        return replay(self.stream, self.settings)

    @property
    def peak_allocated(self) -> int:
        """Peak of bytes in use, rounded as the allocator does."""
        return self.replay.peak_allocated

    @property
    def peak_reserved(self) -> int:
        """Peak of bytes that the allocator has reserved."""
        return self.replay.peak_reserved

    @cached_property
    def peak_reserved_expandable(self) -> int:
        """The same with expandable segments."""
        if self.settings.expandable_segments:
            return self.peak_reserved
        return replay(self.stream, replace(self._unlimited, expandable_segments=True)).peak_reserved

    @property
    def _unlimited(self) -> Settings:
        """The options without a capacity."""
        return replace(self.settings, capacity=None)

    @property
    def process(self) -> int:
        """Bytes of the process at the peak."""
        return self.peak_reserved + process_overhead(self.communicators)

    @cached_property
    def interval(self) -> tuple[int, int]:
        """The least and the most that `process` may be, from the uncertainty about untraced memory.

        The allocator may reserve less for larger requests: the likely value counts as well.
        """
        found = [self.process]
        for most in (False, True):
            other = scaled(self.stream, most)
            same = other.sizes == self.stream.sizes
            reserved = self.peak_reserved if same else replay(other, self._unlimited).peak_reserved
            found.append(reserved + process_overhead(self.communicators, most))
        return min(found), max(found)

    @cached_property
    def breakdown(self) -> Mapping[str, int]:
        """What `process` is made of: when first most is in use, the bytes asked for by category; what the allocator has
        beyond that at its own peak, which may come later; what is outside of it. Parts without bytes are left out.
        """
        index = self.replay.peak_allocated_at
        found = {str(category): size for category, size in self.stream.breakdown(index).items()}
        found[FRAGMENTATION] = self.peak_reserved - sum(found.values())
        found[CONTEXT] = process_overhead(0)
        found[COMMUNICATORS] = process_overhead(self.communicators) - process_overhead(0)
        return {name: size for name, size in found.items() if size}

    @property
    def moment(self) -> str:
        """When the peak is first reached, in words."""
        return in_words(self.replay.peak_allocated_moment)

    @property
    def recorded_at(self) -> int:
        """Index of that moment's event in the recorded stream, which lacks the inserted blocks."""
        index = self.replay.peak_allocated_at
        return index - sum(place + more <= index for more, place in enumerate(self.added))

    def limited(self, memory: int) -> Prediction:
        """The prediction for a GPU of `memory` bytes, on which the allocator may have to release cached blocks."""
        capacity = max(0, memory - process_overhead(self.communicators))
        return replace(self, settings=replace(self.settings, capacity=capacity))

    def fits(self, memory: int) -> bool:
        """Whether the step runs on a GPU of `memory` bytes."""
        limited = self.limited(memory)
        if max(self.stream.live(), default=0) > (limited.settings.capacity or 0):
            return False
        return limited.replay.out_of_memory is None

    def to_json(self) -> dict[str, object]:
        """The JSON form."""
        return {
            "peak_process_bytes": self.process,
            "peak_process_interval_bytes": list(self.interval),
            "peak_reserved_bytes": self.peak_reserved,
            "peak_reserved_expandable_bytes": self.peak_reserved_expandable,
            "peak_allocated_bytes": self.peak_allocated,
            "breakdown": dict(self.breakdown),
            "moment": self.moment,
        }


def predict(
    stream: Stream,
    gpu: Gpu,
    settings: Settings | None = None,
    communicators: int = 0,
    blocks: Sequence[InsertedBlock] = (),
) -> Prediction:
    """Predict the memory of a process from its recorded stream.

    Args:
        gpu: The GPU; `CUBLAS_WORKSPACE_CONFIG` of the environment counts as well.
        blocks: Blocks to insert besides cuBLAS's workspaces.
    """
    added = [*workspaces(stream, untraced.cublas_of(gpu)), *blocks]
    places = tuple(sorted(block.before for block in added))
    return Prediction(inserted(stream, added), settings or Settings(), communicators, places)


def process_overhead(communicators: int, most: bool | None = None) -> int:
    """Bytes of a process outside the allocator.

    Args:
        most: Upper or lower bound; None for the likely value.
    """
    total = 0.0
    for name, likely in (
        (untraced.CONTEXT, untraced.CONTEXT_BYTES),
        (untraced.COMMUNICATOR, communicators * untraced.COMMUNICATOR_BYTES),
    ):
        entry = untraced.TABLE[name]
        total += likely * (1.0 if most is None else entry.most if most else entry.least)
    return round(total)


def in_words(moment: Moment | None) -> str:
    """A moment in words."""
    if moment is None:
        return "never"
    place = "" if moment.layer is None else f" of layer {moment.layer}"
    what = f", for {moment.operator}" if moment.operator else ""
    return f"{_PHASES.get(moment.phase, moment.phase)}{place}{what}"
