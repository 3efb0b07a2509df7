"""Losses that couple sequences: a step's log-probabilities, and the factors of gradients that follow from them.

The loss head computes the gradient of each labelled row with weight one while it has the logits. The factor of a row
is the derivative of its task's loss by its sequence's summed log-probability. It is known once all sequences of a
record, and the same ones with the reference, have passed the head; that is before the first backward pass of their
micro-batch, since all chunks of a micro-batch are computed forward before any of them backward.

Shapes: N labelled rows, S sequences of a task's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.tokenise import Example
from megatron_mux.engine.batches import Burst
from megatron_mux.engine.out_of_memory import Stages
from megatron_mux.engine.preference.log_probs import LogProbs, Wanted, kl_term
from megatron_mux.engine.preference.task import PreferenceTask
from megatron_mux.engine.step_extension import StepExtension
from megatron_mux.engine.task_state import TaskState
from megatron_mux.kernels.loss.preference import FIGURES, PreferenceLoss, RowScale, SequenceSums
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TrainingSpec

_CONSTANTS = 5
"""Known of each sequence beforehand: where its completion begins, its tokens, weight, sign, cached reference."""


def loss_of(spec: TrainingSpec) -> PreferenceLoss:
    """The loss that a task's `training` section describes."""
    return PreferenceLoss(spec.loss, spec.variant, spec.beta, spec.label_smoothing, spec.discopop_tau)


def constants_of(
    spec: TrainingSpec,
    data: PreferenceDataset,
    sequences: Sequence[int],
    cached: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.float64]:
    """`[5, S]` that is known of sequences beforehand.

    Args:
        spec: Of their task.
        data: The data set that holds them.
        sequences: Their numbers there.
        cached: `[n]` log-probabilities of all its sequences under the reference; None: zeros.
    """
    chosen = list(sequences)
    constants = np.zeros((_CONSTANTS, len(chosen)))
    good = data.desirable[chosen]
    constants[0] = data.starts[chosen] if spec.loss == "orpo" else 0
    constants[1] = data.completion_counts[chosen]
    constants[2] = np.where(good, spec.desirable_weight, spec.undesirable_weight)
    if spec.loss == "orpo":
        constants[2] = 1 / data.label_counts[chosen][0::2].sum()
    constants[3] = np.where(good, 1.0, -1.0)
    if cached is not None:
        constants[4] = cached[chosen]
    return constants


@dataclass(frozen=True)
class _StepTask:
    """A preference task in one of the steps.

    Attributes:
        name: Of the task.
        task: Its index among the tasks.
        first, stop: Its sequences among those of all steps.
        good, records: Its desirable (or chosen) sequences, and its records.
        loss: What it minimises.
    """

    name: str
    task: int
    first: int
    stop: int
    good: int
    records: int
    loss: PreferenceLoss

    @property
    def places(self) -> slice:
        """Its part of the sums: a place for the completion and one for the prompt of each sequence."""
        return slice(1 + 2 * self.first, 1 + 2 * self.stop)


class PreferenceLosses(StepExtension):
    """What the preference tasks of one or several steps have computed so far on this rank.

    Sums of log-likelihoods have a place for the completion and for the prompt of each sequence. Their first place takes
    all rows of other tasks, and is never read.
    """

    def __init__(self, burst: Burst) -> None:
        super().__init__(burst)
        self._step_tasks: list[dict[str, _StepTask]] = []
        tasks, steps = burst.tasks, len(burst.steps)
        device, constants, at = burst.parallel.device, [], 0
        first = np.zeros((steps, len(tasks)), np.int64)
        wide = np.array([2 * isinstance(task, PreferenceTask) for task in tasks.values()], np.int64)
        for later in range(steps):
            step_tasks: dict[str, _StepTask] = {}
            for i, (name, task) in enumerate(tasks.items()):
                if not isinstance(task, PreferenceTask):
                    continue
                spec = task.task.spec.training
                chosen = task.sampler.batch(task.step + later)
                constants.append(constants_of(spec, task.preferences, chosen, task.reference_log_probs))
                good = int((constants[-1][3] > 0).sum())
                records = len(chosen) // spec.sequences_per_record
                stop = at + len(chosen)
                step_tasks[name] = _StepTask(name, i, at, stop, good, records, loss_of(spec))
                first[later, i] = 1 + 2 * at
                at = stop
            self._step_tasks.append(step_tasks)
        everything = torch.from_numpy(np.concatenate(constants, axis=1))
        self._starts, self._tokens, self._weights, self._signs, cached = runtime.to_device(everything, device)
        self._first = runtime.to_device(torch.from_numpy(first), device)
        self._wide = runtime.to_device(torch.from_numpy(wide), device)
        # Negative log-likelihoods.
        self._policy = torch.zeros(1 + 2 * at, dtype=torch.float64, device=device)
        self._live = torch.zeros_like(self._policy)
        self._cached = cached
        self._no_kl = torch.zeros((), dtype=torch.float64, device=device)
        self._kl: dict[str, Tensor] = {}
        self._figures: dict[int, Tensor] = {}

    @classmethod
    def wanted_by(cls, task: TaskState, parallel: Parallel) -> bool:
        """Whether the task learns a preference."""
        return isinstance(task, PreferenceTask)

    def before_steps(self, stages: Stages, communicator: Communicator) -> None:
        """Compute KTO's KL term of each task that has one; only bursts of one step have such tasks."""
        mismatched = {name: read for name, read in self.burst.steps[0].extra_examples.items() if read}
        if mismatched:
            log_probs = LogProbs(stages, self.burst.parallel, communicator)
            sums = log_probs.on_last_stage(self._wanted(mismatched))
            self._kl = {name: kl_term(own_sums) for name, own_sums in zip(mismatched, sums, strict=True)}

    def _wanted(self, mismatched: Mapping[str, Sequence[Example]]) -> list[Wanted]:
        """What the KL terms need, in passes of no more sequences than a micro-batch that trains has of these tasks.

        A pass has each sequence twice, with the adapter and with its reference.
        """
        most = dict[str, int]()
        for bucket in self.burst.buckets:
            names = [name for name in bucket.tasks if name in mismatched]
            passes = bucket.micro_batches * self.burst.parallel.dp_size
            most |= dict.fromkeys(names, sum(len(mismatched[name]) for name in names) // passes)
        wanted = []
        for name, read in mismatched.items():
            task = self.burst.tasks[name]
            assert isinstance(task, PreferenceTask)
            wanted.append(Wanted(task, read.__getitem__, range(len(read)), batch_size=max(2, most[name])))
        return wanted

    def width(self, names: Sequence[str]) -> int:
        """Figures of each task of a bucket, if one of them learns a preference."""
        return FIGURES if any(name in self._step_tasks[0] for name in names) else 0

    def before_loss(self, bucket: int, batch: PackedBatch) -> None:
        """Have rows scaled later whose losses are coupled; those of references have no gradient."""
        if not batch.training or any(name in batch.task_rows for name in self._of(bucket)):
            batch.row_scale = RowScale()

    def _of(self, bucket: int) -> dict[str, _StepTask]:
        return self._step_tasks[self.burst.step(bucket)]

    def _places(self, step: int, batch: PackedBatch) -> Tensor:
        """`[N]` int64, the place of each labelled row's log-probability."""
        groups = batch.labelled.groups
        wide = self._wide[batch.label_tasks]
        places: Tensor = self._first[step][batch.label_tasks] + wide * groups.sequence_ids
        starts = self._starts[(places // 2).clamp(max=max(0, self._starts.shape[0] - 1))]
        places += (groups.token_index + 1 < starts) * (wide // 2)
        return places

    def after_loss(self, bucket: int, batch: PackedBatch, nll: Tensor) -> None:
        """Add up the log-likelihoods of each sequence, with the tasks' adapters or with their references."""
        if batch.row_scale is None:
            return
        nll_sums = self._policy if batch.training else self._live
        nll_sums.index_add_(0, self._places(self.burst.step(bucket), batch), nll.double())

    def before_backward(self, bucket: int, batch: PackedBatch) -> None:
        """Set the factors of a batch's rows."""
        if batch.row_scale is None or not batch.training:
            return
        tasks = [task for name, task in self._of(bucket).items() if name in batch.task_rows]
        with torch.enable_grad():
            nll_sums = self._policy.detach().requires_grad_()
            losses = [task.loss.per_record(self._sums(task, nll_sums)).sum() / task.records for task in tasks]
            (factors,) = torch.autograd.grad(losses, [nll_sums], [torch.ones_like(loss) for loss in losses])
        factors[0] = 1.0
        batch.row_scale.factors = factors[self._places(self.burst.step(bucket), batch)]

    def _sums(self, task: _StepTask, nll_sums: Tensor) -> SequenceSums:
        sequences, part = slice(task.first, task.stop), nll_sums[task.places]
        reference = self._cached[sequences] - self._live[task.places][0::2]
        constants = self._tokens[sequences], self._weights[sequences], self._signs[sequences]
        return SequenceSums(
            -part[0::2], -part[1::2], reference, *constants, self._kl.get(task.name, self._no_kl)
        )

    def after_passes(self, bucket: int, losses: Tensor) -> None:
        """Set the losses of a bucket's preference tasks to this pipeline's share, and compute their figures."""
        names = self.burst.bucket(bucket).tasks
        tasks = {name: task for name, task in self._of(bucket).items() if name in names}
        if not tasks:
            return
        dp_size = self.burst.parallel.dp_size
        if dp_size > 1:
            places = torch.cat([torch.arange(task.places.start, task.places.stop) for task in tasks.values()])
            self._sum_pipelines(runtime.to_device(places, self._policy.device))
        figures = torch.zeros(len(names), FIGURES, dtype=torch.float64, device=losses.device)
        for name, task in tasks.items():
            sums = self._sums(task, self._policy)
            losses[task.task] = task.loss.per_record(sums).mean() / dp_size
            figures[names.index(name)] = task.loss.figures(sums)
        self._figures[bucket] = figures

    def columns_of_last_stage(self, bucket: int) -> Tensor:
        """See `PreferenceLoss.figures`; over all pipelines."""
        return self._figures.pop(bucket)

    def _sum_pipelines(self, places: Tensor) -> None:
        """Sum the sums of log-likelihoods over pipelines, each of which has some of the sequences."""
        both = torch.stack([self._policy[places], self._live[places]])
        dist.all_reduce(both, group=self.burst.parallel.dp_group)
        self._policy[places], self._live[places] = both[0], both[1]

    def fields(self, step: int, name: str, values: Sequence[float]) -> Mapping[str, Any]:
        """What `metrics.jsonl` says of a preference task's step."""
        task = self._step_tasks[step].get(name)
        if task is None:
            return {}
        bad = task.stop - task.first - task.good
        return {"metrics": named(task.loss, values, task.good, bad, task.records)}


def named(
    loss: PreferenceLoss, figures: Sequence[float], good: int, bad: int, records: int
) -> dict[str, float]:
    """Figures under TRL's names.

    Args:
        loss: The task's.
        figures: Sums, see `PreferenceLoss.figures`.
        good: Sequences that are chosen or desirable.
        bad: The others.
        records: Records.
    """
    chosen, rejected, right, chosen_logps, rejected_logps, extra, ratio, odds = figures
    metrics: dict[str, float] = {}
    if good:
        metrics |= {"rewards/chosen": chosen / good, "logps/chosen": chosen_logps / good}
    if bad:
        metrics |= {"rewards/rejected": rejected / bad, "logps/rejected": rejected_logps / bad}
    if good and bad:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    if loss.loss != "kto":
        metrics["rewards/accuracies"] = right / records
    if loss.loss == "orpo":
        metrics |= {"nll_loss": extra, "log_odds_ratio": ratio / records, "log_odds_chosen": odds / records}
    elif loss.variant == "kto":
        metrics["kl"] = extra
    return metrics
