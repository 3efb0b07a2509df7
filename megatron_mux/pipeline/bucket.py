"""The cost of a bucket as the pipeline sees it: number of passes, seconds and bytes of each.

The packages above compute these costs and know which tasks a bucket holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_mux.pipeline.action import Action, ChunkId


@dataclass(frozen=True)
class BucketCost:
    """Costs of a bucket whose micro-batches are all alike (MuxTune section 3.4.1: computation homogeneity).

    Attributes:
        micro_batches: Number of micro-batches in one step.
        forward: `[S]` seconds of a chunk's forward pass on each stage.
        backward: `[S]` seconds of a chunk's backward pass on each stage.
        chunks: Number of chunks in each micro-batch.
        memory: `[S]` bytes each stage keeps for a chunk between its forward and backward pass (default: none).
        working: `[S]` bytes each stage needs in addition while it computes a chunk (none).
        transfer: `[S - 1]` seconds to send a chunk from a stage to the next, or its gradient back (none).
        update: `[S]` seconds of the optimizer steps of the bucket's tasks on each stage (none).
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
        for name in ("memory", "working", "transfer", "update"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * (stages - (name == "transfer")))
        of_stages = (self.backward, self.memory, self.working, (*self.transfer, 0.0), self.update)
        if not stages or any(len(values) != stages for values in of_stages):
            raise ValueError(f"a bucket's costs must all be for the same number of stages: {self}")
        if self.micro_batches < 0 or self.chunks < 1:
            raise ValueError(f"a bucket has at least 0 micro-batches of at least 1 chunk: {self}")
        if min(*self.forward, *self.backward, *self.memory, *self.working, *self.transfer, *self.update) < 0:
            raise ValueError(f"a bucket's costs must not be negative: {self}")

    @property
    def stages(self) -> int:
        """Number of stages S."""
        return len(self.forward)

    @property
    def latency(self) -> float:
        """Seconds of a micro-batch's forward pass on the first stage. Buckets are sorted by it (rule 1)."""
        return self.forward[0] * self.chunks

    def seconds(self, action: Action) -> float:
        """Seconds that an action takes."""
        of_kind = {"F": self.forward, "B": self.backward, "U": self.update}.get(action.kind)
        return of_kind[action.stage] if of_kind else 0.0


Sizes = Sequence[Sequence[int]]
"""The number of chunks of every micro-batch, by bucket, in the order in which buckets enter the pipeline. Buckets of
several steps that run without a flush are listed one step after the other."""


def forward_order(sizes: Sizes) -> list[ChunkId]:
    """The order of forward passes: bucket by bucket, micro-batches consecutive (rule 2), chunks in order."""
    return list(_chunk_ids(sizes, reverse=False))


def backward_order(sizes: Sizes) -> list[ChunkId]:
    """The order of backward passes: chunks of a micro-batch in reverse, since later ones read earlier ones' KV."""
    return list(_chunk_ids(sizes, reverse=True))


def _chunk_ids(sizes: Sizes, reverse: bool) -> Iterator[ChunkId]:
    for bucket, micro_batches in enumerate(sizes):
        for micro_batch, chunks in enumerate(micro_batches):
            for chunk in range(chunks):
                yield ChunkId(bucket, micro_batch, chunks - 1 - chunk if reverse else chunk)


def sizes_of(buckets: Sequence[BucketCost]) -> list[list[int]]:
    """The sizes of buckets whose micro-batches all have the same number of chunks."""
    return [[bucket.chunks] * bucket.micro_batches for bucket in buckets]
