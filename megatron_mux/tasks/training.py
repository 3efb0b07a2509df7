"""The `training` section."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from megatron_mux.optimizers.loraplus import group_of
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.optimizers.schedules import SCHEDULES, Curve, continued, problem_of_kwargs, schedule
from megatron_mux.section import (
    LARGEST_BATCH,
    LARGEST_COUNT,
    Number,
    Refused,
    TidyNumber,
    problem,
)
from megatron_mux.tasks.data import OF_SFT
from megatron_mux.tasks.evaluation import WHEN_EVALUATED
from megatron_mux.tasks.keeping import KeepingFields
from megatron_mux.tasks.preference import PREFERENCE_REFUSED, PreferenceFields
from megatron_mux.tasks.reports import ReportFields


def _elsewhere(advice: str, *names: str) -> dict[str, Refused]:
    # What is off by a false value asks for nothing, as configs copied from transformers often do.
    return {name: Refused(advice, (None, False, 0, 0.0, "", "no", "none")) for name in names}


_REFUSED: Mapping[str, Refused] = {
    **_elsewhere("is of the whole run: give it --bf16", "bf16", "bf16_full_eval"),
    **_elsewhere("fp16 is not supported: use --bf16", "fp16", "fp16_full_eval", "fp16_opt_level"),
    **_elsewhere("is of the whole run: give it --save DIR", "output_dir", "overwrite_output_dir"),
    **_elsewhere("is of the whole run: give it --load DIR", "resume_from_checkpoint"),
    **_elsewhere(
        "is of the whole run: give it --log-interval",
        "logging_steps", "logging_strategy", "logging_first_step",
    ),
    **_elsewhere(
        "is of the whole run: give it --recompute-granularity",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs",
    ),
    **_elsewhere("belongs in the task's eval section", "eval_steps", "per_device_eval_batch_size"),
    **_elsewhere(WHEN_EVALUATED, "eval_strategy", "evaluation_strategy", "do_eval", "eval_on_start"),
    **OF_SFT,
    "loraplus_lr_embedding": Refused(
        "LoRA on embeddings is not supported, so nothing would have this rate: leave it out", (None, 1e-6)
    ),
    **_elsewhere("the task's seed orders its data too: use seed", "data_seed"),
    **_elsewhere("use optim: adafactor", "adafactor"),
    **_elsewhere(
        "no supported optimizer takes arguments: betas of lion_32bit are adam_beta1 and adam_beta2, and momentum of "
        "sgd is not supported",
        "optim_args",
    ),
    **_elsewhere("use data.max_length", "max_seq_length", "max_length"),
    **_elsewhere("use data.shuffle", "train_sampling_strategy", "group_by_length", "length_column_name"),
    **_elsewhere(
        "is a field of transformers.TrainingArguments that megatron-mux does not support: leave it out",
        "accelerator_config", "auto_find_batch_size", "average_tokens_across_devices",
        "batch_eval_metrics",
        "dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
        "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend",
        "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout",
        "debug", "deepspeed", "disable_tqdm", "do_predict", "do_train", "enable_jit_checkpoint",
        "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_use_gather_object", "fsdp",
        "fsdp_config", "full_determinism", "half_precision_backend", "hub_always_push",
        "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token", "ignore_data_skip",
        "include_for_metrics", "include_inputs_for_metrics", "include_num_input_tokens_seen",
        "include_tokens_per_second",
        "jit_mode_eval", "label_names", "liger_kernel_config", "local_rank", "log_level", "log_level_replica",
        "log_on_each_node", "logging_nan_inf_filter", "no_cuda", "optim_target_modules", "parallelism_config",
        "past_index", "prediction_loss_only", "push_to_hub", "ray_scope", "remove_unused_columns",
        "restore_callback_states_from_checkpoint", "save_on_each_node", "save_only_model",
        "save_safetensors", "skip_memory_metrics", "tf32", "torch_compile", "torch_compile_backend",
        "torch_compile_mode", "torch_empty_cache_steps", "torchdynamo", "tpu_num_cores", "trackio_bucket_id",
        "trackio_space_id", "trackio_static_space_id", "use_cache", "use_cpu", "use_ipex", "use_legacy_prediction_loop",
        "use_liger_kernel", "use_mps_device",
    ),
}  # fmt: skip


_NOT_OF_STEPS = {
    "reduce_lr_on_plateau": "depends on evaluations, and a rate here is a function of the step alone",
    "greedy": "depends on losses, and a rate here is a function of the step alone",
}
_OTHER_OPTIMIZERS = {
    "adamw": "transformers calls it adamw_torch_fused, or adamw_torch",
    "paged_adamw_8bit": "an adapter's states are small, nothing is paged: use adamw_8bit",
    "paged_adamw_32bit": "an adapter's states are small, nothing is paged: use adamw_torch_fused",
    "paged_adamw": "an adapter's states are small, nothing is paged: use adamw_torch_fused",
    "paged_lion_32bit": "an adapter's states are small, nothing is paged: use lion_32bit",
}


def _schedule_name(value: Any) -> Any:
    if isinstance(value, str) and value in _NOT_OF_STEPS:
        raise problem(
            f"{value} is not supported, it {_NOT_OF_STEPS[value]}: use one of {', '.join(SCHEDULES)}"
        )
    return value


def _optimizer_name(value: Any) -> Any:
    if isinstance(value, str) and value in _OTHER_OPTIMIZERS:
        raise problem(f"{value}: {_OTHER_OPTIMIZERS[value]}")
    package = OPTIMIZERS[value].needs if isinstance(value, str) and value in OPTIMIZERS else ""
    if package and find_spec(package) is None:
        raise problem(
            f"{value} needs the package {package}: pip install {package}, or choose another optimizer"
        )
    return value


if TYPE_CHECKING:
    ScheduleName: TypeAlias = str
    OptimizerName: TypeAlias = str
else:
    ScheduleName = Annotated[Literal[tuple(SCHEDULES)], BeforeValidator(_schedule_name)]
    OptimizerName = Annotated[Literal[tuple(OPTIMIZERS)], BeforeValidator(_optimizer_name)]


class TrainingSpec(KeepingFields, ReportFields, PreferenceFields):
    """Hyper-parameters of training, with the spellings and defaults of `transformers.TrainingArguments`."""

    per_device_train_batch_size: int = Field(default=8, ge=1, le=LARGEST_BATCH)
    """Sequences of one accumulation step. One optimizer step uses this times `gradient_accumulation_steps`, whatever
    the number of ranks."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=LARGEST_BATCH)
    """Number of parts in which an optimizer step's sequences are computed. Affects memory, not results."""
    learning_rate: Number = Field(default=5e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: ScheduleName = "linear"
    """Schedule of the learning rate after the warm-up."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Keyword arguments of the schedule, as `transformers.get_scheduler` takes them."""
    lr_scheduler_on_resume: Literal["continue"] | None = None
    """What a run that continues with another number of steps does if the steps done would have had other rates:
    `continue` goes on from the last rate (`optimizers.schedules.continued`), None refuses."""
    warmup_steps: TidyNumber = Field(default=0, ge=0, le=LARGEST_COUNT)
    """Steps over which the rate rises from zero; below 1, the share of all steps."""
    warmup_ratio: Number = Field(default=0.0, ge=0, le=1)
    """The same as a share of all steps; give one of the two."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled, but L2 for sgd; biases are exempt."""
    max_grad_norm: Number = Field(default=1.0, ge=0)
    """Maximum norm of the task's gradient; 0: no clipping."""
    optim: OptimizerName = "adamw_torch_fused"
    """The optimizer; `megatron_mux.optimizers` has a file for each."""
    loraplus_lr_ratio: Number | None = Field(default=None, gt=0)
    """LoRA+: B of LoRA, and vectors, have this many times the learning rate (`peft`'s `create_loraplus_optimizer`)."""
    loraplus_weight_decay: Number = Field(default=0.0, ge=0)
    """Weight decay with `loraplus_lr_ratio`, in place of `weight_decay`."""
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment of AdamW and Lion."""
    adam_beta2: Number = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment of AdamW; of the momentum that Lion keeps."""
    adam_epsilon: Number = Field(default=1e-8, ge=0)
    """Keeps AdamW from dividing by zero."""
    label_smoothing_factor: Number = Field(default=0.0, ge=0, le=1)
    """Share of each label that is spread evenly over the vocabulary, in training."""
    neftune_noise_alpha: Number | None = Field(default=None, gt=0)
    """Noise on the embeddings while training, of magnitude alpha / sqrt(length x hidden size); None: none."""
    router_aux_loss_coef: Number = Field(default=0.0, ge=0)
    """Coefficient of the loss that balances experts, sequence by sequence (`megatron_mux.batch.balancing`); 0: none."""
    max_steps: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """Number of optimizer steps; None (or -1): as many as `num_train_epochs` takes."""
    num_train_epochs: Number | None = Field(default=None, gt=0, le=LARGEST_BATCH)
    """Passes over the data, fractions allowed; 3 when neither this nor `max_steps` is given."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seeds the adapter's initial values, the data's order and dropout."""

    refused: ClassVar[Mapping[str, Refused]] = {**PREFERENCE_REFUSED, **_REFUSED}
    undecided: ClassVar[tuple[str, ...]] = (
        *KeepingFields.model_fields,
        *ReportFields.model_fields,
        "lr_scheduler_on_resume",
    )
    """Fields on which no update depends: a run that continues may change them."""
    length_fields: ClassVar[tuple[str, ...]] = ("max_steps", "num_train_epochs")
    """Fields for the number of steps: a run that continues may change them as far as its schedule allows."""

    @model_validator(mode="before")
    @classmethod
    def _default_length(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        value = dict(value)
        if type(value.get("max_steps")) is int and value["max_steps"] == -1:
            del value["max_steps"]
        if value.get("max_steps") is None and value.get("num_train_epochs") is None:
            value["num_train_epochs"] = 3.0
        return value

    @model_validator(mode="after")
    def _one_of_two(self) -> TrainingSpec:
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise problem("give max_steps or num_train_epochs, not both")
        if self.warmup_steps and self.warmup_ratio:
            raise problem("give warmup_steps or warmup_ratio, not both")
        if self.warmup_steps > 1 and self.warmup_steps != int(self.warmup_steps):
            raise problem(f"warmup_steps must be a whole number, or a share below 1, got {self.warmup_steps}")
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            raise problem(
                "lr_scheduler_type constant has no warm-up: write constant_with_warmup, or leave the warm-up out"
            )
        for name in ("label_smoothing_factor", "neftune_noise_alpha"):
            if self.is_preference and getattr(self, name):
                raise problem(f"{name} is not supported with loss: {self.loss}: leave it out")
        if wrong := problem_of_kwargs(
            self.lr_scheduler_type, self.lr_scheduler_kwargs or {}, self.learning_rate
        ):
            raise problem(f"lr_scheduler_kwargs: {wrong}")
        if self.loraplus_lr_ratio is None:
            if self.loraplus_weight_decay:
                raise problem(
                    "loraplus_weight_decay belongs to LoRA+: give loraplus_lr_ratio too, or leave it out"
                )
        elif self.weight_decay:
            raise problem("with loraplus_lr_ratio, weight decay is loraplus_weight_decay: give that instead")
        return self

    def decay_and_rate(self, key: str, shape: Sequence[int], decays: bool) -> tuple[float, float]:
        """Weight decay of a parameter, and its learning rate as a multiple of `learning_rate`.

        Args:
            key: Its name in `adapter_model.safetensors`.
            shape: Of the whole tensor.
            decays: Whether weight decay applies to it.
        """
        if self.loraplus_lr_ratio is None:
            return self.weight_decay * decays, 1.0
        rate = self.loraplus_lr_ratio if group_of(key, shape) == "B" else 1.0
        return self.loraplus_weight_decay * decays, rate

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of `total_steps`, counted as transformers does."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(total_steps * (self.warmup_steps or self.warmup_ratio))

    def rate_curve(self, total_steps: int, before: Sequence[tuple[int, int]] = ()) -> Curve:
        """Make the schedule of the learning rate, as factors of `learning_rate`.

        Args:
            total_steps: Steps of the task.
            before: See `optimizers.schedules.continued`.
        """
        return continued(self._curve, total_steps, before)

    def _curve(self, total_steps: int) -> Curve:
        kwargs, warmup = self.lr_scheduler_kwargs or {}, self.warmup(total_steps)
        return schedule(self.lr_scheduler_type, self.learning_rate, warmup, total_steps, kwargs)
