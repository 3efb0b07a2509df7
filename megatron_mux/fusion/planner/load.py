"""What the planner knows of a task: the sequences of a typical step, and where its adapter acts.

Nothing of it needs a weight: the index of the data, the task's spec and the backbone's shape say it all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.footprint.signature import Signature
from megatron_mux.memory.forms.task_adapters import AdaptedOp, TaskAdapters, TrainedTensor
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec, TrainingSpec

_PART_OF_HIDDEN = 64
"""LoRA of lower ranks than this part of a row's hidden states takes as much as of this rank, as far as bytes go: fewer
tables are needed, and a row takes hardly more."""


class SteppedTensor(NamedTuple):
    """A trained parameter, as an optimizer steps it.

    Attributes:
        tensor: Its layers and its shape.
        kind: Weight decay, and the learning rate as a multiple of the task's.
    """

    tensor: TrainedTensor
    kind: tuple[float, float]


def signature_of(spec: TaskSpec, shape: BackboneShape) -> Signature:
    """What of a task decides the bytes of its rows on a backbone."""
    return Signature.of(spec.plain()).at_least(shape.hidden // _PART_OF_HIDDEN)


@dataclass(frozen=True)
class TaskLoad:
    """One task.

    Attributes:
        tokens: Tokens of each sequence of a typical step.
        labels: Labelled tokens of each.
        max_length: What sequences are cut to.
        accumulation: Its `gradient_accumulation_steps`: the fewest micro-batches that the user counts on.
        spec: The task itself, for tables of bytes.
        adapter: Where its adapter acts, and what it holds there.
        stepped: Its parameters, in the order in which its optimizer has them.
        longest: Tokens of the longest record there is; a typical step need not have one.
        refers: Whether its rows are computed a second time, forward only, with its reference.
        together: Sequences of a record, which are in one micro-batch.
        opening_passes: Forward passes over its sequences that each step begins with: for KTO's KL term.
    """

    name: str
    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    max_length: int
    accumulation: int
    spec: TaskSpec
    adapter: TaskAdapters
    stepped: tuple[SteppedTensor, ...] = ()
    longest: int = 0
    refers: bool = False
    together: int = 1
    opening_passes: int = 0

    @classmethod
    def of(
        cls,
        spec: TaskSpec,
        lengths: npt.NDArray[np.int32],
        label_counts: npt.NDArray[np.int32],
        shape: BackboneShape,
        sequences: int | None = None,
    ) -> TaskLoad:
        """Of a validated task.

        Args:
            lengths: `[n]` tokens of each record of its data.
            label_counts: `[n]` labelled tokens of each.
            sequences: The most of them to choose; None: those of a step.
        """
        chosen = typical(lengths, min(sequences or spec.sequences_per_step, len(lengths)))
        adapter = TaskAdapters.of(spec, shape)
        return cls(
            name=spec.name,
            tokens=tuple(int(lengths[i]) for i in chosen),
            labels=tuple(int(label_counts[i]) for i in chosen),
            max_length=spec.data.max_length,
            accumulation=spec.training.gradient_accumulation_steps,
            spec=spec,
            adapter=adapter,
            stepped=_stepped(spec, shape, adapter),
            longest=int(lengths.max()),
            refers=spec.training.refers_in_steps,
            together=spec.training.sequences_per_record,
            opening_passes=_opening_passes(spec.training),
        )

    def signature(self, shape: BackboneShape) -> Signature:
        """What decides the bytes of its rows on a backbone."""
        return signature_of(self.spec, shape)

    @property
    def ops(self) -> tuple[AdaptedOp, ...]:
        """Where its adapter acts, by layer."""
        return self.adapter.ops

    @property
    def virtual_tokens(self) -> int:
        """Of prefix tuning."""
        return self.adapter.virtual_tokens

    @property
    def records(self) -> int:
        """Records of a typical step, at least one."""
        return max(1, len(self.tokens) // self.together)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that a step may have."""
        return max(self.longest, *self.tokens)

    def updates(self, layers: range, tensor: int) -> tuple[int, int]:
        """Parameters in these layers, and groups of them that the optimizer steps as one, on one of `tensor` ranks."""
        kind, every = OPTIMIZERS[self.adapter.optimizer], self.adapter.layers
        stepped = [p for p in self.stepped if p.tensor.share(layers, every)]
        kinds = [(p.kind, p.tensor.shape if kind.by_shape else ()) for p in stepped]
        if kind.by_shape:
            numbers = 0
            for (_, shape), count in Counter(kinds).items():
                size = next(p.tensor.size(tensor) for p in stepped if p.tensor.shape == shape)
                numbers += -(-count // max(1, kind.at_once // size))
            return len(stepped), numbers
        groups = groupby(zip(stepped, kinds, strict=True), key=lambda pair: pair[1])
        sizes = [sum(p.tensor.size(tensor) for p, _ in group) for _, group in groups]
        return len(stepped), sum(-(-size // (kind.at_once or size)) for size in sizes)

    @property
    def with_longest(self) -> TaskLoad:
        """The same with the longest record there is in the place of the longest one of a typical step."""
        if self.longest_sequence == max(self.tokens):
            return self
        longest = max(range(len(self.tokens)), key=self.tokens.__getitem__)
        first = longest - longest % self.together
        tokens, labels = list(self.tokens), list(self.labels)
        for i in range(first, min(first + self.together, len(tokens))):
            labels[i] = -(-labels[i] * self.longest_sequence // max(1, tokens[i]))
            tokens[i] = self.longest_sequence
        return replace(self, tokens=tuple(tokens), labels=tuple(labels))

    @property
    def total(self) -> int:
        """Tokens of a typical step."""
        return sum(self.tokens)


def _stepped(spec: TaskSpec, shape: BackboneShape, adapter: TaskAdapters) -> tuple[SteppedTensor, ...]:
    """A task's trained parameters, those that weight decay applies to behind the others, as in `FlatParams`."""
    trained = [pair for pair in spec.adapter.tensors(shape).items() if pair[1].trained]
    params = [
        (t.decay, SteppedTensor(tensor, spec.training.decay_and_rate(key, t.shape, t.decay)))
        for (key, t), tensor in zip(trained, adapter.tensors, strict=True)
    ]
    return tuple(param for _, param in sorted(params, key=lambda pair: not pair[0]))


def _opening_passes(training: TrainingSpec) -> int:
    """With the adapter, and with the reference unless its rows are computed anyway."""
    return (1 if training.refers_in_steps else 2) if training.needs_kl else 0


def adapts_experts(loads: Iterable[TaskLoad]) -> bool:
    """Whether some task has adapters on routed experts, whose matrices tensor ranks then do not divide."""
    return any(site.op in EXPERT_OPS for load in loads for site in load.ops)


def persistent_share(task: TaskSpec, shape: BackboneShape, signature: Signature) -> float:
    """Values that a task trains, as a share of those of a task of its signature, which may have a higher rank."""
    whole = TaskSpec.model_validate(signature.task)
    if whole.adapter == task.adapter:
        return 1.0
    values, every = (
        sum(math.prod(tensor.shape) for tensor in spec.adapter.tensors(shape).values() if tensor.trained)
        for spec in (task, whole)
    )
    return values / max(1, every)


def typical(lengths: npt.NDArray[np.int32], count: int) -> list[int]:
    """`count` records whose lengths are spread as those of all are: the middle one of each of `count` equal parts."""
    order = np.argsort(lengths, kind="stable")
    return [int(order[(2 * i + 1) * len(order) // (2 * count)]) for i in range(count)]
