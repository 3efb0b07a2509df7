"""Held-out loss and rewards of a preference task."""

from __future__ import annotations

import torch

from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.engine.evaluate import EvalResult
from megatron_mux.engine.log_probs import LogProbs, kl_term
from megatron_mux.engine.preference import constants_of, loss_of, named
from megatron_mux.kernels.preference_loss import SequenceSums


def evaluate_preferences(log_probs: LogProbs, data: PreferenceDataset) -> EvalResult:
    """Evaluate a preference task on a file. Every rank calls it and gets the answer.

    The loss is the mean over all records, and so is KTO's KL term, whose completions are rotated within batches of the
    training's size. The accuracy is the share of pairs whose chosen sequence has the higher reward; for KTO the share
    of records whose reward has the sign of their label.

    Raises:
        SharedError: See `LogProbs.everywhere`.
    """
    spec = log_probs.task.task.spec.training
    count = len(data)
    policy, reference = log_probs.everywhere(data.completion, range(count), policy=True)
    prompts, kl = torch.zeros_like(policy), torch.zeros((), dtype=policy.dtype)
    if spec.loss == "orpo":
        whole = log_probs.everywhere(data.__getitem__, range(0, count, 2), policy=True)[0]
        prompts[0::2] = whole - policy[0::2]
    if spec.needs_kl:
        batch = spec.per_device_train_batch_size
        mismatched = lambda i: data.mismatched(i, _before(i, batch, count))
        kl = kl_term(log_probs.everywhere(mismatched, range(count), policy=True))
    constants = torch.from_numpy(constants_of(spec, data, range(count), None))
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
