"""Prepares steps in host memory, and ahead of their turn in a thread: records, chunks, micro-batches, template.

A prepared step is a pure function of the plan, of the tasks' data, and of the steps' numbers. So a step computes the
same, whether it was prepared ahead or not. The thread reads tokens from the cache and works with NumPy: it never
touches the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

from megatron_mux.batch.balancing import NO_SEQUENCES, BalancedSequences, balanced_sequences
from megatron_mux.batch.host_batch import HostBatch
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.data.tokenise import Example
from megatron_mux.engine.task_state import TaskState
from megatron_mux.fusion.alignment import Chunk, padded_lengths
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.step import StepChunks, lockstep, must_keep_step, step_chunks, step_template
from megatron_mux.pipeline.action import ChunkId
from megatron_mux.pipeline.check import check
from megatron_mux.pipeline.template import Template
from megatron_mux.runtime import Parallel


@dataclass(frozen=True)
class PreparedStep:
    """What this pipeline computes in a step, in host memory.

    Attributes:
        chunked: The sequences in each chunk.
        batches: For each chunk, a batch for each hybrid task with sequences in it, behind one of references where some
            task compares with any; one without rows where only other pipelines have any.
        tokens: Tokens of each task's batch over all pipelines.
        extra_examples: What tasks read besides their batches, see `TaskState.extra_examples`.
    """

    chunked: StepChunks
    batches: Mapping[ChunkId, tuple[HostBatch, ...]]
    tokens: Mapping[str, int]
    extra_examples: Mapping[str, list[Example]] = field(default_factory=dict)

    def chunk_count(self, chunk_id: ChunkId) -> int:
        """How many chunks the micro-batch of a chunk has."""
        return self.chunked.sizes[chunk_id.bucket][chunk_id.micro_batch]


def prepare_step(
    plan: Plan, tasks: Mapping[str, TaskState], steps: Mapping[str, int], parallel: Parallel, in_step: bool
) -> PreparedStep:
    """Prepare one step of a plan.

    Args:
        tasks: Its tasks, in its order.
        steps: The step of each task, from 0.
        parallel: Where this rank stands.
        in_step: Whether all pipelines must make the same passes, since they gather weights together.
    """
    limits = {name: task.task.spec.data.max_length for name, task in tasks.items()}
    pad_to = padded_lengths(plan.alignment, limits)
    lengths = {name: task.lengths(steps[name], pad_to.get(name, 0)) for name, task in tasks.items()}
    rank = parallel.dp_rank
    if in_step or must_keep_step(plan):
        chunked = lockstep([step_chunks(plan, lengths, other) for other in range(parallel.dp_size)])[rank]
    else:
        chunked = step_chunks(plan, lengths, rank)
    sequences, extra_examples = {}, {}
    wanted: dict[str, set[int]] = {name: set() for name in tasks}
    for piece in chain.from_iterable(chain.from_iterable(chunked.chunks.values())):
        wanted[piece.task].add(piece.sequence)
    share = parallel.experts.share  # ranks without rows make the same passes
    for name, task in share(list(tasks.items())):
        sequences[name] = task.sequences(steps[name], sorted(wanted[name]), pad_to.get(name, 0))
        extra_examples[name] = task.extra_examples(steps[name])
    balanced = balanced_sequences(
        _pieces(chunked),
        {name: task.task.spec.training.router_aux_loss_coef for name, task in tasks.items()},
        {name: of_task.tokens for name, of_task in lengths.items()},
    )
    packer = _Packer(tasks, steps, sequences, parallel)
    batches: dict[ChunkId, tuple[HostBatch, ...]] = {}
    for chunk_id, chunks in chunked.chunks.items():
        made: list[HostBatch] = []
        for chunk in (tuple(share(chunk)) for chunk in chunks):
            refers = packer.refers(
                plan.buckets[chunk_id.bucket].tasks if in_step else (p.task for p in chunk)
            )
            made += [packer.forward_only(chunk)] if refers else []
            micro_batch = chunk_id.bucket, chunk_id.micro_batch
            made.append(packer.trained(chunk, balanced.get(micro_batch, NO_SEQUENCES)))
        batches[chunk_id] = tuple(made)
    tokens = {name: sum(of_task.tokens) for name, of_task in lengths.items()}
    return PreparedStep(chunked, batches, tokens, extra_examples)


@dataclass(frozen=True)
class _Packer:
    """Packs the chunks of a step.

    Attributes:
        tasks: Of the plan, in its order.
        steps: The step of each.
        sequences: Those of each task's step that are in this pipeline's chunks, by number.
        parallel: Where this rank stands.
    """

    tasks: Mapping[str, TaskState]
    steps: Mapping[str, int]
    sequences: Mapping[str, Mapping[int, PackedSequence]]
    parallel: Parallel

    def refers(self, names: Iterable[str]) -> bool:
        """Whether some of these tasks have rows that are computed forward only."""
        return any(self.tasks[name].forward_rows is not None for name in names)

    def trained(self, chunk: Chunk, balanced: BalancedSequences) -> HostBatch:
        """The rows that tasks learn from."""
        return pack(
            [self.sequences[piece.task][piece.sequence] for piece in chunk],
            tuple(self.tasks),
            self.steps,
            {name: task.position_offset for name, task in self.tasks.items()},
            self._multiple,
            spans=[(piece.start, piece.stop) for piece in chunk],
            slots={name: task.slot for name, task in self.tasks.items()},
            balanced=balanced,
        )

    def forward_only(self, chunk: Chunk) -> HostBatch:
        """The chunk's rows of the tasks with a reference, to be computed forward only."""
        rows = {name: info for name, task in self.tasks.items() if (info := task.forward_rows) is not None}
        names = {name: rows[name].name if name in rows else name for name in self.tasks}
        chunk = tuple(piece for piece in chunk if piece.task in rows)
        sequences = [self.sequences[piece.task][piece.sequence] for piece in chunk]
        return pack(
            [piece._replace(task=names[piece.task]) for piece in sequences],
            tuple(names.values()),
            {names[name]: step for name, step in self.steps.items()},
            {info.name: info.offset for info in rows.values()},
            self._multiple,
            training=False,
            spans=[(piece.start, piece.stop) for piece in chunk],
            slots={info.name: info.slot for info in rows.values() if info.slot is not None},
        )

    @property
    def _multiple(self) -> int:
        return self.parallel.tp_size if self.parallel.sequence_parallel else 1


def _pieces(chunked: StepChunks) -> Iterator[tuple[tuple[int, int], str, int]]:
    """Bucket with micro-batch, task and sequence of each piece of a chunk."""
    for chunk_id, chunks in chunked.chunks.items():
        for chunk in chunks:
            for piece in chunk:
                yield (chunk_id.bucket, chunk_id.micro_batch), piece.task, piece.sequence


def checked_template(plan: Plan, sizes: tuple[tuple[int, ...], ...]) -> Template:
    """The template of steps of these sizes, checked unless another template of the plan was."""
    with _making:  # two threads that need the same one make it once
        return _checked_template(plan, sizes)


@lru_cache(maxsize=8)
def _checked_template(plan: Plan, sizes: tuple[tuple[int, ...], ...]) -> Template:
    template = step_template(plan, sizes)
    if plan not in _checked:  # later templates are made by the same rules
        check(template, sizes, plan.stages, len(plan.buckets), plan.virtual)
        _checked.append(plan)
    return template


_making = threading.Lock()
_checked: deque[Plan] = deque(maxlen=8)


def sizes_of(steps: Sequence[PreparedStep]) -> tuple[tuple[int, ...], ...]:
    """The sizes that a template is made for: chunks of each micro-batch, bucket by bucket, step by step."""
    return tuple(bucket for step in steps for bucket in step.chunked.sizes)


@dataclass(eq=False)
class ReadAhead:
    """Prepares steps that follow those that run, as if nobody joined or left and the plan stayed.

    Args:
        parallel: Where this rank stands.
        in_step: See `prepare_step`.
    """

    parallel: Parallel
    in_step: bool
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "read-ahead"))
    _coming: deque[Future[PreparedStep]] = field(default_factory=deque)
    _template: Future[None] | None = None
    _plan: Plan | None = None
    _tasks: Mapping[str, TaskState] = field(default_factory=dict)
    _next: Mapping[str, int] = field(default_factory=dict)

    def take(self, plan: Plan, tasks: Mapping[str, TaskState], count: int) -> list[PreparedStep]:
        """The next steps, prepared now unless they were ahead.

        Args:
            tasks: Its tasks, in its order.
            count: How many steps.
        """
        steps = {name: task.step for name, task in tasks.items()}
        same = plan == self._plan and steps == self._next
        if not (same and all(self._tasks[name] is task for name, task in tasks.items())):
            self.forget()
        prepared = []
        for later in range(count):
            if self._coming:
                prepared.append(self._coming.popleft().result())
            else:
                prepared.append(self._prepare(plan, tasks, _after(steps, later)))
        self._plan, self._tasks, self._next = plan, tasks, _after(steps, count)
        return prepared

    def prepare_next(self, count: int) -> None:
        """Prepare so many steps after those that were taken last, and their template, while those run."""
        plan, tasks = self._plan, self._tasks
        if plan is None:
            return
        left = min(task.total_steps - self._next[name] for name, task in tasks.items())
        for later in range(len(self._coming), min(count, left)):
            steps = _after(self._next, later)
            self._coming.append(self._thread.submit(self._prepare, plan, tasks, steps))
        if self._coming:
            self._template = self._thread.submit(_make_template, plan, tuple(self._coming))

    def forget(self) -> None:
        """Drop what is prepared, and the tasks it is for: once this returns, nothing here knows or reads them."""
        self._plan, self._tasks = None, {}
        if self._template is None:
            return
        jobs: list[Future[Any]] = [*self._coming, self._template]
        for job in jobs:
            job.cancel()
        self._coming.clear()
        self._template = None
        # A job that has begun cannot be cancelled: the thread runs this one once that has ended and is dropped.
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """End the thread; nothing is prepared ahead any more."""
        self.forget()
        self._thread.shutdown(cancel_futures=True)

    def _prepare(self, plan: Plan, tasks: Mapping[str, TaskState], steps: Mapping[str, int]) -> PreparedStep:
        return prepare_step(plan, tasks, steps, self.parallel, self.in_step)


def _after(steps: Mapping[str, int], later: int) -> dict[str, int]:
    return {name: step + later for name, step in steps.items()}


def _make_template(plan: Plan, coming: Sequence[Future[PreparedStep]]) -> None:
    """Have the template of the coming steps made before they are taken. They come before it in the same thread."""
    if not any(future.cancelled() or future.exception() for future in coming):
        checked_template(plan, sizes_of([future.result() for future in coming]))
