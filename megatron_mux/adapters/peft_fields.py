"""Fields of peft 0.21's config classes that sections lack: what is said of them, and what is stored for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mux.section import Refused

NOT_STORED: Any = object()


@dataclass(frozen=True)
class PeftField(Refused):
    """A field of peft that is not a field of ours.

    Attributes:
        default: Stored in `adapter_config.json`; `NOT_STORED`: peft's class for the kind lacks the field.
        of_weights: Values that a stored config may have, because they only say how its weights came about.
        from_backbone: Whether a stored config may have any value, because the backbone settles it.
    """

    default: Any = NOT_STORED
    of_weights: tuple[Any, ...] = ()
    from_backbone: bool = False

    def can_be_left(self, value: Any) -> bool:
        """Whether `value` in a stored config can be ignored."""
        return self.from_backbone or value in self.of_weights or self.asks_for_nothing(value)


NOT_YET = "is a peft field that megatron-mux does not support yet: leave it out"


def not_yet(default: Any, *names: str, neutral: tuple[Any, ...] = (None, False)) -> dict[str, PeftField]:
    """Fields of peft that are refused unless they have one of the `neutral` values."""
    return {name: PeftField(NOT_YET, neutral, default=default) for name in names}


def initial_values(name: str) -> dict[str, PeftField]:
    """peft's field for how values start, of which we have the default; stored adapters may have any."""
    advice = "only true (peft's default) is supported: leave it out"
    return {name: PeftField(advice, (True,), default=True, of_weights=(True, False))}


def bookkeeping(**defaults: Any) -> dict[str, PeftField]:
    """Fields of peft that are accepted and ignored, with what is stored for them."""
    return {name: PeftField("", always=True, default=default) for name, default in defaults.items()}


OUR_FIELDS: Mapping[str, PeftField] = {
    **bookkeeping(
        auto_mapping=None,
        base_model_name_or_path=None,
        inference_mode=True,
        peft_version=NOT_STORED,
        revision=None,
    ),
    **not_yet(NOT_STORED, "modules_to_save", neutral=(None, [])),
    "task_type": PeftField(
        "only CAUSAL_LM is supported: leave it out", (None, "CAUSAL_LM"), default="CAUSAL_LM"
    ),
}
"""Fields of kinds that peft lacks."""

COMMON_FIELDS: Mapping[str, PeftField] = {
    **OUR_FIELDS,
    **bookkeeping(peft_version="0.21.0"),
    **not_yet(None, "modules_to_save", neutral=(None, [])),
}
"""Fields of all of peft's config classes."""

SAVER_FIELDS: Mapping[str, PeftField] = {
    name: field for name, field in COMMON_FIELDS.items() if name != "modules_to_save"
}
"""Fields of the config classes of kinds that have `modules_to_save` (`vocabulary_fields`)."""

TUNER_FIELDS: Mapping[str, PeftField] = {
    **SAVER_FIELDS,
    # How the backbone stores its weights: peft corrects a wrong value, we know it from the backbone.
    **bookkeeping(fan_in_fan_out=False),
}
"""Fields of peft's config classes for LoRA, VeRA and IA3."""
