"""What of a task decides the bytes of its rows: tasks that agree in it share a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_SMALLEST = 8
"""Ranks up to this one take as much, and any takes as much as the next power of two, or a little less."""

_WITHOUT_BYTES: Mapping[str, tuple[str, ...]] = {
    "adapter": (
        "alpha", "alpha_pattern", "d_initial", "l0_weight", "lora_alpha", "projection_prng_key", "scaling",
        "use_rslora",
    ),
    "training": (
        "adam_beta1", "adam_beta2", "adam_epsilon", "beta", "desirable_weight", "discopop_tau",
        "early_stopping_patience", "early_stopping_threshold", "gradient_accumulation_steps", "greater_is_better",
        "learning_rate", "load_best_model_at_end", "logging_dir", "loraplus_weight_decay", "lr_scheduler_kwargs",
        "lr_scheduler_on_resume", "lr_scheduler_type", "max_steps", "metric_for_best_model", "num_train_epochs",
        "per_device_train_batch_size", "project", "report_to", "run_name", "save_steps", "save_strategy",
        "save_total_limit", "seed", "truncation_mode", "undesirable_weight", "warmup_ratio", "warmup_steps",
    ),
}  # fmt: skip
_IF_ANY: Mapping[str, tuple[str, ...]] = {
    "adapter": ("lora_dropout", "vera_dropout"),
    "training": (
        "label_smoothing", "label_smoothing_factor", "max_grad_norm", "neftune_noise_alpha", "router_aux_loss_coef",
        "weight_decay",
    ),
}  # fmt: skip
"""Numbers of which only counts whether they are zero."""
_ANY = 0.25
"""Stands for them: all of these fields allow it."""
_BUFFERED = ("adafactor", "adamw_8bit", "adamw_bnb_8bit", "lion_32bit")
"""Optimizers whose state or buffers do not grow with the rank."""
_DRAWN = (True, False, "gaussian")
"""Values of `init_lora_weights` whose matrices may have any rank."""


@dataclass(frozen=True, order=True)
class Signature:
    """Adapter, loss and optimizer of a task.

    Attributes:
        family: Its sections adapter and training as JSON, without rank and without what decides no bytes.
        rank: Of all its matrices, up to a power of two and at least eight; 0: none, or part of the family.
    """

    family: str
    rank: int

    @classmethod
    def of(cls, task: Mapping[str, Any]) -> Signature:
        """Of a task, as `TaskSpec.plain` gives it."""
        found = {name: _decisive(name, task[name]) for name in _WITHOUT_BYTES}
        adapter, rank = found["adapter"], 0
        # Others have matrices that do not grow with it, or that have no higher rank than a weight.
        if (
            adapter["peft_type"] == "LORA"
            and not adapter["rank_pattern"]
            and adapter["init_lora_weights"] in _DRAWN
            and found["training"]["optim"] not in _BUFFERED
        ):
            adapter["init_lora_weights"] = True
            rank = max(_SMALLEST, _up(adapter.pop("r")))
        return cls(json.dumps(found, sort_keys=True), rank)

    def at_least(self, rank: int) -> Signature:
        """The same with this rank, up to a power of two, if it has a lower one."""
        return replace(self, rank=max(self.rank, _up(rank))) if self.rank else self

    @property
    def task(self) -> dict[str, Any]:
        """A task that has this signature."""
        return {"name": "task", "data": {"path": "none"}, **self.sections}

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """Sections adapter and training of a task that has this signature."""
        found: dict[str, dict[str, Any]] = json.loads(self.family)
        if self.rank:
            found["adapter"]["r"] = self.rank
        return found


def _up(rank: int) -> int:
    """To the next power of two."""
    return 1 << max(0, rank - 1).bit_length()


def _decisive(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in section.items() if key not in _WITHOUT_BYTES[name]}
    for key in _IF_ANY[name]:
        if found.get(key):
            found[key] = _ANY
    return found
