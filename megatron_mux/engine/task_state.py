"""A task as the engine takes it, the result of one of its steps, and the state of a registered one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.batch.pack import PackedSequence
from megatron_mux.data.dataset import Example, TaskDataset
from megatron_mux.data.sampler import Sampler
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.engine.snapshot import Snapshot
from megatron_mux.errors import UserError
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.step import Lengths
from megatron_mux.kernels.dropout import key_of
from megatron_mux.kernels.embedding_noise import EmbeddingNoise
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.life import Status, TaskLife
from megatron_mux.tensor_file import bytes_of


@dataclass
class Task:
    """A task to train.

    Attributes:
        spec: The validated task.
        data: Its training records.
        evaluation: Its held-out records, if any.
        initial: Full adapter tensors to start from, by key; None starts a fresh adapter.
        resume: Reads the state to continue from, which takes precedence over `initial`; None: it begins.
        lengths: Steps done and steps planned at each change of its length, see `optimizers.schedules.continued`.
        life: Its state in the run that it is a task of; None: its life begins when it is registered.
    """

    spec: TaskSpec
    data: TaskDataset
    evaluation: TaskDataset | None = None
    initial: dict[str, Tensor] | None = None
    resume: Callable[[], Snapshot] | None = None
    lengths: tuple[tuple[int, int], ...] = ()
    life: TaskLife | None = None

    def reference_fingerprint(self) -> str:
        """SHA-256 of the adapter whose frozen copy is the reference of a preference loss; empty: there is none."""
        if not self.spec.starts_from_reference or self.initial is None:
            return ""
        digest = hashlib.sha256()
        for key in sorted(self.initial):
            digest.update(key.encode())
            digest.update(bytes_of(self.initial[key]))
        return digest.hexdigest()


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step of one task.

    Attributes:
        step: Optimizer steps done, this one included (a failed step is not counted).
        total_steps: Steps the task runs for.
        loss: Mean over the labelled tokens of the whole batch.
        grad_norm: Norm of the adapter's gradient before clipping, over all ranks.
        learning_rate: The rate this step used.
        tokens: Tokens of the batch, none of them padding.
        status: `failed` if the loss or the gradient was not finite, or memory too small: the adapter is as before.
        reason: Why it failed, else empty.
        diverged: Whether it failed for its loss or gradient, not for want of memory.
        router_aux_loss: The balancing loss before its coefficient, which `loss` leaves out (`batch.balancing`);
            None: the task does not ask for it.
        metrics: Rewards and log-probabilities of a preference task, by TRL's names; empty for others.
    """

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    status: Status
    reason: str = ""
    diverged: bool = False
    router_aux_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class ForwardRows(NamedTuple):
    """A task's rows that are computed once more, forward only, by another adapter or by none.

    Attributes:
        name: In micro-batches, where the task's own name is that of the rows that it trains.
        slot: Of that adapter (see `RowGroups`); None: the rows go to no adapter.
        offset: Virtual tokens in front of every sequence.
    """

    name: str
    slot: int | None
    offset: int


@dataclass
class TaskState:
    """A registered task on this rank.

    Attributes:
        task: What was registered.
        adapter: This rank's part.
        optimizer: Steps that part.
        sampler: Says which records each step takes.
        load: What the planner knows of the task.
        total_steps: Optimizer steps it runs for.
        step: Optimizer steps done.
        life: Whether it goes on.
        extensions: Kinds of `StepExtension` that it asks for.
        forward_rows: Rows that each of its steps computes besides, forward only; None: there are none.
        most_steps_at_once: Most steps before the host reads what they gave.
        ready: What it needs before its first step has been computed.
    """

    task: Task
    adapter: TaskAdapter
    optimizer: TaskOptimizer
    sampler: Sampler
    load: TaskLoad
    total_steps: int
    step: int = 0
    life: TaskLife = field(init=False)
    extensions: tuple[type[Any], ...] = ()
    forward_rows: ForwardRows | None = None
    most_steps_at_once: int = 1 << 30
    ready: bool = True

    def __post_init__(self) -> None:
        self.life = self.task.life or TaskLife()

    def begin(self) -> None:
        """Take part in steps from now on, if some are left."""
        self.life.to("running" if self.step < self.total_steps else "finished")

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot, whose adapter is in place already.

        Raises:
            UserError: The snapshot lacks something or holds it in another shape.
        """
        try:
            self.optimizer.load_state(snapshot.moments)
            self.adapter.load_state(snapshot.extra)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"task {self.task.spec.name!r}: its training state does not fit: {error}"
            ) from error
        self.step = snapshot.step

    def attach(self, adapters: AdapterSet, known: Mapping[str, Tensor]) -> None:
        """Make adapter and optimizer anew, for what this rank has to hold by now.

        Args:
            adapters: Where to.
            known: Full tensors of the adapter by key; of the others, the caller fills what this rank holds.
        """
        tensors = self.adapter.tensors.items()
        blank = {key: torch.zeros(()).expand(tensor.shape) for key, tensor in tensors if tensor.stored}
        self.adapter = adapters.add(self.task.spec, self.total_steps, {**blank, **known})
        training, lengths = self.task.spec.training, self.task.lengths
        self.optimizer = TaskOptimizer(self.adapter, training, self.total_steps, lengths)

    def fail(self, reason: str) -> StepResult:
        """Stop the task, its adapter as it was before the step."""
        if self.life.state != "failed":
            self.life.to("failed", reason)
        nothing = float("nan")
        return StepResult(self.step, self.total_steps, nothing, nothing, 0.0, 0, "failed", reason)

    def lengths(self, step: int, pad_to: int) -> Lengths:
        """Of the records of a step (from 0), without reading them: the same on every rank."""
        data, chosen = self.task.data, self.sampler.batch(step)
        return Lengths(
            tuple(data.lengths[chosen].tolist()),
            tuple(data.label_counts[chosen].tolist()),
            pad_to,
            self.sequences_per_record,
        )

    def sequence_lengths(self, step: int) -> list[int]:
        """Number of tokens of each sequence of a step (from 0)."""
        lengths: list[int] = self.task.data.lengths[self.sampler.batch(step)].tolist()
        return lengths

    def sequences(self, step: int, wanted: Iterable[int], pad_to: int) -> dict[int, PackedSequence]:
        """Read records of a step (from 0), weighted so that its loss is the mean over the labels of all of them.

        Args:
            step: The step.
            wanted: Numbers, within the step, of those that are read.
            pad_to: Pad shorter sequences to so many tokens, with tokens that are no labels and that no token of the
                sequence attends to.
        """
        chosen = self.sampler.batch(step)
        name, weight = self.task.spec.name, self.label_weight(chosen)
        found = {}
        for i in wanted:
            example = self.task.data[chosen[i]]
            tokens, labelled = (_padded(part, pad_to) for part in (example.tokens, example.labelled))
            found[i] = PackedSequence(name, i, tokens, labelled, weight)
        return found

    def label_weight(self, chosen: Sequence[int]) -> float:
        """The weight of each label of a step's records."""
        return 1.0 / int(self.task.data.label_counts[chosen].sum())

    def extra_examples(self, step: int) -> list[Example]:
        """Read the sequences that a step (from 0) needs besides its batch."""
        return []

    def attach_more(self, adapters: AdapterSet) -> None:
        """Attach what the task needs besides its adapter, once that is attached."""

    @cached_property
    def sequences_per_record(self) -> int:
        """Neighbours in the data that belong to one record."""
        return self.task.spec.training.sequences_per_record

    @cached_property
    def position_offset(self) -> int:
        """Virtual tokens in front of every sequence (prefix tuning)."""
        return self.task.spec.adapter.virtual_tokens

    @cached_property
    def lowest_layer(self) -> int:
        """The lowest layer in which it has an adapter."""
        return self.load.adapter.lowest_layer

    @property
    def embedding_noise(self) -> EmbeddingNoise | None:
        """NEFTune's noise, if the task asks for it."""
        training = self.task.spec.training
        if training.neftune_noise_alpha is None:
            return None
        return EmbeddingNoise(
            key_of(training.seed, "neftune"), training.neftune_noise_alpha, self.sequence_lengths
        )

    @property
    def slot(self) -> int:
        """Its number among the attached tasks: see `RowGroups`."""
        return self.adapter.slot

    @property
    def left(self) -> int:
        """Optimizer steps to come."""
        return self.total_steps - self.step

    @property
    def steps_at_once(self) -> int:
        """Steps that it can take now before the host reads what they gave."""
        return min(self.left, self.most_steps_at_once)


def _padded(x: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """The same with zeros up to a length, if it is shorter."""
    return np.pad(x, (0, length - len(x))) if len(x) < length else x
