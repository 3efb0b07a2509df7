"""Predicted seconds of an evaluation of all tasks together, and one after another, from the planner's costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.alignment import Slice
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.evaluation import filled, tokens_per_pass

_MOST_RECORDS = 4096
"""Records of a task that are priced one by one; a longer file counts as so many typical ones, several times."""


@dataclass(frozen=True)
class EvaluatedLoad:
    """The held-out records of a task.

    Attributes:
        load: The sequences that are priced, as those of a step.
        times: How often they are evaluated.
    """

    load: TaskLoad
    times: float

    @classmethod
    def of(
        cls,
        spec: TaskSpec,
        lengths: npt.NDArray[np.int32],
        label_counts: npt.NDArray[np.int32],
        choices: int,
        shape: BackboneShape,
    ) -> EvaluatedLoad:
        """Of a task's evaluation.

        Args:
            lengths: `[n]` tokens of each held-out record.
            label_counts: `[n]` labelled tokens of each.
            choices: Completions that are scored with every prompt; 0: the record's own alone.
        """
        load = TaskLoad.of(spec, lengths, label_counts, shape, _MOST_RECORDS)
        return cls(load, len(lengths) / len(load.tokens) * max(choices, 1))


@dataclass(frozen=True)
class EvaluationTime:
    """Predicted seconds of evaluations that fall on the same step, what is generated left out.

    Attributes:
        together_s: Of all tasks at once.
        one_by_one_s: Of one task after another.
    """

    together_s: float
    one_by_one_s: float


def predicted_evaluation(context: PlanningContext, loads: Mapping[str, EvaluatedLoad]) -> EvaluationTime:
    """Predict the seconds of evaluating tasks.

    Args:
        context: As of the plan; its tasks do not count.
        loads: What each task is evaluated on, at least one.
    """
    costs = context.with_tasks({name: task.load for name, task in loads.items()}).costs()
    times = [loads[load.name].times for load in costs.loads]
    ranks, data = context.mesh.pipeline, context.mesh.data

    def seconds(members: Sequence[int]) -> float:
        loads = [costs.loads[i] for i in members]
        tokens = sum(load.total * times[i] for i, load in zip(members, loads, strict=True)) / data
        sequences = (Slice(load.name, i, 0, n) for load in loads for i, n in enumerate(load.tokens))
        most = tokens_per_pass(math.ceil(tokens), ranks)
        passes = [tuple(group) for group in filled(sequences, lambda r: r.stop, most)]
        by_rank = []
        for cost in costs.chunks(passes):
            messages = cost.communication_forward or (0.0,) * len(cost.forward)
            stages = [mine + sent for mine, sent in zip(cost.forward, messages, strict=True)]
            by_rank.append([sum(stages[rank::ranks]) for rank in range(ranks)])
        repeated = tokens / sum(load.total for load in loads)
        # The busiest rank works all the time, but for the first pass's way through the others.
        busiest = max(sum(rank) for rank in zip(*by_rank, strict=True))
        slowest, way = max(by_rank[0]), sum(by_rank[0])
        seconds: float = max(busiest * repeated, slowest) + way - slowest
        return seconds

    everyone = range(len(times))
    return EvaluationTime(seconds(everyone), sum(seconds([i]) for i in everyone))
