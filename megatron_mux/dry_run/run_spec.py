"""The input and the result of a dry run: a run of the engine, and the recording of one of its ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron_mux.expert_shape import Placement
from megatron_mux.fusion.plan import Plan
from megatron_mux.gpus import Gpu
from megatron_mux.memory.assumed_routes import Access
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.trace.case import Precision
from megatron_mux.quantised.scheme import QuantMethod

if TYPE_CHECKING:
    from megatron_mux.backbone.weight_offload import Kind

Dtype = Precision | Literal["float64"]

STEP = "step"
"""Mark of the start of a step, or of several rolling steps."""

JOINS = ""
"""Mark of a task's registration, which is no action of a step."""

Mark = tuple[int, str]
"""Number of events before something started, and its name."""


class RecordLengths(Protocol):
    """The part of `TaskDataset` used here."""

    @property
    def lengths(self) -> Any:
        """Tokens of each record."""

    @property
    def label_counts(self) -> Any:
        """Labelled tokens of each."""


@dataclass(frozen=True)
class TaskRecords:
    """A task and the lengths of its records.

    Attributes:
        task: A task of `tasks.yaml`, as `TaskSpec.plain` gives it.
        lengths: Tokens of each record.
        labels: Labelled tokens of each, at its end.
        held_out: Tokens of each record to evaluate; empty: it is not evaluated.
        held_out_labels: Labelled tokens of each of these.
    """

    task: Mapping[str, Any]
    lengths: Sequence[int]
    labels: Sequence[int]
    held_out: Sequence[int] = ()
    held_out_labels: Sequence[int] = ()

    @property
    def name(self) -> str:
        """The task's name."""
        return str(self.task["name"])


@dataclass(frozen=True)
class RunSpec:
    """Everything about a run of the engine that affects memory.

    Attributes:
        plan: How tasks share a step. Pipeline ranks divide its stages; its `data` is the number of pipelines.
        sequence_parallel: Whether tensor ranks divide rows outside attention and MLP.
        residence: Where frozen weights live between uses.
        device: `cuda` for a fake GPU; `cpu` uses CPU kernels and counts tensors in host memory.
        gpu: The GPU whose kernels are assumed.
        steps: Optimizer steps; all persistent tensors exist from the second on.
        rolling: Whether steps follow each other without a pipeline flush.
        expert_tensor: Ranks that divide the matrices of an expert.
        placement: Which expert ranks hold which experts; None: neighbouring ones share a rank.
        access: How likely rows select each expert; None: all equally.
        quantise: How the backbone's weights are quantised on load; None: as `config` says.
    """

    config: Mapping[str, Any]
    tasks: Sequence[TaskRecords]
    plan: Plan
    tensor: int = 1
    sequence_parallel: bool = False
    dtype: Dtype = "bfloat16"
    recompute: Literal["none", "full", "selective"] = "none"
    residence: Kind = "resident"
    device: Literal["cuda", "cpu"] = "cuda"
    gpu: Gpu = field(default_factory=Gpu)
    steps: int = 2
    rolling: bool = False
    expert: int = 1
    expert_tensor: int = 1
    placement: Placement | None = None
    access: Access | None = None
    quantise: QuantMethod | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a value of the backbone's dtype."""
        return {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}[self.dtype]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.plan.ranks * self.plan.data


@dataclass(frozen=True)
class Recording:
    """What a rank allocated and freed, from loading to the end of the run.

    Attributes:
        stream: From the first weight on.
        marks: What the rank was doing: `STEP`, the actions of a step, evaluations. Events before the first step belong
            to loading the backbone and registering tasks.
        communicators: Number of process groups in which this rank exchanged tensors of its device.
    """

    stream: Stream
    marks: tuple[Mark, ...]
    communicators: int = 0

    def at(self, index: int) -> str:
        """What the rank was doing at an event; empty before the first mark."""
        place = bisect_right(self.marks, index, key=lambda mark: mark[0])
        return self.marks[place - 1][1] if place else ""
