"""What is rehearsed: a backbone's config, the tasks and what their records are like, the plan, the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from megatron_mux.fusion.plan import Plan
from megatron_mux.gpus import Gpu
from megatron_mux.memory.trace.case import Precision

if TYPE_CHECKING:
    from megatron_mux.backbone.residence import Kind

Dtype = Precision | Literal["float64"]


class Lengths(Protocol):
    """The part of a `TaskDataset` that is needed here."""

    @property
    def lengths(self) -> Any:
        """Tokens of each record."""

    @property
    def label_counts(self) -> Any:
        """Labelled tokens of each."""


@dataclass(frozen=True)
class Cast:
    """A task and what its records are like.

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
        """The task's."""
        return str(self.task["name"])

    @classmethod
    def of(cls, spec: Any, data: Lengths) -> Cast:
        """A validated task with its data.

        Args:
            spec: The `TaskSpec`.
            data: Its data set.
        """
        return cls(spec.plain(), [int(n) for n in data.lengths], [int(n) for n in data.label_counts])


@dataclass(frozen=True)
class Setting:
    """A run of the engine, as far as it decides about memory.

    Attributes:
        config: What config.json says.
        tasks: All that train.
        plan: Which tasks share a step, and how; its stages are divided among pipeline ranks, its `data` is how many
            pipelines there are.
        tensor: Ranks that share each layer.
        sequence_parallel: Whether they divide rows between their regions.
        dtype: Of the backbone.
        recompute: What the backward pass computes again.
        residence: Where frozen weights live between uses.
        device: A GPU that is not there, or the host: then kernels are a CPU's, and tensors in host memory count.
        gpu: Which GPU.
        steps: Optimizer steps; from the second one on, all that lasts is there.
        rolling: Whether they follow each other without a flush of the pipeline.
    """

    config: Mapping[str, Any]
    tasks: Sequence[Cast]
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

    @property
    def world(self) -> int:
        """All ranks."""
        return self.tensor * self.plan.ranks * self.plan.data

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Setting:
        """Read what `to_dict` wrote.

        Raises:
            UserError: The plan is none.
        """
        changed = {
            "tasks": [Cast(**task) for task in data["tasks"]],
            "plan": Plan.from_json(data["plan"]),
            "gpu": Gpu(tuple(data["gpu"]["capability"]), data["gpu"]["prefers_cudnn"]),
        }
        return cls(**{**data, **changed})
