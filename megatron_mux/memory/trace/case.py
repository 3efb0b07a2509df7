"""The input of a trace: a model, how it is fine-tuned, and the kind of GPU; and a user's options for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_mux.errors import UserError
from megatron_mux.gpus import Gpu
from megatron_mux.memory.method_flags import checked_gpu
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS
from megatron_mux.memory.tensors import ModelTensors

Precision = Literal["float32", "bfloat16", "float16"]
_DTYPES: Mapping[str, Precision] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Case:
    """A step of plain `transformers` + `peft` training.

    Attributes:
        config: Contents of `config.json`, `model_type` included.
        layers: Number of layers of the traced model; overrides the config.
        adapter: `peft_type` and the fields of peft's config class; None trains every parameter.
        weights: Precision of the model's weights. Adapters are fp32, as in peft.
        autocast: Precision of computation under autocast (`bf16` and `fp16` of `TrainingArguments`); None: no autocast.
        attention: Implementation of `transformers`; models without `sdpa` use `eager`.
        recompute: Whether each layer is recomputed in the backward pass (`gradient_checkpointing`).
        padded: Whether sequences are padded, so that attention needs a mask.
        steps: Number of optimizer steps: from the second one on, optimizer states exist.
        optimizer: A name of `TrainingArguments.optim`, one of `OPTIMIZERS` that can be traced.
        clip: Largest norm of the gradient; None does not clip.
        accumulate: Whether a step is two micro-batches, the second of which finds gradients (more change nothing).
        kinds: A number for each layer of the config, equal for equal layers; () if all are equal.
    """

    config: Mapping[str, Any]
    layers: int
    batch: int
    length: int
    adapter: Mapping[str, Any] | None = None
    weights: Precision = "bfloat16"
    autocast: Precision | None = None
    attention: Literal["sdpa", "eager"] = "sdpa"
    recompute: bool = False
    padded: bool = False
    steps: int = 2
    optimizer: str = "adamw_torch"
    clip: float | None = 1.0
    accumulate: bool = False
    kinds: tuple[int, ...] = ()
    gpu: Gpu = field(default_factory=Gpu)


@dataclass(frozen=True)
class Options:
    """How a model is trained with `transformers` and `peft`, and on which GPU.

    Attributes:
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
