"""The fields of `training` for preference tasks, with the spellings and defaults of TRL's config classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_mux.section import Number, Refused, Section, problem, shown

Loss = Literal["sft", "dpo", "orpo", "kto"]

PREFERENCE_RATE = 1e-6
"""Learning rate of a preference task that names none, as in TRL."""

LOSS_TYPES: Mapping[str, tuple[str, ...]] = {
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
        "discopop", "sigmoid_norm",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
}  # fmt: skip
"""The supported values of `loss_type` by loss; the first is the default."""

_UNSUPPORTED_TYPES = {
    "aot": "sorts the pairs of a micro-batch, so it would depend on how a batch is divided",
    "aot_unpaired": "sorts the pairs of a micro-batch, so it would depend on how a batch is divided",
    "sft": "write loss: sft for it, or loss: orpo to have it beside a preference",
}

_USED_BY: Mapping[str, tuple[str, ...]] = {
    "beta": ("dpo", "orpo", "kto"),
    "loss_type": ("dpo", "kto"),
    "label_smoothing": ("dpo",),
    "discopop_tau": ("dpo",),
    "precompute_ref_log_probs": ("dpo", "kto"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "disable_dropout": ("dpo", "orpo", "kto"),
}
"""The losses that use each field."""


def _refuse(advice: str, *names: str, neutral: tuple[Any, ...] = (None, False)) -> dict[str, Refused]:
    return {name: Refused(advice, neutral) for name in names}


PREFERENCE_REFUSED: Mapping[str, Refused] = {
    **_refuse(
        "is no field of TRL 1.16 any more: write loss: orpo for a preference without a reference",
        "reference_free",
    ),
    **_refuse(
        "the reference is the backbone, or the adapter that the task starts from: leave it out",
        "ref_model", "ref_adapter_name", "model_adapter_name", "ref_model_init_kwargs", "force_use_ref_model",
    ),
    **_refuse("a reference that follows the task is not supported: leave it out", "sync_ref_model"),
    **_refuse("a reference that follows the task is not supported: leave it out", "ref_model_mixup_alpha",
              neutral=(None, 0.6)),
    **_refuse("a reference that follows the task is not supported: leave it out", "ref_model_sync_steps",
              neutral=(None, 512)),
    **_refuse("combinations of losses are not supported: name one loss_type", "loss_weights"),
    **_refuse("only reverse_kl is supported: leave it out", "f_divergence_type", neutral=(None, "reverse_kl")),
    **_refuse("only reverse_kl is supported: leave it out", "f_alpha_divergence_coef", neutral=(None, 0.5)),
    **_refuse("LD-DPO is not supported: leave it out", "ld_alpha", neutral=(None, 1.0)),
    **_refuse("WPO is not supported: leave it out", "use_weighting"),
    **_refuse("megatron-mux chooses how many records a pass takes: leave it out", "precompute_ref_batch_size"),
    **_refuse("sequences are never padded: leave it out", "padding_free", neutral=(None, False, True)),
    **_refuse("sequences are never padded: leave it out", "pad_to_multiple_of", neutral=(None, "auto")),
    **_refuse("the tokenizer of the backbone is used: leave it out", "pad_token", "padding_value"),
    **_refuse("use data.max_length, which counts prompt and completion", "max_prompt_length", "max_completion_length"),
    **_refuse("activations are not offloaded: leave it out", "activation_offloading"),
    **_refuse("the backbone is given by --backbone: leave it out", "model_init_kwargs", "trust_remote_code"),
    **_refuse("data files are tokenised by megatron-mux: leave it out", "dataset_num_proc"),
    **_refuse("samples of an evaluation are asked for in the eval section", "generate_during_eval"),
    **_refuse("backbones are decoders: leave it out", "is_encoder_decoder"),
}  # fmt: skip
"""Fields of TRL's config classes that are not supported."""


def _loss_type(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]  # TRL takes a list of losses that it adds up
    if isinstance(value, (list, tuple)):
        raise problem(f"must be one loss, got {shown(value)}: combinations of losses are not supported")
    if value is None or any(value == name for names in LOSS_TYPES.values() for name in names):
        return value
    if isinstance(value, str) and value in _UNSUPPORTED_TYPES:
        raise problem(f"{value} is not supported: {_UNSUPPORTED_TYPES[value]}")
    known = "; ".join(f"{', '.join(names)} (loss: {loss})" for loss, names in LOSS_TYPES.items())
    raise problem(f"must be one of {known}, got {shown(value)}")


def _truncation(value: Any) -> Any:
    if value == "keep_end":
        raise problem(
            "keep_end is deprecated in TRL and not supported: records are cut on the right (keep_start)"
        )
    return value


class PreferenceFields(Section):
    """What a task minimises: the log-likelihood of its records, or a preference between completions."""

    loss: Loss = "sft"
    """`sft`: the labelled tokens' negative log-likelihood; `dpo`, `orpo`, `kto`: as TRL's trainers of these names."""
    loss_type: Annotated[str | None, BeforeValidator(_loss_type)] = None
    """Variant of `dpo` (default sigmoid) or `kto` (default kto), see `LOSS_TYPES`."""
    beta: Number = Field(default=0.1, gt=0)
    """Scale of rewards: the higher, the closer to the reference; for `orpo` the weight of the odds ratio."""
    label_smoothing: Number = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a preference is the wrong way round (robust), or epsilon (exo_pair)."""
    discopop_tau: Number = Field(default=0.05, gt=0)
    """Temperature of discopop."""
    precompute_ref_log_probs: bool = False
    """Compute the reference's log-probabilities of all training records once, before the first step."""
    desirable_weight: Number = Field(default=1.0, ge=0)
    """Weight of a desirable record's loss (`kto`)."""
    undesirable_weight: Number = Field(default=1.0, ge=0)
    """Weight of an undesirable record's loss (`kto`)."""
    disable_dropout: bool = True
    """TRL turns dropout off for preferences; false allows an adapter with dropout."""
    truncation_mode: Annotated[Literal["keep_start"], BeforeValidator(_truncation)] = "keep_start"
    """Which end of a long record is kept."""

    @model_validator(mode="before")
    @classmethod
    def _preference_rate(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("loss", "sft") in ("dpo", "orpo", "kto"):
            return {"learning_rate": PREFERENCE_RATE, **value}
        return value

    @model_validator(mode="after")
    def _used_by_its_loss(self) -> PreferenceFields:
        fields = type(self).model_fields
        for name, losses in _USED_BY.items():
            if self.loss not in losses and getattr(self, name) != fields[name].default:
                raise problem(
                    f"{name} is a field of loss: {' or '.join(losses)}, and loss is {self.loss}: leave it out"
                )
        if self.loss_type is not None and self.loss_type not in LOSS_TYPES[self.loss]:
            known = ", ".join(LOSS_TYPES[self.loss])
            raise problem(f"loss_type {self.loss_type} is not one of loss: {self.loss}: use one of {known}")
        if self.label_smoothing and self.variant not in ("robust", "exo_pair"):
            raise problem(
                "label_smoothing is used by loss_type robust and exo_pair alone, as in TRL: leave it out"
            )
        if self.variant == "exo_pair" and not self.label_smoothing:
            raise problem(
                "loss_type exo_pair needs a label_smoothing above 0, such as 1e-3: without one it is infinite"
            )
        if self.needs_kl and getattr(self, "per_device_train_batch_size", 2) < 2:
            raise problem(
                "per_device_train_batch_size must be at least 2 with loss_type kto, as in TRL: its KL term pairs each "
                "prompt with the completion of another record"
            )
        if self.is_preference and getattr(self, "router_aux_loss_coef", None):
            raise problem(f"router_aux_loss_coef is not supported with loss: {self.loss}: leave it out")
        return self

    @property
    def variant(self) -> str:
        """The loss type that is meant; empty where the loss has none."""
        return self.loss_type or LOSS_TYPES.get(self.loss, ("",))[0]

    @property
    def is_preference(self) -> bool:
        """Whether the task learns a preference."""
        return self.loss != "sft"

    @property
    def figures(self) -> tuple[str, ...]:
        """What an evaluation of a preference measures besides the loss, without `eval_`."""
        names = [
            "accuracy",
            *(f"{kind}/{which}" for kind in ("rewards", "logps") for which in ("chosen", "rejected")),
        ]
        names.append("rewards/margins")
        if self.loss != "kto":
            names.append("rewards/accuracies")
        if self.loss == "orpo":
            names += ["nll_loss", "log_odds_ratio", "log_odds_chosen"]
        return (*names, "kl") if self.needs_kl else tuple(names)

    @property
    def sequences_per_record(self) -> int:
        """Sequences that a record becomes: 2 for a pair."""
        return 2 if self.loss in ("dpo", "orpo") else 1

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss in ("dpo", "kto")

    @property
    def refers_in_steps(self) -> bool:
        """Whether each step computes its rows a second time with the reference."""
        return self.needs_reference and not self.precompute_ref_log_probs

    @property
    def needs_kl(self) -> bool:
        """Whether the loss has a KL term over the step."""
        return self.variant == "kto"
