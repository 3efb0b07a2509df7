"""What the pipeline knows of a bucket: how many passes it makes, how long each takes, what it keeps in memory.

Where costs come from, and which tasks are behind them, is for the rooms above to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_mux.pipeline.action import Action, Unit


@dataclass(frozen=True)
class BucketCost:
    """A bucket's micro-batches, all alike (MuxTune section 3.4.1: computation homogeneity).

    Attributes:
        micro_batches: Of one step.
        forward: `[S]` seconds that a stage takes for a chunk's forward pass.
        backward: `[S]` seconds for its backward pass.
        chunks: In how many pieces each micro-batch is computed.
        memory: `[S]` bytes that a stage keeps of a chunk from its forward to its backward; empty: not counted.
        working: `[S]` bytes that a stage takes besides while it computes a chunk; empty: not counted.
        transfer: `[S - 1]` seconds from a stage to the next and, for the gradient, back; empty: none.
        update: `[S]` seconds that a stage takes for the optimizer steps of the bucket's tasks; empty: none.
    """

    micro_batches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    chunks: int = 1
    memory: tuple[float, ...] = ()
    working: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    update: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward)
        optional = (len(own) or stages for own in (self.memory, self.working, self.update))
        lengths = (len(self.backward), len(self.transfer) or stages - 1, *optional)
        if not stages or lengths != (stages, stages - 1, stages, stages, stages):
            raise ValueError(f"a bucket's costs must all be for the same number of stages: {self}")
        if self.micro_batches < 0 or self.chunks < 1:
            raise ValueError(f"a bucket has at least 0 micro-batches of at least 1 chunk: {self}")
        if (
            min(*self.forward, *self.backward, *self.memory, *self.working, *self.transfer, *self.update, 0.0)
            < 0
        ):
            raise ValueError(f"a bucket's costs must not be negative: {self}")

    @property
    def stages(self) -> int:
        """S."""
        return len(self.forward)

    @property
    def latency(self) -> float:
        """Seconds of a micro-batch's forward pass on the first stage: what buckets are sorted by (rule 1)."""
        return self.forward[0] * self.chunks

    def seconds(self, action: Action) -> float:
        """How long an action takes."""
        of_kind = {"F": self.forward, "B": self.backward, "U": self.update}.get(action.kind, ())
        return of_kind[action.stage] if of_kind else 0.0

    def kept(self, stage: int) -> float:
        """Bytes that a stage keeps of a chunk."""
        return self.memory[stage] if self.memory else 0.0

    def works_with(self, stage: int) -> float:
        """Bytes that a stage takes besides while it computes a chunk."""
        return self.working[stage] if self.working else 0.0

    def to_next(self, stage: int) -> float:
        """Seconds between `stage` and the one after it, either way."""
        return self.transfer[stage] if self.transfer else 0.0


Sizes = Sequence[Sequence[int]]
"""For every bucket, in the order in which they enter: the number of chunks of each of its micro-batches. Those of
several steps that follow each other without a flush stand one after the other."""


def forward_order(sizes: Sizes) -> list[Unit]:
    """Forward passes bucket after bucket, micro-batches of a bucket consecutive (rule 2), chunks in order."""
    return list(_units(sizes, reverse=False))


def backward_order(sizes: Sizes) -> list[Unit]:
    """The same for backward passes: the chunks of a micro-batch in reverse, since later ones read earlier ones' KV."""
    return list(_units(sizes, reverse=True))


def _units(sizes: Sizes, reverse: bool) -> Iterator[Unit]:
    for bucket, micro_batches in enumerate(sizes):
        for micro_batch, chunks in enumerate(micro_batches):
            for chunk in range(chunks):
                yield Unit(bucket, micro_batch, chunks - 1 - chunk if reverse else chunk)


def sizes_of(buckets: Sequence[BucketCost]) -> list[list[int]]:
    """What the orders are made of, where all micro-batches of a bucket are alike."""
    return [[bucket.chunks] * bucket.micro_batches for bucket in buckets]
