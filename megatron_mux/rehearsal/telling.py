"""Which ranks of a run to rehearse: those that need most, as far as closed forms tell.

Ranks of a stage have other sequences (of other pipelines) and, where tensor ranks divide rows, other rows of the same
ones. Closed forms price what each of them has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.fusion.alignment import Slice, padded_lengths
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.stage_memory import Rows, StageMemory
from megatron_mux.fusion.step import Lengths, step_grid
from megatron_mux.memory.forms.backbones import architecture_of
from megatron_mux.memory.forms.methods import Method
from megatron_mux.rehearsal.depth import read_info
from megatron_mux.rehearsal.setting import Setting
from megatron_mux.tasks import TaskSpec

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

Array = npt.NDArray[np.float64]


def telling_ranks(setting: Setting, stages: Sequence[int] = ()) -> list[int]:
    """The ranks to rehearse: of the first stage, which has most micro-batches in flight, of the last, which has the
    loss, and of others that are thought to need much; of each the rank whose micro-batch takes most.

    Args:
        setting: The run.
        stages: Others.
    """
    last = setting.plan.ranks - 1
    chosen = sorted({0, last, *(stage for stage in stages if 0 <= stage <= last)})
    each = setting.world // setting.plan.ranks
    if each == 1:
        return chosen
    work = _Work(setting)
    pipelines = [int(work.bytes[:, stage].argmax()) for stage in chosen]
    return [
        stage * each + pipeline * setting.tensor + work.tensor_rank(pipeline)
        for stage, pipeline in zip(chosen, pipelines, strict=True)
    ]


class _Work:
    """What each pipeline computes in a step.

    Attributes:
        bytes: `[P, S]` that the heaviest micro-batch of each pipeline keeps and takes on the ranks of each stage.
    """

    def __init__(self, setting: Setting) -> None:
        self._tensor = setting.tensor if setting.sequence_parallel else 1
        info = read_info(setting.config)
        self._loads = [
            TaskLoad.of(TaskSpec.model_validate(one.task), np.array(one.lengths), np.array(one.labels), info)
            for one in setting.tasks
        ]
        self._labels = {one.name: one.labels for one in setting.tasks}
        self._lengths = {one.name: one.lengths for one in setting.tasks}
        self._names = [one.name for one in setting.tasks]
        self._units = _units(setting)
        plan = setting.plan
        layers = stage_layers(plan.split or even_split(info.shape.layers, plan.stages))
        memory = StageMemory(
            architecture_of(info.shape),
            self._loads,
            layers,
            _method(setting),
            _ITEMSIZE[setting.dtype],
            "cuda",
        )
        of_stages = np.stack([self._most(memory, units) for units in self._units])
        # A rank has every so many-th stage.
        self.bytes: Array = of_stages.reshape(plan.data, plan.virtual, plan.ranks).sum(axis=1)

    def tensor_rank(self, pipeline: int) -> int:
        """The tensor rank of a pipeline whose rows keep most: of all adapters, bottlenecks alone act on a rank's rows.

        Args:
            pipeline: Which.
        """
        sizes = [sum(site.size for site in load.sites if site.kind == "BOTTLENECK") for load in self._loads]
        most = np.zeros(self._tensor)
        for unit in self._units[pipeline]:
            kept = np.repeat(
                [sizes[self._names.index(one.task)] for one in unit], [one.tokens for one in unit]
            )
            parts = np.array_split(kept, self._tensor)
            most = np.maximum(most, [part.sum() for part in parts])
        return int(most.argmax())

    def _most(self, memory: StageMemory, units: Sequence[Sequence[Slice]]) -> Array:
        """`[S]` bytes of the heaviest of these micro-batches."""
        if not units:
            return np.zeros(len(memory.stages))
        rows = np.zeros((len(units), len(self._names)))
        labels, copied = np.zeros(len(units)), np.zeros(len(units))
        for i, unit in enumerate(units):
            for one in unit:
                task = self._names.index(one.task)
                whole = self._lengths[one.task][one.sequence]
                first = whole - self._labels[one.task][one.sequence]
                rows[i, task] += one.tokens
                labels[i] += max(0, min(one.stop, whole) - max(one.start, first))
                copied[i] += self._loads[task].virtual_tokens + one.start
        found = memory.of(Rows(rows, rows.sum(axis=1), labels, copied))
        most: Array = (found.kept + found.working).max(axis=0)
        return most


def _units(setting: Setting) -> list[list[list[Slice]]]:
    """Of each pipeline the slices of every micro-batch, or of every chunk of one."""
    pad_to = padded_lengths(
        setting.plan.alignment, {one.name: one.task["data"]["max_length"] for one in setting.tasks}
    )
    lengths = {
        one.name: Lengths(tuple(one.lengths), tuple(one.labels), pad_to.get(one.name, 0))
        for one in setting.tasks
    }
    grids = [step_grid(setting.plan, lengths, pipeline) for pipeline in range(setting.plan.data)]
    return [[[one for chunk in chunks for one in chunk] for chunks in grid.chunks.values()] for grid in grids]


def _method(setting: Setting) -> Method:
    return Method(
        data=setting.plan.data,
        tensor=setting.tensor,
        sequence_parallel=setting.sequence_parallel,
        zero=3 if setting.residence == "sharded" else 0,
        recompute=setting.recompute,
        offload=setting.residence == "offloaded",
    )
