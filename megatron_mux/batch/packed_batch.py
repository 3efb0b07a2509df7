"""A packed batch on the device: sequences of several tasks, end to end on the token axis; one batch is active.

Shapes: T tokens in the batch, N labelled tokens, P prefix length, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from megatron_mux.batch.balancing import NO_ROWS, BalancedRows, NoBalancedRows
from megatron_mux.kernels.attention.carry import Carry
from megatron_mux.kernels.attention.key_value_cache import KeyValueCache
from megatron_mux.kernels.attention.segments import Bounds, Segment
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.loss.preference import RowScale

PrefixKV = dict[int, dict[str, tuple[Tensor, Tensor]]]
Ranges = Mapping[str, tuple[int, int]]
"""Task name to its `(start, stop)` rows."""


@dataclass
class PackedBatch:
    """The rows of one hybrid task in a chunk: sequences of its tasks, packed end to end, ordered by task.

    All its tensors are views of one buffer on the device.

    Attributes:
        segments: The sequences in row order.
        bounds: Arguments of variable-length attention over the segments; None for `labelled` rows.
        task_rows: Task name to its `(start, stop)` rows; only tasks present.
        groups: The same rows for kernels that compute all tasks at once; only tasks with rows.
        tokens: `[T]` int64 token ids (0 in padding rows at the end).
        positions: `[T]` int64 position ids for the backbone (shifted by P for prefix tuning).
        label_rows: `[N]` int64 rows whose next token is a label.
        labels: `[N]` int64 the tokens to predict there.
        label_weights: `[N]` fp32, one over the labelled tokens of the task's whole step.
        label_tasks: `[N]` int64 index among the tasks of the step.
        task_steps: Task name to the number of optimizer steps it has done.
        training: False while evaluating: no dropout, deterministic masks.
        prefix: Layer to task to key and value, each `[P, kv heads on this rank, D]`; filled while computing.
        carry: Keys and values that chunks of the same packs keep for each other; None: no sequence is cut.
        label_batch: The labelled rows alone; None where this is them.
        balanced: Rows that count for a balancing loss.
        cache: Keys and values of sequences that are generated; None: none are.
        row_scale: Scales the gradients of the labelled rows in the backward pass; None: they are final.
    """

    segments: tuple[Segment, ...]
    bounds: Bounds | None
    task_rows: Ranges
    groups: RowGroups
    tokens: Tensor
    positions: Tensor
    label_rows: Tensor
    labels: Tensor
    label_weights: Tensor
    label_tasks: Tensor
    task_steps: Mapping[str, int]
    training: bool = True
    prefix: PrefixKV = field(default_factory=dict)
    carry: Carry | None = None
    label_batch: PackedBatch | None = None
    balanced: BalancedRows | NoBalancedRows = NO_ROWS
    cache: KeyValueCache | None = None
    row_scale: RowScale | None = None

    @property
    def rows(self) -> int:
        """T, padding included."""
        return int(self.tokens.shape[0])

    @property
    def labelled(self) -> PackedBatch:
        """The labelled rows alone, for operations on single rows: N rows, without segments.

        Fewer than T: the first token of a sequence is never a label.
        """
        return self if self.label_batch is None else self.label_batch


_active: PackedBatch | None = None


@contextmanager
def activate(batch: PackedBatch) -> Iterator[PackedBatch]:
    """Make `batch` the active one: use it around its forward and around its backward, which may recompute.

    The active batch is a module global because autograd runs backward functions on threads of its own.
    """
    global _active
    before, _active = _active, batch
    try:
        yield batch
    finally:
        _active = before


def active() -> PackedBatch:
    """The active batch.

    Raises:
        RuntimeError: Called outside `activate`.
    """
    if _active is None:
        raise RuntimeError("no micro-batch is active: run the backbone inside activate(batch)")
    return _active
