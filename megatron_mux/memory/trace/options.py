"""A user's options of a training, and the case to trace for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_mux.errors import UserError
from megatron_mux.memory.method_flags import checked_gpu
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS
from megatron_mux.memory.tensors import ModelTensors
from megatron_mux.memory.trace.case import Case, Precision

_DTYPES: Mapping[str, Precision] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Options:
    """How a model is trained with `transformers` and `peft`, and on which GPU.

    Attributes:
        device: Part of the GPU's name, a key of `gpus.GPUS`.
        precision: `bf16`, `fp16` or `fp32`.
        master_weights: Whether full fine-tuning in half precision has fp32 weights and autocast (`bf16=True` or
            `fp16=True` of `TrainingArguments`); else weights are loaded in the precision, like a frozen backbone.
        optimizer: A name of `TrainingArguments.optim` in `OPTIMIZERS`.
        attention: Fused kernels of `scaled_dot_product_attention`, or scores in memory.
        recompute: Whether layers are recomputed in the backward pass (`gradient_checkpointing`).
        adapter: `peft_type` and the fields of peft's config class; None trains every parameter.
        accumulate: Whether gradients of several micro-batches are accumulated before the optimizer's step.
        clip: Largest norm of the gradient; None does not clip.
    """

    device: str = "A100"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    master_weights: bool = True
    optimizer: str = DEFAULT
    attention: Literal["flash", "eager"] = "flash"
    recompute: bool = False
    adapter: Mapping[str, Any] | None = None
    accumulate: bool = False
    clip: float | None = 1.0

    def case(self, config: Mapping[str, Any], tensors: ModelTensors, length: int, batch: int = 1) -> Case:
        """The case to trace.

        Args:
            config: Contents of `config.json`.
            tensors: The model's sizes.
            length: Tokens of a sequence.
            batch: Sequences of a micro-batch.

        Raises:
            UserError: The GPU is unknown or lacks the precision, or the optimizer cannot be traced.
        """
        found, dtype = checked_gpu(self.device, self.precision).gpu, _DTYPES[self.precision]
        if not OPTIMIZERS[self.optimizer].traced:
            raise UserError(
                f"--optimizer {self.optimizer}: its kernels are bitsandbytes' own, and not traced: use --method ours, "
                f"or one of {', '.join(name for name, one in OPTIMIZERS.items() if one.traced)}"
            )
        mixed = self.master_weights and self.adapter is None and self.precision != "fp32"
        return Case(
            {**config, **tensors.per_layer},
            tensors.layers,
            batch,
            length,
            self.adapter,
            weights="float32" if mixed else dtype,
            autocast=dtype if mixed else None,
            attention="sdpa" if self.attention == "flash" else "eager",
            recompute=self.recompute,
            optimizer=self.optimizer,
            clip=self.clip,
            accumulate=self.accumulate,
            kinds=tensors.layer_kinds,
            gpu=found,
        )

    def describe(self) -> str:
        """The options in words."""
        kind = str(self.adapter["peft_type"]) if self.adapter else "every parameter"
        weights = (
            f"fp32 weights, {self.precision} autocast"
            if self.master_weights and self.adapter is None and self.precision != "fp32"
            else f"{self.precision} weights"
        )
        more = [
            "layers recomputed" if self.recompute else "",
            f"{self.attention} attention" if self.attention != "flash" else "",
        ]
        return ", ".join(filter(None, (kind, weights, self.optimizer, *more, self.device)))


def of_task(file: Path, options: Options) -> tuple[Options, int, int]:
    """Read how the one task of a file is trained.

    Args:
        file: tasks.yaml; no data is read.
        options: Options that the file does not contain.

    Returns:
        The options, sequences of a micro-batch, and tokens of a sequence.

    Raises:
        UserError: The file is invalid, has several tasks, or one that peft does not support.
    """
    from megatron_mux.tasks import load_task_file  # imports torch

    specs = load_task_file(file, data_later=True)
    if len(specs) > 1:
        names = ", ".join(spec.name for spec in specs[:3]) + (", ..." if len(specs) > 3 else "")
        raise UserError(
            f"--tasks {file}: --method trace follows one task, as transformers and peft train it, and there are "
            f"{len(specs)} ({names}): use --method ours, which is for tasks that train together, or a file of one"
        )
    spec = specs[0]
    training = spec.training
    if not spec.adapter.in_peft:
        kind = spec.adapter.peft_type
        raise UserError(f"--tasks {file}: task {spec.name!r}: peft has no {kind} to trace: use --method ours")
    adapter = spec.adapter.model_dump(exclude_none=True, exclude={"adapter_name_or_path"})
    chosen = replace(
        options,
        adapter=adapter,
        optimizer=training.optim,
        accumulate=training.gradient_accumulation_steps > 1,
        clip=training.max_grad_norm or None,
    )
    return chosen, training.per_device_train_batch_size, spec.data.max_length
