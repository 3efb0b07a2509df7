"""What the command line asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_mux.arguments.shape_flags import SHAPE_FLAGS
from megatron_mux.errors import UserError

if TYPE_CHECKING:
    import torch

    from megatron_mux.backbone.residence import Kind
    from megatron_mux.shape import BackboneShape


@dataclass(frozen=True)
class MuxArguments:
    """What the command line asks for; names are Megatron's.

    Attributes:
        backbone: Directory of the backbone.
        tensor_model_parallel_size: Ranks that share each layer.
        pipeline_model_parallel_size: Stages.
        decoder_first_pipeline_num_layers, decoder_last_pipeline_num_layers: Layers of those stages; None: by cost.
        pipeline_model_parallel_layout: Layers of every stage, in Megatron's words.
        num_virtual_stages_per_pipeline_rank: Stages of each rank; None: one.
        num_layers_per_virtual_pipeline_stage: The same, said by the layers of a stage.
        sequence_parallel: Divide the rows among tensor ranks between their regions.
        distributed_backend: What the processes must talk over; None leaves it to the device.
        distributed_timeout_minutes: How long a process waits for the others, before all of them stop.
        bf16: Run the backbone in bfloat16; else in fp32.
        recompute_granularity: What the backward pass computes again instead of keeping.
        seed: Of the run; what a task draws comes from its own seed.
        save: Directory the run leaves its results in.
        load: Directory of the run to continue.
        save_interval: A save every so many steps of a task, besides at its end.
        log_interval: A line every so many steps of a task.
        tensorboard_dir: Where TensorBoard's files go.
        mux_tasks: The task file.
        mux_policy: How tasks share a step.
        mux_layer_split: Whether stages get layers by cost or by number, where no other flag says so.
        mux_schedule: The order in which stages work; see `fusion.step`.
        mux_plan: A plan to begin with instead of making one.
        mux_align: How sequences are padded, if at all.
        mux_chunk_size: Tokens of a chunk; `auto` leaves it to the planner, None cuts nothing.
        mux_memory_limit: Bytes that a rank may use; `auto`: what its GPU has, less a margin; None: not limited.
        mux_backbone_weights: Where frozen weights live between uses.
        mux_watch: Directory whose task files join and leave while the run goes on.
        mux_data_cache: Directory of tokenised data files; None: in the user's cache.
        mux_micro_batches: Micro-batches a step is divided into; None leaves it to the plan.
        mux_keep_checkpoints: Saves to keep; None keeps all.
        mux_rolling: Steps follow each other without a flush of the pipeline.
        mux_no_progress: No live display.
        shape: Shape flags as given, to hold against the backbone.
    """

    backbone: Path
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    pipeline_model_parallel_layout: str | None
    num_virtual_stages_per_pipeline_rank: int | None
    num_layers_per_virtual_pipeline_stage: int | None
    sequence_parallel: bool
    distributed_backend: Literal["nccl", "gloo"] | None
    distributed_timeout_minutes: float
    bf16: bool
    recompute_granularity: Literal["full", "selective"] | None
    seed: int
    save: Path | None
    load: Path | None
    save_interval: int | None
    log_interval: int
    tensorboard_dir: Path | None
    mux_tasks: Path | None
    mux_policy: Literal["auto", "serial", "temporal", "spatial"]
    mux_layer_split: Literal["cost", "even"]
    mux_schedule: Literal["planned", "1f1b", "gpipe", "interleaved"]
    mux_plan: Path | None
    mux_align: Literal["dense", "max-length", "longest"]
    mux_chunk_size: int | Literal["auto"] | None
    mux_memory_limit: int | Literal["auto"] | None
    mux_backbone_weights: Kind
    mux_watch: Path | None
    mux_data_cache: Path | None
    mux_micro_batches: int | None
    mux_keep_checkpoints: int | None
    mux_rolling: bool
    mux_no_progress: bool
    shape: Mapping[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """What the backbone computes in."""
        import torch

        return torch.bfloat16 if self.bf16 else torch.float32

    def check_shape(self, shape: BackboneShape) -> None:
        """Hold the shape flags against the backbone.

        Raises:
            UserError: A flag contradicts it.
        """
        problems = []
        for name, given in self.shape.items():
            actual = SHAPE_FLAGS[name].actual(shape)
            if given != actual:
                flag = name if given is True else f"{name} {given}"
                has = "is not so" if given is True else f"has {'none' if actual is None else actual}"
                problems.append(
                    f"{flag}: contradicts --backbone {self.backbone}, which {has}: leave the flag out"
                )
        if problems:
            raise UserError(*problems)

    def check_device(self, kind: str) -> None:
        """Hold `--distributed-backend` against the kind of device, `cpu` or `cuda`.

        Raises:
            UserError: The backend does not go with it.
        """
        backend = "nccl" if kind == "cuda" else "gloo"
        if self.distributed_backend not in (None, backend):
            where = "GPUs" if kind == "cuda" else "CPUs"
            flag = f"--distributed-backend {self.distributed_backend}"
            raise UserError(f"{flag}: processes on {where} talk over {backend}: leave it out")
