"""Predicts the peak memory of a process from a trace: how much, what it consists of, when, and how certain that is.

The stream of a case is traced or read from the cache, untraced memory is inserted, and all of it is replayed through
the caching allocator. The CUDA context and NCCL's buffers come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_mux.gpus import Gpu
from megatron_mux.memory import untraced
from megatron_mux.memory.caching.replay import Replay, replay
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.stream.events import Moment, Stream
from megatron_mux.memory.stream.insertion import Block, buckets, inserted, scaled, workspaces
from megatron_mux.memory.trace.case import Case

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

Step = Callable[[Case], Stream]
"""The stream of a case, `Tracer.step` for instance."""


@dataclass(frozen=True)
class Prediction:
    """Memory of a step on a GPU.

    Attributes:
        stream: Allocations and frees, untraced ones inserted.
        settings: Allocator options. With a capacity, cached blocks are released before it is exceeded.
        communicators: Number of NCCL communicators of the process.
    """

    stream: Stream
    settings: Settings
    communicators: int

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


def predict(case: Case, step: Step, settings: Settings | None = None, gpus: int = 1) -> Prediction:
    """Predict the memory of a case's step on each GPU.

    Args:
        case: What is trained.
        step: Answers with a case's stream.
        settings: The allocator's options; `torch`'s defaults if None.
        gpus: On how many GPUs with plain `DistributedDataParallel`: each has the whole model, and a batch of `case`.

    Raises:
        WorkerError, StreamError: There is no such stream.
    """
    return prediction(step(case), case, settings, gpus)


def prediction(stream: Stream, case: Case, settings: Settings | None = None, gpus: int = 1) -> Prediction:
    """Predict it from the case's traced stream. `CUBLAS_WORKSPACE_CONFIG` of the environment counts."""
    unseen = cublas(stream, case.gpu)
    if gpus > 1:
        unseen += buckets(stream)
    return Prediction(inserted(stream, unseen), settings or Settings(), int(gpus > 1))


def cublas(stream: Stream, gpu: Gpu) -> list[Block]:
    """Blocks for cuBLAS's workspaces in a stream."""
    return workspaces(stream, untraced.cublas_of(gpu))


def process_overhead(communicators: int, most: bool | None = None) -> int:
    """Bytes of a process outside the allocator.

    Args:
        communicators: Number of NCCL communicators.
        most: Upper or lower bound; None for the likely value.
    """
    total = 0.0
    for name, likely in (
        (untraced.CONTEXT, untraced.context()),
        (untraced.COMMUNICATOR, communicators * untraced.communicator()),
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
