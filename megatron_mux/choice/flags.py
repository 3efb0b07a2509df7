"""The command line that runs a method: with this engine, else with Megatron-LM or transformers, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_mux.backbone.registry import FAMILIES, WITH_EXPERTS
from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.recipe import Precision, Recipe
from megatron_mux.quantised.scheme import Quantisation

TRAINER = "TrainingArguments"


class Command(NamedTuple):
    """The command line of a method.

    Attributes:
        elsewhere: Why this engine cannot run the method; None if it can.
        remarks: Warnings for runs with another program.
    """

    flags: Sequence[str]
    program: str
    elsewhere: str | None = None
    remarks: Sequence[str] = ()


def command(
    method: ParallelConfig,
    recipe: Recipe,
    model_type: str,
    batch: int,
    quantisation: Quantisation | None = None,
) -> Command:
    """The command that runs a method."""
    elsewhere = not_by_this_engine(method, recipe, model_type)
    if not elsewhere:
        quantised = quantisation.flags if quantisation is not None else []
        return Command([*flags(method, recipe), *quantised], "pretrain_mux.py")
    if recipe.frozen or recipe.keeps.megatron:
        return Command(megatron_flags(method, recipe, batch), "Megatron-LM", elsewhere, remarks(recipe))
    return Command(trainer_flags(method, recipe, batch), TRAINER, elsewhere, remarks(recipe))


def not_by_this_engine(method: ParallelConfig, recipe: Recipe, model_type: str) -> str | None:
    """Why `pretrain_mux.py` cannot run it; None if it can."""
    if not recipe.frozen:
        return "full fine-tuning: here the backbone is frozen"
    if model_type not in FAMILIES:
        return f"model_type {model_type!r} is none of its families"
    if method.expert > 1 and model_type not in WITH_EXPERTS:
        return "no expert parallelism"
    if method.tensor > 1 and any(op.op in EXPERT_OPS for task in recipe.adapters for op in task.ops):
        return "adapters on routed experts: tensor ranks divide no expert that has one"
    if method.zero in (1, 2):
        return f"ZeRO-{method.zero}: the optimizer of adapters is not divided"
    if recipe.precision == "fp16":
        return "fp16: the backbone is in bf16 or fp32"
    if recipe.attention == "eager":
        return "its attention keeps no scores"
    return None


def flags(method: ParallelConfig, recipe: Recipe) -> list[str]:
    """Flags of `pretrain_mux.py`; data parallelism follows from the number of processes."""
    words = _degrees(method)
    if method.expert > 1:
        words += ["--expert-model-parallel-size", str(method.expert)]
    if method.pipeline > 1:
        # As predicted: the fewest in flight, layers evenly divided.
        words += ["--mux-schedule", "1f1b", "--mux-layer-split", "even"]
    words.append("--bf16" if recipe.precision == "bf16" else "--mux-fp32")
    if method.recompute != "none":
        words += ["--recompute-granularity", method.recompute]
    if method.residence != "resident":
        words += ["--mux-backbone-weights", method.residence]
    # All tasks in each micro-batch, and as many of these as were predicted.
    return [*words, "--mux-policy", "spatial", "--mux-micro-batches", str(method.micro_batches)]


def remarks(recipe: Recipe) -> list[str]:
    """Warnings for runs with another program: settings without a flag, memory that differs from the prediction."""
    if recipe.frozen:
        return []
    if recipe.keeps.megatron is None:
        dtype = "float32" if recipe.master or recipe.size == 4 else _DTYPES[recipe.precision]
        attention = ", attn_implementation='eager'" if recipe.attention == "eager" else ""
        return [
            f"Megatron-LM has no {recipe.optimizer}: these are flags of transformers' TrainingArguments",
            f"for its Trainer, load the model by from_pretrained with dtype={dtype!r}{attention}",
        ]
    notes = ["what is predicted has transformers' operators: Megatron-LM's own keep and take something else"]
    if recipe.size < 4 and not recipe.master:
        notes.append("Megatron-LM has fp32 copies all the same: --no-master-weights is of transformers alone")
    return notes


def megatron_flags(method: ParallelConfig, recipe: Recipe, batch: int) -> list[str]:
    """Flags of Megatron-LM's training scripts, for a method that this engine cannot run.

    Args:
        batch: Sequences of a micro-batch.
    """
    words = _degrees(method)
    together = batch * method.data * method.micro_batches
    words += ["--micro-batch-size", str(batch), "--global-batch-size", str(together)]
    words += ["--seq-length", str(recipe.length)]
    if recipe.keeps.megatron == "sgd":
        words += ["--optimizer", "sgd", "--sgd-momentum", "0"]
    if recipe.attention == "eager":
        words += ["--attention-backend", "unfused"]
    if method.expert > 1:
        words += ["--expert-model-parallel-size", str(method.expert)]
    if recipe.precision != "fp32":
        words.append(f"--{recipe.precision}")
    if method.zero == 1 or (method.offload and not method.zero):
        words.append("--use-distributed-optimizer")  # of one rank too: an optimizer in host memory wants it
    elif method.zero:
        strategy = "optim_grads" if method.zero == 2 else "optim_grads_params"
        words += ["--use-distributed-optimizer", "--use-megatron-fsdp"]
        words += ["--data-parallel-sharding-strategy", strategy, "--ckpt-format", "fsdp_dtensor"]
    if method.recompute == "selective":
        words += ["--recompute-granularity", "selective"]
    elif method.recompute == "full":
        words += [
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ]
    if method.offload:
        words += ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"]
    return words


def trainer_flags(method: ParallelConfig, recipe: Recipe, batch: int) -> list[str]:
    """Flags of `transformers.TrainingArguments`, for an optimizer that Megatron-LM does not have.

    Args:
        method: How the step is divided: by data parallelism, without or with FSDP.
        batch: Sequences of a micro-batch.
    """
    count = method.micro_batches
    words = ["--optim", recipe.optimizer, "--per_device_train_batch_size", str(batch)]
    words += ["--gradient_accumulation_steps", str(count)]
    if recipe.autocast:  # half-precision weights want none
        words.append(f"--{recipe.precision}")
    if method.recompute == "full":
        words.append("--gradient_checkpointing")
    if method.zero:
        words += ["--fsdp", ("full_shard" if method.zero == 3 else "shard_grad_op") + " auto_wrap"]
        if count > 1:  # else it keeps whole gradients until the last micro-batch
            words += ["--accelerator_config", json.dumps(_SUMMED_EACH_TIME)]
    return words


_DTYPES: Mapping[Precision, str] = {"bf16": "bfloat16", "fp16": "float16"}
_SUMMED_EACH_TIME = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}


def _degrees(method: ParallelConfig) -> list[str]:
    words = Mesh(method.tensor, method.pipeline).flags
    if method.sequence_parallel:
        words.append("--sequence-parallel")
    return words
