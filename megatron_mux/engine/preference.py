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

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.batch.micro_batch import MicroBatch
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.engine.task_state import TaskState
from megatron_mux.kernels.loss.preference import FIGURES, PreferenceLoss, RowScale, SequenceSums
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
    found = np.zeros((_CONSTANTS, len(chosen)))
    good = data.desirable[chosen]
    found[0] = data.starts[chosen] if spec.loss == "orpo" else 0
    found[1] = data.completion_counts[chosen]
    found[2] = np.where(good, spec.desirable_weight, spec.undesirable_weight)
    if spec.loss == "orpo":
        found[2] = 1 / data.label_counts[chosen][0::2].sum()
    found[3] = np.where(good, 1.0, -1.0)
    if cached is not None:
        found[4] = cached[chosen]
    return found


@dataclass(frozen=True)
class _Entry:
    """A preference task in one of the steps.

    Attributes:
        task: Its index among the tasks.
        first, stop: Its sequences among those of all steps.
        good, records: Its desirable (or chosen) sequences, and its records.
        loss: What it minimises.
        kl: Scalar, see `SequenceSums`.
    """

    task: int
    first: int
    stop: int
    good: int
    records: int
    loss: PreferenceLoss
    kl: Tensor

    @property
    def places(self) -> slice:
        """Its part of the tables: a place for the completion and one for the prompt of each sequence."""
        return slice(1 + 2 * self.first, 1 + 2 * self.stop)


class PreferenceLosses:
    """What the preference tasks of one or several steps have computed so far on this rank.

    Tables have a place for the completion and for the prompt of each sequence. Their first place takes all rows of
    other tasks, and is never read.

    Args:
        tasks: All tasks of the steps.
        steps: How many there are.
        kl: KTO's KL term of each task that has one, for the first step.
        parallel: Where this rank stands.
    """

    def __init__(
        self, tasks: Mapping[str, TaskState], steps: int, kl: Mapping[str, Tensor], parallel: Parallel
    ) -> None:
        self._parallel = parallel
        self._entries: list[dict[str, _Entry]] = []
        device, constants, at = parallel.device, [], 0
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        first = np.zeros((steps, len(tasks)), np.int64)
        wide = np.array([2 * task.task.spec.training.is_preference for task in tasks.values()], np.int64)
        for later in range(steps):
            entries: dict[str, _Entry] = {}
            for i, (name, task) in enumerate(tasks.items()):
                spec = task.task.spec.training
                if not spec.is_preference:
                    continue
                chosen = task.sampler.batch(task.step + later)
                constants.append(constants_of(spec, task.preferences, chosen, task.reference_log_probs))
                good = int((constants[-1][3] > 0).sum())
                records = len(chosen) // spec.sequences_per_record
                stop = at + len(chosen)
                entries[name] = _Entry(i, at, stop, good, records, loss_of(spec), kl.get(name, nothing))
                first[later, i] = 1 + 2 * at
                at = stop
            self._entries.append(entries)
        everything = (
            torch.from_numpy(np.concatenate(constants, axis=1)) if constants else torch.zeros(_CONSTANTS, 0)
        )
        self._starts, self._tokens, self._weights, self._signs, cached = runtime.to_device(everything, device)
        self._first = runtime.to_device(torch.from_numpy(first), device)
        self._wide = runtime.to_device(torch.from_numpy(wide), device)
        # Negative log-likelihoods.
        self._policy = torch.zeros(1 + 2 * at, dtype=torch.float64, device=device)
        self._live = torch.zeros_like(self._policy)
        self._cached = cached

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(self._entries)

    def columns(self, names: Sequence[str]) -> int:
        """Figures of each task of a bucket, the same for all of them."""
        return FIGURES if any(name in self._entries[0] for name in names) else 0

    def couples(self, step: int, batch: MicroBatch) -> bool:
        """Whether a batch has rows whose losses are coupled, or rows of their references."""
        return not batch.training or any(name in batch.task_rows for name in self._entries[step])

    def _places(self, step: int, batch: MicroBatch) -> Tensor:
        """`[N]` int64, the place of each labelled row's log-probability."""
        groups = batch.labelled.groups
        wide = self._wide[batch.label_tasks]
        places: Tensor = self._first[step][batch.label_tasks] + wide * groups.sequence_ids
        starts = self._starts[(places // 2).clamp(max=max(0, self._starts.shape[0] - 1))]
        places += (groups.token_index + 1 < starts) * (wide // 2)
        return places

    def add(self, step: int, batch: MicroBatch, nll: Tensor) -> None:
        """Count the `[N]` negative log-likelihoods of a unit's labelled rows, with the tasks' adapters or without.

        Args:
            step: Which of the steps, from 0.
            batch: The unit's; rows of the reference are in a batch that is not trained.
            nll: Of its labelled rows.
        """
        table = self._policy if batch.training else self._live
        table.index_add_(0, self._places(step, batch), nll.double())

    def set_row_factors(self, step: int, batch: MicroBatch, scale: RowScale) -> None:
        """Set the factors of a unit's rows, before its backward pass."""
        own = [entry for name, entry in self._entries[step].items() if name in batch.task_rows]
        with torch.enable_grad():
            table = self._policy.detach().requires_grad_()
            losses = [entry.loss.per_record(self._sums(entry, table)).sum() / entry.records for entry in own]
            (factors,) = torch.autograd.grad(losses, [table], [torch.ones_like(loss) for loss in losses])
        factors[0] = 1.0
        scale.factors = factors[self._places(step, batch)]

    def _sums(self, entry: _Entry, table: Tensor) -> SequenceSums:
        own, part = slice(entry.first, entry.stop), table[entry.places]
        reference = self._cached[own] - self._live[entry.places][0::2]
        constants = self._tokens[own], self._weights[own], self._signs[own]
        return SequenceSums(-part[0::2], -part[1::2], reference, *constants, entry.kl)

    def finish(self, step: int, names: Sequence[str], losses: Tensor) -> Tensor:
        """Compute the losses of a bucket's step on the last stage, once all its passes are done.

        Args:
            step: Which of the steps, from 0.
            names: The bucket's tasks.
            losses: `[tasks]` fp64 of this pipeline's sequences; those of preference tasks are set here, to this
                pipeline's share.

        Returns:
            `[names, FIGURES]` fp64, see `PreferenceLoss.figures`, over all pipelines.
        """
        own = {name: entry for name, entry in self._entries[step].items() if name in names}
        if self._parallel.dp_size > 1:
            places = torch.cat([torch.arange(e.places.start, e.places.stop) for e in own.values()])
            self._sum_pipelines(runtime.to_device(places, self._policy.device))
        found = torch.zeros(len(names), FIGURES, dtype=torch.float64, device=losses.device)
        for name, entry in own.items():
            sums = self._sums(entry, self._policy)
            losses[entry.task] = entry.loss.per_record(sums).mean() / self._parallel.dp_size
            found[list(names).index(name)] = entry.loss.figures(sums)
        return found

    def _sum_pipelines(self, places: Tensor) -> None:
        """Sum the tables over pipelines, each of which has some of the sequences."""
        both = torch.stack([self._policy[places], self._live[places]])
        dist.all_reduce(both, group=self._parallel.dp_group)
        self._policy[places], self._live[places] = both[0], both[1]

    def metrics(self, step: int, name: str, figures: Sequence[float]) -> dict[str, float]:
        """What `metrics.jsonl` says of a task's step; empty for other tasks.

        Args:
            step: Which of the steps, from 0.
            name: The task.
            figures: The task's row of what `finish` returned.
        """
        entry = self._entries[step].get(name)
        if entry is None:
            return {}
        return named(entry.loss, figures, entry.good, entry.stop - entry.first - entry.good, entry.records)


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
    found: dict[str, float] = {}
    if good:
        found |= {"rewards/chosen": chosen / good, "logps/chosen": chosen_logps / good}
    if bad:
        found |= {"rewards/rejected": rejected / bad, "logps/rejected": rejected_logps / bad}
    if good and bad:
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    if loss.loss != "kto":
        found["rewards/accuracies"] = right / records
    if loss.loss == "orpo":
        found |= {"nll_loss": extra, "log_odds_ratio": ratio / records, "log_odds_chosen": odds / records}
    elif loss.variant == "kto":
        found["kl"] = extra
    return found
