"""The training loop that every reference shares: one task, one model, padded batches, as a user would write it.

Deliberately plain: pad to the longest of the batch, accumulate, clip, step, schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.optimizers import create_loraplus_optimizer
from torch import Tensor, nn
from transformers import get_scheduler
from transformers.optimization import Adafactor
from transformers.trainer_pt_utils import LabelSmoother

Example = tuple[Tensor, Tensor]
"""Token ids `[L]` int64, and `[L]` bool: which of them are to be predicted (the first never is)."""


@dataclass(frozen=True)
class Recipe:
    """How a task is trained: the names are those of `transformers.TrainingArguments`."""

    max_steps: int
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optim: str = "adamw_torch"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    loraplus_lr_ratio: float | None = None
    loraplus_weight_decay: float = 0.0
    label_smoothing_factor: float = 0.0

    @staticmethod
    def of(training: Mapping[str, Any]) -> Recipe:
        """The recipe in a `training:` block of tasks.yaml (the seed is the data's and the adapter's, not ours)."""
        return Recipe(**{key: value for key, value in training.items() if key in Recipe.__dataclass_fields__})


@dataclass(frozen=True)
class SoloResult:
    """What a task trained alone came to: one loss, gradient norm and learning rate a step, and the adapter."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    tensors: dict[str, Tensor]


def pad(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad on the right to the longest: `input_ids`, `attention_mask`, `labels` (-100: none), each `[B, L]`."""
    longest = max(len(tokens) for tokens, _ in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (tokens, labelled) in enumerate(examples):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        labels[row, : len(tokens)] = torch.where(labelled, tokens, -100)
    return ids, mask, labels


def label_count(examples: Iterable[Example]) -> int:
    """How many tokens of a batch are predicted."""
    return sum(int(labelled[1:].sum()) for _, labelled in examples)


def batch_loss(
    model: nn.Module, examples: Sequence[Example], labels_in_step: int, smoothing: float = 0.0
) -> Tensor:
    """Sum of the label losses of these examples, over the number of labels in the whole step."""
    ids, mask, labels = pad(examples)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = logits[:, -ids.shape[1] :]  # some wrappers return rows for virtual tokens too
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if smoothing:
        smoother = LabelSmoother(smoothing)
        smoothed: Tensor = smoother(
            {"logits": wide}, labels, shift_labels=True, num_items_in_batch=labels_in_step
        )
        return smoothed
    total = F.cross_entropy(
        wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return total / labels_in_step


def optimizer_class(recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """The class of `recipe.optim` and its arguments, as `transformers.Trainer` chooses them."""
    import bitsandbytes

    library: Any = bitsandbytes.optim
    betas = (recipe.adam_beta1, recipe.adam_beta2)
    adam = {"betas": betas, "eps": recipe.adam_epsilon}
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw_torch": (torch.optim.AdamW, adam),
        "adamw_torch_fused": (torch.optim.AdamW, {**adam, "fused": True}),
        "adamw_8bit": (library.AdamW, {**adam, "optim_bits": 8}),
        "lion_32bit": (library.Lion, {"betas": betas, "optim_bits": 32}),
        "adafactor": (Adafactor, {"scale_parameter": False, "relative_step": False}),
        "sgd": (torch.optim.SGD, {}),
    }
    return kinds[recipe.optim]


def make_optimizer(
    model: nn.Module, named: Mapping[str, nn.Parameter], recipe: Recipe
) -> torch.optim.Optimizer:
    """The optimizer of `recipe.optim`; biases take no weight decay, as in `transformers.Trainer`, nor do masks."""
    spared_names = {name for name in named if "bias" in name or "log_alpha" in name}
    decayed = [value for name, value in named.items() if name not in spared_names]
    spared = [value for name, value in named.items() if name in spared_names]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    kind, arguments = optimizer_class(recipe)
    if recipe.loraplus_lr_ratio is not None:
        return create_loraplus_optimizer(
            model=cast(Any, model),
            optimizer_cls=kind,
            lr=recipe.learning_rate,
            loraplus_lr_ratio=recipe.loraplus_lr_ratio,
            loraplus_weight_decay=recipe.loraplus_weight_decay,
            **arguments,
        )
    made: torch.optim.Optimizer = kind(groups, lr=recipe.learning_rate, **arguments)
    return made


def accumulate(model: nn.Module, examples: Sequence[Example], size: int, smoothing: float = 0.0) -> float:
    """Backward over one whole batch, `size` examples at a time; returns the batch's loss."""
    count = label_count(examples)
    loss = 0.0
    for start in range(0, len(examples), size):
        part = batch_loss(model, examples[start : start + size], count, smoothing)
        part.backward()
        loss += part.item()
    return loss


def train(
    model: nn.Module,
    named: Mapping[str, nn.Parameter],
    steps: Sequence[Sequence[Example]],
    recipe: Recipe,
    export: Callable[[], dict[str, Tensor]],
    penalty: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
) -> SoloResult:
    """Train one task alone.

    Args:
        model: Takes `input_ids` and `attention_mask`, returns an object with `.logits`.
        named: The adapter's parameters: all that is trained.
        steps: The examples of each optimizer step, in data order, accumulation included.
        recipe: Optimizer, schedule, clipping.
        export: The adapter's tensors, by the names they are saved under.
        penalty: Called with the step's index after the backward and before clipping, to add gradients.
        after_step: Called with the number of steps done, after the optimizer's step.
    """
    optimizer = make_optimizer(model, named, recipe)
    scheduler = get_scheduler(
        recipe.lr_scheduler_type,
        optimizer,
        num_warmup_steps=recipe.warmup_steps,
        num_training_steps=recipe.max_steps,
        scheduler_specific_kwargs=dict(recipe.lr_scheduler_kwargs or {}),
    )
    result = SoloResult([], [], [], {})
    for index, examples in enumerate(steps):
        optimizer.zero_grad(set_to_none=True)
        size, smoothing = recipe.per_device_train_batch_size, recipe.label_smoothing_factor
        result.losses.append(accumulate(model, examples, size, smoothing))
        if penalty is not None:
            penalty(index)
        limit = recipe.max_grad_norm if recipe.max_grad_norm > 0 else float("inf")
        result.grad_norms.append(float(nn.utils.clip_grad_norm_(list(named.values()), limit)))
        result.learning_rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
        if after_step is not None:
            after_step(index + 1)
    result.tensors.update(export())
    return result
