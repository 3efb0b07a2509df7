"""The input of a trace: a model, how it is fine-tuned, and the kind of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_mux.gpus import Gpu

Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Case:
    """A step of plain `transformers` + `peft` training.

    Attributes:
        config: Contents of `config.json`, `model_type` included.
        layers: Number of layers of the traced model; overrides the config.
        batch: Number of sequences.
        length: Tokens of each.
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
        gpu: The GPU.
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
