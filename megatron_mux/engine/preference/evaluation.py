"""Held-out loss and rewards of a preference task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_mux.data.tokenise import Example
from megatron_mux.engine.evaluation.evaluator import EvalResult
from megatron_mux.engine.evaluation.held_out import HeldOut
from megatron_mux.engine.preference.log_probs import LogProbs, Wanted, kl_term
from megatron_mux.engine.preference.losses import constants_of, loss_of, named
from megatron_mux.engine.preference.task import PreferenceTask
from megatron_mux.kernels.loss.preference import SequenceSums


def evaluate_preferences(log_probs: LogProbs, tasks: Sequence[HeldOut]) -> dict[str, EvalResult]:
    """Evaluate preference tasks on their files, all in the same passes. Every rank calls it and gets the answer.

    The loss is the mean over all records, and so is KTO's KL term, whose completions are rotated within batches of the
    training's size. The accuracy is the share of pairs whose chosen sequence has the higher reward; for KTO the share
    of records whose reward has the sign of their label.

    Raises:
        SharedError: See `LogProbs.everywhere`.
    """
    wanted = [_wanted(task) for task in tasks]
    each = iter(log_probs.everywhere([wanted_of for some in wanted for wanted_of in some]))
    return {t.name: _result(t, [next(each) for _ in some]) for t, some in zip(tasks, wanted, strict=True)}


def _wanted(held_out: HeldOut) -> list[Wanted]:
    """What a task's figures need: its completions, and for ORPO whole chosen sequences, for KTO mismatched ones."""
    task, data, count = held_out.task, held_out.preferences, len(held_out.records)
    assert isinstance(task, PreferenceTask)
    spec = task.task.spec.training

    def of(example: Callable[[int], Example], numbers: Sequence[int]) -> Wanted:
        return Wanted(task, example, numbers, batch_size=held_out.batch_size)

    wanted = [of(data.completion, range(count))]
    if spec.loss == "orpo":
        wanted.append(of(data.__getitem__, range(0, count, 2)))
    if spec.needs_kl:
        batch = spec.per_device_train_batch_size
        wanted.append(of(lambda i: data.mismatched(i, _before(i, batch, count)), range(count)))
    return wanted


def _result(held_out: HeldOut, log_probs: Sequence[Tensor]) -> EvalResult:
    """A task's figures from the log-probabilities of what `_wanted` asks for."""
    spec, count = held_out.task.task.spec.training, len(held_out.records)
    policy, reference = log_probs[0]
    prompts, kl = torch.zeros_like(policy), torch.zeros((), dtype=policy.dtype)
    if spec.loss == "orpo":
        prompts[0::2] = log_probs[1][0] - policy[0::2]
    if spec.needs_kl:
        kl = kl_term(log_probs[1])
    constants = torch.from_numpy(constants_of(spec, held_out.preferences, range(count), None))
    tokens, weights, signs = constants[1:4]
    sums = SequenceSums(policy, prompts, reference, tokens, weights, signs, kl)
    loss = loss_of(spec)
    good = int((signs > 0).sum())
    records = count // spec.sequences_per_record
    metrics = named(loss, loss.figures(sums).tolist(), good, count - good, records)
    accuracy = metrics.get("rewards/accuracies")
    if accuracy is None:
        accuracy = float(((policy - reference) * signs > 0).double().mean())
    values = {"loss": float(loss.per_record(sums).mean()), "accuracy": accuracy}
    return EvalResult(values | metrics, records)


def _before(number: int, batch: int, count: int) -> int:
    """The record whose completion goes with a record's prompt: the one before it in its batch, as in TRL."""
    first = number - number % batch
    return number - 1 if number > first else min(first + batch, count) - 1
