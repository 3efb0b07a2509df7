"""The `training` section."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from megatron_mux.section import (
    LARGEST_BATCH,
    LARGEST_COUNT,
    Number,
    Refused,
    TidyNumber,
    problem,
)
from megatron_mux.tasks.preference import PREFERENCE_REFUSED, PreferenceFields


def _elsewhere(advice: str, *names: str) -> dict[str, Refused]:
    # What is off by a false value asks for nothing, as configs copied from transformers often do.
    return {name: Refused(advice, (None, False, 0, 0.0, "", "no", "none")) for name in names}


_REFUSED: Mapping[str, Refused] = {
    **_elsewhere("is of the whole run: use --bf16 of pretrain_mux.py", "bf16", "bf16_full_eval"),
    **_elsewhere("fp16 is not supported: use --bf16 of pretrain_mux.py", "fp16", "fp16_full_eval", "fp16_opt_level"),
    **_elsewhere("is of the whole run: use --save DIR of pretrain_mux.py", "output_dir", "overwrite_output_dir"),
    **_elsewhere("is of the whole run: use --save-interval of pretrain_mux.py", "save_steps", "save_strategy"),
    **_elsewhere("is of the whole run: use --mux-keep-checkpoints of pretrain_mux.py", "save_total_limit"),
    **_elsewhere("is of the whole run: use --load DIR of pretrain_mux.py", "resume_from_checkpoint"),
    **_elsewhere(
        "is of the whole run: use --log-interval of pretrain_mux.py",
        "logging_steps", "logging_strategy", "logging_first_step",
    ),
    **_elsewhere(
        "is of the whole run: use --tensorboard-dir of pretrain_mux.py",
        "report_to", "logging_dir", "run_name", "project",
    ),
    **_elsewhere(
        "is of the whole run: use --recompute-granularity of pretrain_mux.py",
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs",
    ),
    **_elsewhere(
        "belongs in the task's eval section",
        "eval_steps", "eval_strategy", "evaluation_strategy", "do_eval", "per_device_eval_batch_size", "eval_on_start",
    ),
    **_elsewhere("the task's seed orders its data too: use seed", "data_seed"),
    **_elsewhere("use data.max_length", "max_seq_length", "max_length"),
    **_elsewhere("use data.shuffle", "train_sampling_strategy", "group_by_length", "length_column_name"),
    **_elsewhere(
        "is a field of transformers.TrainingArguments that megatron-mux does not support: leave it out",
        "accelerator_config", "adafactor", "auto_find_batch_size", "average_tokens_across_devices",
        "batch_eval_metrics",
        "dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context", "dataloader_num_workers",
        "dataloader_persistent_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_backend",
        "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout",
        "debug", "deepspeed", "disable_tqdm", "do_predict", "do_train", "enable_jit_checkpoint",
        "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "eval_use_gather_object", "fsdp",
        "fsdp_config", "full_determinism", "greater_is_better", "half_precision_backend", "hub_always_push",
        "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy", "hub_token", "ignore_data_skip",
        "include_for_metrics", "include_inputs_for_metrics", "include_num_input_tokens_seen",
        "include_tokens_per_second",
        "jit_mode_eval", "label_names", "label_smoothing_factor", "liger_kernel_config", "load_best_model_at_end",
        "local_rank", "log_level", "log_level_replica", "log_on_each_node", "logging_nan_inf_filter",
        "lr_scheduler_kwargs", "metric_for_best_model", "neftune_noise_alpha", "no_cuda", "optim_args",
        "optim_target_modules", "parallelism_config", "past_index", "prediction_loss_only", "push_to_hub", "ray_scope",
        "remove_unused_columns", "restore_callback_states_from_checkpoint", "save_on_each_node", "save_only_model",
        "save_safetensors", "skip_memory_metrics", "tf32", "torch_compile", "torch_compile_backend",
        "torch_compile_mode", "torch_empty_cache_steps", "torchdynamo", "tpu_num_cores", "trackio_bucket_id",
        "trackio_space_id", "trackio_static_space_id", "use_cache", "use_cpu", "use_ipex", "use_legacy_prediction_loop",
        "use_liger_kernel", "use_mps_device",
    ),
}  # fmt: skip


class TrainingSpec(PreferenceFields):
    """Hyper-parameters of training, with the spellings and defaults of `transformers.TrainingArguments`."""

    per_device_train_batch_size: int = Field(default=8, ge=1, le=LARGEST_BATCH)
    """Sequences of one accumulation step. One optimizer step uses this times `gradient_accumulation_steps`, whatever
    the number of ranks."""
    gradient_accumulation_steps: int = Field(default=1, ge=1, le=LARGEST_BATCH)
    """Number of parts in which an optimizer step's sequences are computed. Affects memory, not results."""
    learning_rate: Number = Field(default=5e-5, gt=0)
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Schedule of the learning rate after the warm-up."""
    warmup_steps: TidyNumber = Field(default=0, ge=0, le=LARGEST_COUNT)
    """Steps over which the rate rises from zero; below 1, the share of all steps."""
    warmup_ratio: Number = Field(default=0.0, ge=0, le=1)
    """The same as a share of all steps; give one of the two."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Decoupled for adamw_torch, L2 for sgd; biases are exempt."""
    max_grad_norm: Number = Field(default=1.0, ge=0)
    """Maximum norm of the task's gradient; 0: no clipping."""
    optim: Literal["adamw_torch", "sgd"] = "adamw_torch"
    """AdamW, or plain SGD without momentum as in transformers."""
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment."""
    adam_beta2: Number = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    adam_epsilon: Number = Field(default=1e-8, ge=0)
    """Keeps AdamW from dividing by zero."""
    router_aux_loss_coef: Number = Field(default=0.0, ge=0)
    """Coefficient of the loss that balances experts, sequence by sequence (`megatron_mux.balancing`); 0: none."""
    max_steps: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """Number of optimizer steps; None (or -1): as many as `num_train_epochs` takes."""
    num_train_epochs: Number | None = Field(default=None, gt=0, le=LARGEST_BATCH)
    """Passes over the data, fractions allowed; 3 when neither this nor `max_steps` is given."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seeds the adapter's initial values, the data's order and dropout."""

    refused: ClassVar[Mapping[str, Refused]] = {**PREFERENCE_REFUSED, **_REFUSED}

    @model_validator(mode="before")
    @classmethod
    def _settle_length(cls, value: Any) -> Any:
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
        return self

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps in a run of `total_steps`, counted as transformers does."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(total_steps * (self.warmup_steps or self.warmup_ratio))
