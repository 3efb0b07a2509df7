"""Sizes of a task's requests, which the client asks the server for: the server reserves memory by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.sampler import Sampler
from megatron_mux.engine import Task
from megatron_mux.fusion.plan import plan_for
from megatron_mux.fusion.step import Lengths, step_chunks
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS, choices_among


@dataclass(frozen=True)
class RequestSizes:
    """The largest requests of a task.

    Attributes:
        train_rows: Rows of the largest micro-batch of its steps.
        rows: Rows of its largest request, those of evaluations included.
        sequences: Most sequences of a request.
        longest: Tokens of its longest sequence.
    """

    train_rows: int
    rows: int
    sequences: int
    longest: int


def request_sizes(task: Task) -> RequestSizes:
    """The sizes that a task's data gives: exact for its steps, an upper bound for its evaluations."""
    train_rows, sequences = _of_steps(task.spec, task.data)
    rows, longest = train_rows, int(task.data.lengths.max())
    if task.evaluation is not None:
        choices = choices_scored(task)
        longest_there = task.spec.data.max_length if choices else int(task.evaluation.lengths.max())
        passes = len(task.evaluation) * len(choices or "1")  # sequences of them all
        limit = (task.spec.eval and task.spec.eval.per_device_eval_batch_size) or passes
        pass_rows = min(max(TOKENS_PER_PASS, longest_there), min(limit, passes) * longest_there)
        rows, longest = max(rows, pass_rows), max(longest, longest_there)
        sequences = max(sequences, min(limit, passes, pass_rows))
    return RequestSizes(
        train_rows, rows, sequences, min(longest, rows)
    )  # steps may leave out the longest record


def choices_scored(task: Task) -> Sequence[str] | None:
    """The completions that evaluations of a task score with each of its held-out prompts, if it is a classification."""
    if task.evaluation is None or task.spec.eval is None:
        return None
    return choices_among(task.evaluation, task.spec.eval.metrics)


def _of_steps(spec: TaskSpec, data: TaskDataset) -> tuple[int, int]:
    """Rows of the largest micro-batch of a task's steps, and the most sequences of one."""
    plan = plan_for("spatial", {spec.name: spec.training.gradient_accumulation_steps}, 1)
    sampler = Sampler(len(data), spec.sequences_per_step, spec.training.seed, spec.data.shuffle)
    steps = spec.total_steps(len(data))
    if not spec.data.shuffle:
        steps = min(steps, sampler.steps_per_epoch)
    rows = sequences = 0
    for step in range(steps):
        chosen = sampler.batch(step)
        lengths = Lengths(tuple(data.lengths[chosen].tolist()), tuple(data.label_counts[chosen].tolist()))
        for chunks in step_chunks(plan, {spec.name: lengths}).chunks.values():
            for chunk in chunks:
                rows = max(rows, sum(piece.tokens for piece in chunk))
                sequences = max(sequences, len(chunk))
    return rows, sequences
