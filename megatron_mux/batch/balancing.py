"""The balancing loss of tasks that ask for it: which rows count, and what each sequence selects in each layer.

For a sequence of T tokens and a layer with experts it is `E / K sum_e f_e P_e`: f_e is the share of the tokens whose K
best scores include that of expert e, P_e the mean of its normalised scores. A task's `router_aux_loss` sums it over
layers and averages it over the sequences of a step; its coefficient times that is added to what the task minimises.
This is DeepSeek-V3's sequence-wise loss (Megatron-Core's `seq_aux_loss`). Since a sequence is balanced by itself, a
task's updates depend neither on its neighbours nor on how sequences are put into micro-batches.

Shapes: T rows of the micro-batch, R of them on this rank, B balanced sequences, E experts, K of them for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron_mux.kernels.attention.segments import Segment

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BalancedSequences:
    """The sequences of a micro-batch, all its chunks together, whose tasks ask for the loss; in host memory.

    Attributes:
        numbers: Task and sequence to its number, from 0.
        tokens: `[B]`, of each sequence, padding left out.
        weights: `[B]`, the coefficient of its task over the sequences of the task's step.
    """

    numbers: Mapping[tuple[str, int], int]
    tokens: Sequence[int]
    weights: Sequence[float]

    def arrays(self, segments: Sequence[Segment], rows: int, order: Mapping[str, int]) -> dict[str, Array]:
        """What the device needs of a chunk; nothing if no row of it counts.

        Args:
            segments: Of the chunk.
            rows: T.
            order: Task name to its index among the tasks of the step.

        Returns:
            `balanced_numbers` `[T]` int64, the number of each row's sequence, B for rows that do not count; and for
            each number up to B, `balanced_weights`, the bits of its fp64 weight for a pair of a selection and a score
            (0 for B), and `balanced_tasks`, the int64 index of its task.
        """
        if not self.numbers:
            return {}
        numbers = np.full(rows, len(self.tokens), np.int64)
        found = False
        for segment in segments:
            number = self.numbers.get((segment.task, segment.sequence))
            if number is not None:
                stop = segment.start + min(segment.length, max(0, self.tokens[number] - segment.past))
                numbers[segment.start : stop] = number
                found = True
        if not found:
            return {}
        weights = np.array(self.weights, np.float64) / np.array(self.tokens, np.float64) ** 2
        tasks = np.array([order[task] for task, _ in self.numbers], np.int64)
        return {
            "balanced_numbers": numbers,
            "balanced_weights": np.append(weights, 0.0).view(np.int64),
            "balanced_tasks": np.append(tasks, 0),
        }


NO_SEQUENCES = BalancedSequences({}, (), ())
"""Of a micro-batch without any."""


class RouterLoadAccumulator:
    """What the balanced sequences of a micro-batch select in each layer of this rank; its chunks share it.

    All chunks are computed forward before any of them backward: what a backward pass reads is complete.

    Args:
        weights: `[B + 1]` fp64, see `BalancedSequences.arrays`.
        tasks: `[B + 1]` int64.
    """

    def __init__(self, weights: Tensor, tasks: Tensor) -> None:
        self._weights, self._tasks = weights, tasks
        self._layers: dict[int, tuple[Tensor, Tensor, float]] = {}

    def add(
        self, layer: int, numbers: Tensor, scores: Tensor, chosen: Tensor, group: dist.ProcessGroup | None
    ) -> None:
        """Count the rows of a chunk in a layer.

        Args:
            layer: Global index of the layer.
            numbers: `[R]` int64, the number of each row's sequence.
            scores: `[R, E]`, normalised.
            chosen: `[R, K]` int64, the experts with the best scores.
            group: The ranks that divide the rows of each sequence; None: this one has them all.
        """
        size, experts = len(self._weights), scores.shape[1]
        counts = scores.new_zeros(size * experts)
        places = (numbers.unsqueeze(1) * experts + chosen).flatten()
        counts.scatter_add_(0, places, counts.new_ones(1).expand(len(places)))
        if group is not None:
            dist.all_reduce(counts, group=group)
        sums = scores.new_zeros(size, experts).index_add_(0, numbers, scores.detach())
        if layer in self._layers:
            earlier = self._layers[layer]
            earlier[0].add_(counts.view(size, experts))
            earlier[1].add_(sums)
        else:
            self._layers[layer] = counts.view(size, experts), sums, experts / chosen.shape[1]

    def gradient(self, layer: int, numbers: Tensor) -> Tensor:
        """`[R, E]`: the gradient of the weighted loss for the normalised scores of rows in a layer."""
        counts, _, scale = self._layers[layer]
        return (counts * (self._weights * scale).to(counts.dtype).unsqueeze(1))[numbers]

    def add_losses(self, losses: Tensor) -> None:
        """Add the weighted loss of all layers to `[tasks]` fp64, by index of the task."""
        for counts, sums, scale in self._layers.values():
            # The last line sums rows that do not count, and may hold anything.
            own = (counts.double() * sums.double()).sum(dim=1)[:-1] * (self._weights[:-1] * scale)
            losses.index_add_(0, self._tasks[:-1], own)


@dataclass(frozen=True)
class Balance:
    """The balancing loss of a pass's rows in a layer.

    Attributes:
        layer: Global index of the layer.
        numbers: `[R]` int64, the number of each row's sequence in the loads.
        loads: Of the micro-batch.
        group: Tensor ranks that divide the rows of each sequence; None: this rank has them all.
        again: Whether the pass is computed again for its backward, and so is counted already.
    """

    layer: int
    numbers: Tensor
    loads: RouterLoadAccumulator
    group: dist.ProcessGroup | None
    again: bool

    def attach(self, weights: Tensor, ranked: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """Count the rows, and have the backward pass of `weights` add the loss's gradient to that of the scores.

        Args:
            weights: `[R, K]`, what the router returns.
            ranked: Returns the normalised scores `[R, E]`, and the experts with the best of them, `[R, K]` int64.

        Returns:
            `weights`, unchanged.
        """
        scores, chosen = ranked()
        if not self.again:
            self.loads.add(self.layer, self.numbers, scores, chosen, self.group)
        if not weights.requires_grad:
            return weights
        attached: Tensor = _Attach.apply(weights, scores, self)  # type: ignore[no-untyped-call]
        return attached


class _Attach(Function):
    """Identity of the weights; the scores' gradient is read in the backward, when all chunks are counted."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, scores: Tensor, balance: Balance) -> Tensor:
        ctx.balance = balance
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        balance: Balance = ctx.balance
        return gradient, balance.loads.gradient(balance.layer, balance.numbers), None


@dataclass(frozen=True)
class BalancedRows:
    """The rows of a chunk that count for the loss, on the device.

    Attributes:
        loads: Of its micro-batch.
        numbers: `[T]` int64, see `BalancedSequences.arrays`.
    """

    loads: RouterLoadAccumulator
    numbers: Tensor

    count: ClassVar[bool] = True

    def in_layer(self, layer: int, rows: slice, group: dist.ProcessGroup | None, again: bool) -> Balance:
        """The loss of some rows in a layer; see `Balance` for the arguments."""
        return Balance(layer, self.numbers[rows], self.loads, group, again)


@dataclass(frozen=True)
class NoBalancedRows:
    """A chunk of which no row counts.

    Attributes:
        loads: Of its micro-batch, if an earlier chunk has made it.
        count: Whether rows count.
    """

    loads: RouterLoadAccumulator | None = None

    count: ClassVar[bool] = False

    def in_layer(
        self, layer: int, rows: slice, group: dist.ProcessGroup | None, again: bool
    ) -> NoBalancedRows:
        """See `BalancedRows.in_layer`."""
        return self

    def attach(self, weights: Tensor, ranked: Callable[[], tuple[Tensor, Tensor]]) -> Tensor:
        """See `Balance.attach`: nothing is counted, nothing attached."""
        return weights


NO_ROWS = NoBalancedRows()
"""Of a micro-batch of which no row counts."""


def balanced_rows(
    arrays: Mapping[str, Tensor], loads: RouterLoadAccumulator | None
) -> BalancedRows | NoBalancedRows:
    """The rows of a chunk that count.

    Args:
        arrays: Of the chunk; those of `BalancedSequences.arrays` among them if some rows count.
        loads: Those of the micro-batch, if an earlier chunk has made it.
    """
    if "balanced_numbers" not in arrays:
        return NoBalancedRows(loads)
    weights = arrays["balanced_weights"].view(torch.float64)
    loads = loads or RouterLoadAccumulator(weights, arrays["balanced_tasks"])
    return BalancedRows(loads, arrays["balanced_numbers"])


def balanced_sequences(
    pieces: Iterable[tuple[Any, str, int]],
    coefficients: Mapping[str, float],
    lengths: Mapping[str, Sequence[int]],
) -> dict[Any, BalancedSequences]:
    """The balanced sequences of each micro-batch that has any.

    Args:
        pieces: Micro-batch, task and sequence of each piece of a chunk; a sequence may come several times.
        coefficients: Of each task; 0 for one that does not ask for the loss.
        lengths: Tokens of each sequence of the tasks' steps, over all pipelines.
    """
    if not any(coefficients.values()):
        return {}
    keys: dict[Any, dict[tuple[str, int], int]] = {}
    for micro_batch, task, sequence in pieces:
        if coefficients[task]:
            numbers = keys.setdefault(micro_batch, {})
            numbers.setdefault((task, sequence), len(numbers))
    return {
        micro_batch: BalancedSequences(
            numbers,
            [lengths[task][sequence] for task, sequence in numbers],
            [coefficients[task] / len(lengths[task]) for task, _ in numbers],
        )
        for micro_batch, numbers in keys.items()
    }
