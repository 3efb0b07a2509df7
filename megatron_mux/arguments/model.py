"""The parsed command line: one field per flag, with its help and its options of argparse."""

# ruff: noqa: RUF009 (a flag is a field with what argparse takes)

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_mux.arguments.expert_flags import ExpertFlags
from megatron_mux.arguments.flag import COUNT, DIRECTORY, FILE, MODEL, flag
from megatron_mux.arguments.shape_flags import SHAPE_FLAGS
from megatron_mux.arguments.values import (
    at_least,
    auto_or_none,
    flag_of,
    minutes,
    signal_name,
    size,
)
from megatron_mux.errors import UserError
from megatron_mux.fusion.schedules import PIPELINE_SCHEDULES, Schedule

if TYPE_CHECKING:
    import torch

    from megatron_mux.backbone.weight_offload import Kind
    from megatron_mux.quantised.scheme import QuantMethod
    from megatron_mux.shape import BackboneShape


@dataclass(frozen=True)
class MuxArguments(ExpertFlags):
    """The parsed command line; names are Megatron's.

    Attributes:
        shape: Shape flags as given, to check against the backbone.
        without_effect: Megatron's flags as given that have no effect here.
    """

    backbone: Path = flag(
        "backbone",
        "Hugging Face directory (config.json, safetensors files, tokenizer), org/name in the Hugging Face cache, or a "
        "Megatron checkpoint (torch_dist)",
        **MODEL,
    )
    tokenizer_model: Path | None = flag(
        "backbone", "directory of the tokenizer, or a file in it (default: the one in --backbone)", **MODEL
    )
    use_checkpoint_args: bool = flag(
        "backbone",
        "accepted, as in Megatron: the model's shape always comes from --backbone",
        False,
        action="store_true",
    )
    bf16: bool = flag(
        "backbone",
        "run the backbone in bfloat16 (default: fp32 on a CPU; on a GPU bfloat16 if the checkpoint is in bfloat16); "
        "adapters stay fp32",
        False,
        action="store_true",
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        "backbone",
        "recompute in the backward pass: whole layers, or attention only (default: nothing; on a GPU with --mux-policy "
        "auto whole layers, if some task does not fit into --mux-memory-limit otherwise)",
        choices=("full", "selective"),
    )

    tensor_model_parallel_size: int = flag("parallelism", "ranks that share each layer (1)", 1, **COUNT)
    pipeline_model_parallel_size: int = flag("parallelism", "pipeline stages (1)", 1, **COUNT)
    sequence_parallel: bool = flag(
        "parallelism",
        "shard rows (tokens) over tensor ranks outside the tensor-parallel operators",
        False,
        action="store_true",
    )
    distributed_backend: Literal["nccl", "gloo"] | None = flag(
        "parallelism", "default: nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(
        "parallelism",
        "stop all processes when one of them keeps the others waiting longer than M minutes (10)",
        10,
        type=minutes(0.1),
        metavar="M",
    )

    decoder_first_pipeline_num_layers: int | None = flag(
        "pipeline stages", "layers of the first stage (default: by cost)", **COUNT
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        "pipeline stages", "layers of the last stage (default: by cost)", **COUNT
    )
    pipeline_model_parallel_layout: str | None = flag(
        "pipeline stages",
        "layers of every stage: E embedding, t a layer, L loss, | the end of a stage, such as 'Et*9|t*7L'",
        metavar="LAYOUT",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        "pipeline stages", "stages per rank, interleaved around the pipeline (1)", **COUNT
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "pipeline stages", "the same, given as layers per stage", **COUNT
    )
    mux_layer_split: Literal["cost", "even"] = flag(
        "pipeline stages",
        "cost: equal predicted time per stage (default); even: equal number of layers per stage",
        "cost",
        choices=("cost", "even"),
    )
    mux_schedule: Schedule = flag(
        "pipeline stages",
        "planned: structured multi-bucket 1F1B (default); 1f1b: the fewest micro-batches in flight; gpipe and "
        "interleaved: flush the pipeline after each step (steps without an interleaved order are planned)",
        "planned",
        choices=tuple(PIPELINE_SCHEDULES),
    )

    save: Path | None = flag("results", "write adapters, metrics, plan and schedule to DIR", **DIRECTORY)
    load: Path | None = flag(
        "results", "continue the run saved in DIR (an empty DIR starts a new run)", **DIRECTORY
    )
    break_lock: bool = flag(
        "results",
        "take over a --save directory that another process has locked: only if that cannot be running any more",
        False,
        action="store_true",
    )
    save_interval: int | None = flag("results", "save every N steps of a task, besides at its end", **COUNT)
    exit_interval: int | None = flag(
        "results", "save and exit when the run has done a multiple of N steps", **COUNT
    )
    exit_duration_in_mins: float | None = flag(
        "results", "save and exit after M minutes", type=minutes(0.001), metavar="M"
    )
    exit_signal_handler: bool = flag(
        "results", "save and exit on SIGTERM (always so, on SIGINT too)", False, action="store_true"
    )
    exit_signal: str = flag(
        "results",
        "another signal to save and exit on, such as SIGUSR1",
        "SIGTERM",
        type=signal_name,
        metavar="NAME",
    )
    exit_on_missing_checkpoint: bool = flag(
        "results", "exit if --load DIR holds no run", False, action="store_true"
    )
    log_interval: int = flag("results", "log every N steps of a task (10)", 10, **COUNT)
    tensorboard_dir: Path | None = flag("results", "write TensorBoard files to DIR", **DIRECTORY)
    seed: int = flag(
        "results", "random seed of the run (1234); each task has its own", 1234, type=at_least(0), metavar="N"
    )

    mux_tasks: Path | None = flag("mux", "tasks.yaml: the tasks to train", **FILE)
    mux_policy: Literal["auto", "serial", "temporal", "spatial"] = flag(
        "mux",
        "auto: planned by predicted cost (default); serial: one task to its end, then the next; temporal: in each "
        "step one task after the other; spatial: all tasks in one batch",
        "auto",
        choices=("auto", "serial", "temporal", "spatial"),
    )
    mux_plan: Path | None = flag(
        "mux", "start with this plan (megatron-mux plan --output FILE makes one)", **FILE
    )
    mux_memory_limit: int | Literal["auto"] | None = flag(
        "mux",
        "memory limit per rank for the planner, such as 40GiB; auto: a GPU's memory minus a margin, no limit on a CPU "
        "(default); none: no limit",
        "auto",
        type=auto_or_none(size),
        metavar="SIZE",
    )
    mux_chunk_size: int | Literal["auto"] | None = flag(
        "mux",
        "cut packs into chunks of N tokens; none: do not cut; auto: by predicted cost (default)",
        "auto",
        type=auto_or_none(at_least(1)),
        metavar="N",
    )
    mux_interleave: Literal["off", "kahn", "halves", "auto"] = flag(
        "mux",
        "how tensor ranks hide their messages, with --mux-policy auto: off; kahn: pieces of the hybrid tasks of a "
        "bucket in turns (MuxTune's Algorithm 1); halves: each hybrid task in two halves, in turns; auto: by predicted "
        "cost (default)",
        "auto",
        choices=("off", "kahn", "halves", "auto"),
    )
    mux_communication_ctas: int | None = flag(
        "mux",
        "CTAs that a message of tensor ranks takes at most from the computation that hides it, on GPUs, 1 to 32 (8)",
        type=at_least(1, 32),
        metavar="N",
    )
    mux_align: Literal["dense", "max-length", "longest"] = flag(
        "mux",
        "dense: no padding (default); max-length: pad sequences to their task's max_length; longest: to the longest "
        "of all tasks",
        "dense",
        choices=("dense", "max-length", "longest"),
    )
    mux_backbone_weights: Kind = flag(
        "mux",
        "where weights are kept between uses. resident: on the device (default); sharded: over data-parallel ranks; "
        "offloaded: in host memory; sharded-offloaded: over data-parallel ranks, in host memory",
        "resident",
        choices=("resident", "sharded", "offloaded", "sharded-offloaded"),
    )
    mux_backbone_dtype: QuantMethod | None = flag(
        "mux",
        "hold weights of linear modules in nf4 (double quantisation), fp8 or int8, and dequantise a layer at a time "
        "(default: as the checkpoint stores them)",
        choices=("nf4", "fp8", "int8"),
    )
    mux_watch: Path | None = flag(
        "mux",
        "a task file dropped into DIR joins the run, one moved out leaves; a file named STOP ends it",
        **DIRECTORY,
    )
    mux_data_cache: Path | None = flag(
        "mux",
        "keep tokenised data files in DIR (default: $MEGATRON_MUX_CACHE or the user's cache directory)",
        **DIRECTORY,
    )
    mux_micro_batches: int | None = flag(
        "mux", "micro-batches of a bucket's step (default: planned)", **COUNT
    )
    mux_keep_checkpoints: int | None = flag(
        "mux", "saves to keep, with each task's last good checkpoint (default: all)", **COUNT
    )
    mux_save_rate: int | None = flag(
        "mux",
        "write saves at no more than SIZE a second while steps run (default: no limit)",
        type=size,
        metavar="SIZE",
    )
    mux_rolling: bool = flag(
        "mux",
        "let a task's next step begin while other tasks drain, without a flush of the pipeline (default)",
        True,
        action=argparse.BooleanOptionalAction,
    )
    mux_fp32: bool = flag(
        "mux", "run the backbone in fp32 whatever the checkpoint's dtype", False, action="store_true"
    )
    mux_tf32: bool = flag(
        "mux",
        "compute the products of an fp32 backbone in TF32, on a GPU",
        False,
        action="store_true",
    )
    mux_no_progress: bool = flag("mux", "no live display", False, action="store_true")
    shape: Mapping[str, Any] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()

    @classmethod
    def with_defaults(cls, **given: Any) -> MuxArguments:
        """The given arguments, and the default of every other one."""
        ours = [one for one in fields(cls) if "options" in one.metadata]
        return cls(**{one.name: one.metadata["options"]["default"] for one in ours} | given)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the backbone computes; before `on_device` has chosen one, that of a CPU."""
        import torch

        return torch.bfloat16 if self.bf16 else torch.float32

    @property
    def precision(self) -> str:
        """What a run computes in: `bfloat16`, `float32`, or `float32 with TF32`."""
        return str(self.dtype).removeprefix("torch.") + " with TF32" * self.mux_tf32

    def expert_sizes(self, shape: BackboneShape) -> tuple[int, int]:
        """Number of expert ranks, and of ranks that share each expert, for a backbone."""
        default = self.tensor_model_parallel_size if shape.experts is not None else 1
        return self.expert_model_parallel_size, self.expert_tensor_parallel_size or default

    def check_shape(self, shape: BackboneShape) -> None:
        """Check the shape flags against the backbone.

        Raises:
            UserError: A flag contradicts it.
        """
        problems = []
        for name, given in self.shape.items():
            actual = SHAPE_FLAGS[name].actual(shape)
            if given != actual:
                flag = name if given is True else f"{name} {given}"
                has = "" if given is True else f", which has {'none' if actual is None else actual}"
                problems.append(f"{flag}: contradicts --backbone {self.backbone}{has}: remove it")
        if problems:
            raise UserError(*problems)

    def on_device(self, kind: str, stored: str | None, has_bf16: bool) -> tuple[MuxArguments, str]:
        """Check the flags against the device, and choose the backbone's dtype.

        Args:
            kind: Of the device: `cpu` or `cuda`.
            stored: The checkpoint's dtype, by its config.json.
            has_bf16: Whether the device computes in bfloat16.

        Returns:
            The arguments with `bf16` chosen, and what a user should know of the choice; empty if nothing.

        Raises:
            UserError: The device does not support a flag.
        """
        self.check_device(kind)
        if self.bf16 and not has_bf16:
            raise UserError("--bf16: this GPU does not compute in bfloat16: use --mux-fp32")
        is_given = self.bf16 or self.mux_fp32
        bf16 = in_bf16(self.bf16 if is_given else None, stored, kind != "cpu" and has_bf16)
        if self.mux_tf32:
            check_tf32(kind, bf16)
        said = ""
        if kind == "cuda" and not is_given and not bf16:
            why = f"its config.json says {stored or 'no dtype'}" if has_bf16 else "this GPU has no bfloat16"
            faster = "--bf16 or --mux-tf32" if has_bf16 else "a GPU of compute capability 8.0 or more"
            said = f"the backbone computes in fp32, since {why}: {faster} would be faster"
        return replace(self, bf16=bf16), said

    def check_device(self, kind: str) -> None:
        """Check flags that a kind of device, `cpu` or `cuda`, does not support.

        Raises:
            UserError: The device does not support a flag.
        """
        if self.mux_tf32:
            check_tf32(kind)
        if self.mux_communication_ctas is not None and kind != "cuda":
            raise UserError("--mux-communication-ctas: bounds messages between GPUs: remove it on a CPU")
        backend = "nccl" if kind == "cuda" else "gloo"
        if self.distributed_backend not in (None, backend):
            where = "GPUs" if kind == "cuda" else "CPUs"
            flag = f"--distributed-backend {self.distributed_backend}"
            raise UserError(f"{flag}: processes on {where} communicate over {backend}: remove it")


def in_bf16(given: bool | None, stored: str | None, gpu_has_bf16: bool) -> bool:
    """Whether a backbone computes in bfloat16: as a flag says, else as its checkpoint is stored if a GPU can.

    Args:
        given: What the flags say; None: nothing.
        stored: The checkpoint's dtype, by its config.json.
        gpu_has_bf16: Whether the device is a GPU that computes in bfloat16.
    """
    return given if given is not None else gpu_has_bf16 and stored == "bfloat16"


def check_tf32(kind: str, bf16: bool = False) -> None:
    """Check `--mux-tf32` against the kind of device, `cpu` or `cuda`, and against the backbone's dtype.

    Raises:
        UserError: It has no effect there.
    """
    if kind == "cpu":
        raise UserError("--mux-tf32: a CPU has no TF32: remove it")
    if bf16:
        raise UserError("--mux-tf32: the backbone computes in bfloat16: remove it, or add --mux-fp32")


def changed_flags(arguments: MuxArguments, section: str) -> list[str]:
    """The flags of a section that do not have their default value."""
    ours = [one for one in fields(MuxArguments) if one.metadata.get("section") == section]
    return [
        flag_of(one.name)
        for one in ours
        if getattr(arguments, one.name) != one.metadata["options"]["default"]
    ]


def add_flags(parser: argparse.ArgumentParser, section: str) -> None:
    """Add the flags of a section to a parser, as a group of that title."""
    group = parser.add_argument_group(section)
    # Inherited fields come first in a dataclass, and last in `--help`.
    for one in sorted(fields(MuxArguments), key=lambda own: own.name not in MuxArguments.__annotations__):
        if one.metadata.get("section") == section:
            group.add_argument(flag_of(one.name), **one.metadata["options"])
