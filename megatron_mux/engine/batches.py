"""The micro-batches of the steps that run: from host memory to the device when their turn comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from megatron_mux.batch.balancing import RouterLoadAccumulator
from megatron_mux.batch.host_batch import HostBatch
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.prepared import PreparedStep
from megatron_mux.engine.task_state import TaskState
from megatron_mux.fusion.plan import Bucket
from megatron_mux.kernels.attention.carry import Carry
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.runtime import Parallel, pinned


@dataclass(frozen=True)
class Burst:
    """Steps that are taken together, and their tasks.

    Attributes:
        tasks: By name, in the plan's order.
        buckets: Of one step.
        steps: The prepared steps.
        parallel: Where this rank stands.
    """

    tasks: Mapping[str, TaskState]
    buckets: Sequence[Bucket]
    steps: Sequence[PreparedStep]
    parallel: Parallel

    def bucket(self, bucket: int) -> Bucket:
        """A bucket by its index, counted on over the steps of a burst."""
        return self.buckets[bucket % len(self.buckets)]

    def step(self, bucket: int) -> int:
        """The step that a bucket's index, counted on over steps, is in."""
        return bucket // len(self.buckets)


class Staging:
    """Pinned memory from which the micro-batches of a burst are copied to a GPU.

    It grows before a burst begins, never during one: getting pinned memory waits for the whole device. The copies
    of the burst before are done by then.

    Args:
        parallel: Where this rank stands.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._device = parallel.device
        self._memory: Tensor | None = None

    def places(self, batches: Sequence[HostBatch]) -> dict[int, Tensor]:
        """A place for each batch, by its `id`; none where the device needs none."""
        size = sum(batch.buffer.data.size for batch in batches)
        if self._memory is None or self._memory.numel() < size:
            self._memory = pinned(size, self._device)
        if self._memory is None:
            return {}
        parts = self._memory[:size].split([batch.buffer.data.size for batch in batches])
        return {id(batch): place for batch, place in zip(batches, parts, strict=True)}


@dataclass(eq=False)
class StepBatches:
    """The micro-batches of this pipeline in one or several steps; a chunk is on the device once it is asked for.

    Args:
        burst: The steps.
        staging: Where they are copied from.
    """

    burst: Burst
    staging: Staging
    _laid_out: dict[ChunkId, tuple[PackedBatch, ...]] = field(default_factory=dict, init=False)
    _carries: dict[tuple[int, int], Carry] = field(default_factory=dict, init=False)
    _loads: dict[tuple[int, int], RouterLoadAccumulator | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        together = [
            batch for step in self.burst.steps for batches in step.batches.values() for batch in batches
        ]
        self._places = self.staging.places(together)

    def __getitem__(self, chunk_id: ChunkId) -> tuple[PackedBatch, ...]:
        """A batch for each hybrid task with sequences in the chunk; without rows if only other pipelines have any."""
        if chunk_id not in self._laid_out:
            step, local = self._own(chunk_id)
            carry, micro_batch = None, (chunk_id.bucket, chunk_id.micro_batch)
            if step.chunk_count(local) > 1:
                # Keys and values wait for later chunks of the same micro-batch only.
                carry = self._carries.setdefault(micro_batch, Carry())
            self._laid_out[chunk_id] = tuple(
                self._lay_out(batch, micro_batch, carry) for batch in step.batches[local]
            )
        return self._laid_out[chunk_id]

    def _lay_out(self, batch: HostBatch, micro_batch: tuple[int, int], carry: Carry | None) -> PackedBatch:
        loads, place = self._loads.get(micro_batch), self._places.get(id(batch))
        made = batch.to(self.burst.parallel.device, carry, place, loads)
        self._loads[micro_batch] = made.balanced.loads
        return made

    def rows(self, chunk_id: ChunkId) -> int:
        """Rows of a chunk, before they are divided among tensor ranks; without laying it out."""
        step, local = self._own(chunk_id)
        return sum(batch.rows for batch in step.batches[local])

    def labels(self, chunk_id: ChunkId) -> int:
        """Labelled tokens of a chunk; without laying it out."""
        step, local = self._own(chunk_id)
        return sum(batch.labels for batch in step.batches[local])

    def tasks(self, chunk_id: ChunkId) -> list[set[str] | None]:
        """The tasks of each batch of a chunk, None for one with rows of references; without laying it out."""
        step, local = self._own(chunk_id)
        return [set(batch.task_rows) if batch.training else None for batch in step.batches[local]]

    @property
    def max_rows(self) -> int:
        """Rows of the largest chunk."""
        chunks = (batches for step in self.burst.steps for batches in step.batches.values())
        return max((sum(batch.rows for batch in batches) for batches in chunks), default=1)

    def anew(self) -> StepBatches:
        """A copy with nothing laid out yet."""
        return replace(self)

    def forget(self, chunk_id: ChunkId) -> RouterLoadAccumulator | None:
        """Drop a chunk that is done; harmless for one that was never laid out.

        Returns:
            What its micro-batch's balanced sequences selected, if there are any and no chunk of it is left.
        """
        self._laid_out.pop(chunk_id, None)
        if chunk_id.chunk:
            return None
        # The last to be back-propagated.
        self._carries.pop((chunk_id.bucket, chunk_id.micro_batch), None)
        return self._loads.pop((chunk_id.bucket, chunk_id.micro_batch), None)

    def label(self, action: Action) -> str:
        """Label of a pass in a picture: its tasks, hybrid task by hybrid task."""
        step, local = self._own(action.chunk_id)
        return " | ".join("+".join(batch.task_rows) for batch in step.batches[local] if batch.task_rows)

    def _own(self, chunk_id: ChunkId) -> tuple[PreparedStep, ChunkId]:
        """The chunk's step, and the chunk as it is numbered in that step."""
        step, bucket = divmod(chunk_id.bucket, len(self.burst.buckets))
        return self.burst.steps[step], replace(chunk_id, bucket=bucket)
