"""What a recording says of each pass: the bytes held at its moments, and what the micro-batch contained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_mux.dry_run.run_spec import JOINS, STEP, Recording, TaskRecords
from megatron_mux.estimate.rehearsal import Rehearsal
from megatron_mux.footprint.content import Array, Contents
from megatron_mux.fusion.contents import contents_of
from megatron_mux.fusion.step import Lengths, StepChunks, step_chunks
from megatron_mux.memory.stream.events import CATEGORIES, Category
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.tasks import TaskSpec

Events = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """The events of an action.

    Attributes:
        start, stop: Its first event, and the one behind its last.
    """

    step: int
    action: Action
    start: int
    stop: int


class Windows:
    """The passes of a rehearsal on one rank.

    Args:
        pipeline: Which of the pipelines the rank belongs to.
        has_loss: Whether the rank has the last stage.
    """

    def __init__(
        self, rehearsal: Rehearsal, recording: Recording, pipeline: int = 0, has_loss: bool = True
    ) -> None:
        self.rehearsal = rehearsal
        self.recording = recording
        self.pipeline, self.has_loss = pipeline, has_loss
        stream = recording.stream
        self._codes = codes = np.array(stream.codes)
        blocks = np.where(codes < 0, ~codes, codes)
        # Messages of other micro-batches come and go meanwhile, and tasks share a buffer to sum gradients in:
        # `footprint.memory` counts them.
        counts = np.array(stream.categories) != CATEGORIES.index(Category.COMMUNICATION)
        self._counts = counts[blocks]
        self._blocks = blocks
        self._born = np.zeros(len(stream.sizes), np.int64)
        self._born[blocks[codes >= 0]] = np.flatnonzero(codes >= 0)
        sizes = np.array(stream.sizes, np.float64)[blocks] * self._counts
        # Before each event, and after the last.
        self._live = np.concatenate([[0.0], np.cumsum(np.where(codes < 0, -sizes, sizes))])
        stay = np.isin(blocks, blocks[codes < 0], invert=True)
        self._persistent = np.abs(sizes) * stay
        self._categories = np.array(stream.categories)[blocks]
        self._layers = np.array([-1 if m.layer is None else m.layer for m in recording.stream.moment_names])
        self._moments = np.array(recording.stream.moments)

    @cached_property
    def joins(self) -> list[tuple[int, int]]:
        """The events of each task's registration."""
        marks = self.recording.marks
        begins = [index for index, what in marks if what == JOINS]
        first = next(index for index, what in marks if what == STEP)
        return list(zip(begins, [*begins[1:], first], strict=True))

    @cached_property
    def all(self) -> list[Window]:
        """The actions of all steps."""
        windows, step = [], -1
        marks = [*self.recording.marks, (len(self._live) - 1, STEP)]
        for (start, what), (stop, _) in zip(marks, marks[1:], strict=False):
            if what == STEP:
                step += 1
            elif what != JOINS:
                windows.append(Window(step, Action.parse(what), start, stop))
        return windows

    def of(self, kind: str, bucket: int) -> list[Window]:
        """The actions of this kind of a bucket, in the steps that count."""
        return [w for w in self._of(bucket) if w.action.kind == kind and w.step >= self.rehearsal.warm]

    def grown(self, start: int, stop: int) -> float:
        """Bytes by which these events let grow what is held."""
        return float(self._live[stop] - self._live[start])

    def persistent(self, start: int, stop: int, category: Category | None = None) -> float:
        """Bytes allocated by these events that are there at the end of the run; of a category, if one is given."""
        sizes = self._persistent[start:stop]
        if category is not None:
            sizes = sizes * (self._categories[start:stop] == CATEGORIES.index(category))
        return float(sizes.sum())

    def updated(self, bucket: int, category: Category | None = None) -> float:
        """Bytes that a bucket's updates allocated and that are there at the end of the run; of a category, if given."""
        return sum(
            self.persistent(w.start, w.stop, category) for w in self._of(bucket) if not w.action.is_pass
        )

    def _of(self, bucket: int) -> list[Window]:
        every = len(self.rehearsal.groups)
        return [w for w in self.all if w.action.bucket % every == bucket]

    def delta(self, window: Window) -> Array:
        """`[N]` bytes after each event of a window, above those before it."""
        delta: Array = self._live[window.start + 1 : window.stop + 1] - self._live[window.start]
        return delta

    def local_layers(self, window: Window) -> Events:
        """`[N]` the layer of each event, from the window's first one; -1 outside layers."""
        layers = self._layers[self._moments[window.start : window.stop]]
        local: Events = np.where(
            layers < 0, -1, layers - min((n for n in layers.tolist() if n >= 0), default=0)
        )
        return local

    def second_layer(self, window: Window) -> tuple[int, int] | None:
        """The events of a forward pass, from its start, at which the second layer of three or more begins and ends.

        A frozen reference passes the layers before: the last time counts.
        """
        local = self.local_layers(window)
        first = np.flatnonzero(local == 0)
        behind = local[first[-1] :] if len(first) else local[:0]
        begins, ends = (np.flatnonzero(behind == layer) for layer in (1, 2))
        if not len(begins) or not len(ends):
            return None
        return int(first[-1] + begins[0]), int(first[-1] + ends[0])

    def kept_by_second(self, window: Window) -> float:
        """Bytes that a forward pass keeps of its second layer of three or more; 0 if it has fewer."""
        kept = self.second_layer(window)
        return 0.0 if kept is None else self.grown(*(window.start + at for at in kept))

    def events(self, window: Window) -> tuple[Events, list[int]]:
        """Events of a window, from its start, and what tells each from others, by which sizes are matched.

        Allocations, and frees of what was there before. Without those of messages, which come and go at other times.
        """
        span = slice(window.start, window.stop)
        frees = self._codes[span] < 0
        before = self._born[self._blocks[span]] < window.start
        events = np.flatnonzero(self._counts[span] & (~frees | before))
        keys: list[int] = (2 * self._moments[span] + frees)[events].tolist()
        return events, keys

    def lifetimes(self, window: Window) -> list[tuple[int, int]]:
        """The events at which a block is freed that was allocated in the same window, and allocated, from its start."""
        span = slice(window.start, window.stop)
        born = self._born[self._blocks[span]]
        frees = np.flatnonzero((self._codes[span] < 0) & (born >= window.start))
        return list(zip(frees.tolist(), (born[frees] - window.start).tolist(), strict=True))

    def contents(self, windows: Sequence[Window]) -> Contents:
        """What the micro-batches of these windows contain, in rows of the group's signatures."""
        contents = []
        for window in windows:
            bucket = window.action.bucket % len(self.rehearsal.groups)
            chunked, lengths = self.all_chunked[window.step]
            chunk_id = ChunkId(bucket, window.action.micro_batch, window.action.chunk)
            pieces = [piece for chunk in chunked.chunks.get(chunk_id, ()) for piece in chunk]
            group = self.rehearsal.groups[bucket]
            columns = {piece.task: group.index(int(piece.task.split("-")[1])) for piece in pieces}
            device = self.rehearsal.run.device
            contents.append(contents_of([pieces], lengths, columns, len(group), device, self._prefixed))
        return Contents(
            *(np.concatenate(parts) for parts in zip(*(vars(c).values() for c in contents), strict=True))
        )

    @cached_property
    def _prefixed(self) -> set[str]:
        tasks = self.rehearsal.run.tasks
        return {task.name for task in tasks if TaskSpec.model_validate(task.task).adapter.virtual_tokens}

    @cached_property
    def all_chunked(self) -> list[tuple[StepChunks, dict[str, Lengths]]]:
        """What each step computes, and its records."""
        run = self.rehearsal.run
        steps = []
        for step in range(run.steps):
            lengths = {t.name: _lengths(t, step) for t in run.tasks}
            steps.append((step_chunks(run.plan, lengths, self.pipeline), lengths))
        return steps


def _lengths(records: TaskRecords, step: int) -> Lengths:
    """The records of a task's step: batches follow each other, the last of an epoch is short."""
    spec = TaskSpec.model_validate(records.task)
    batch = spec.sequences_per_step
    start = step % -(-len(records.lengths) // batch) * batch
    tokens, labels = (tuple(values[start : start + batch]) for values in (records.lengths, records.labels))
    return Lengths(tokens, labels, together=spec.training.sequences_per_record)
