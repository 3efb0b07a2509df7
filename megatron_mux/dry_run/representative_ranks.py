"""Chooses the ranks of a run whose peak memory the closed forms predict to be highest.

Ranks of one stage differ in their sequences (data parallelism), in their rows where tensor ranks divide rows, in their
parts of adapters where there are more tensor ranks than heads of keys, and in their experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.backbone.columns import parts
from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.fusion.alignment import Slice, padded_lengths
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.step import Lengths, step_grid
from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.memory.forms.engine_memory import EngineMemory, Rows
from megatron_mux.memory.forms.method import Method
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

_OF_A_VALUE = 16
"""Bytes of a trained value, its gradient and its moments."""

Array = npt.NDArray[np.float64]


def representative_ranks(run: RunSpec, stages: Sequence[int] = ()) -> list[int]:
    """Choose the ranks that a dry run executes.

    These are a rank of the first stage (most micro-batches in flight), of the last (the loss) and of `stages`; in each
    stage the rank with the heaviest micro-batch.

    Args:
        run: The run.
        stages: Further pipeline ranks to include.
    """
    last = run.plan.ranks - 1
    chosen = sorted({0, last, *(stage for stage in stages if 0 <= stage <= last)})
    each = run.world // run.plan.ranks
    if each == 1:
        return chosen
    work = _Work(run)
    pipelines = [int(work.bytes[:, stage].argmax()) for stage in chosen]
    return [
        stage * each + pipeline * run.tensor + work.tensor_rank(pipeline)
        for stage, pipeline in zip(chosen, pipelines, strict=True)
    ]


class _Work:
    """The work of each pipeline in a step.

    Attributes:
        bytes: `[P, S]` bytes that last, and of the heaviest micro-batch of each pipeline, on the ranks of each stage.
    """

    def __init__(self, run: RunSpec) -> None:
        self._tensor = run.tensor if run.sequence_parallel else 1
        info = read_info(run.config, run.quantise)
        self._loads = [
            TaskLoad.of(
                TaskSpec.model_validate(one.task), np.array(one.lengths), np.array(one.labels), info.shape
            )
            for one in run.tasks
        ]
        self._labels = {one.name: one.labels for one in run.tasks}
        self._lengths = {one.name: one.lengths for one in run.tasks}
        self._names = [one.name for one in run.tasks]
        self._units = _units(run)
        self._size = _ITEMSIZE[run.dtype]
        self._adapters = _adapter_values(run, info.shape)
        plan = run.plan
        layers = stage_layers(plan.split or even_split(info.shape.layers, plan.stages))
        differ = run.placement is not None or run.access is not None
        memories = [
            EngineMemory(
                architecture_of(info.shape, run.placement, run.access),
                [load.adapter for load in self._loads],
                layers,
                _method(run),
                self._size,
                [load.tokens for load in self._loads],
                expert_rank=rank,
            )
            for rank in (range(run.expert) if differ else (None,))
        ]
        of_stages = np.stack(
            [
                self._most(memories[pipeline * run.tensor // run.expert_tensor % len(memories)], units)
                for pipeline, units in enumerate(self._units)
            ]
        )
        # A rank has every so many-th stage.
        self.bytes: Array = of_stages.reshape(plan.data, plan.virtual, plan.ranks).sum(axis=1)

    def tensor_rank(self, pipeline: int) -> int:
        """The tensor rank of a pipeline that holds most: bottlenecks act on a rank's own rows.

        Args:
            pipeline: Number of the pipeline.
        """
        sizes = [
            sum(row.width for site in load.ops for row in site.kept.rows if row.where == "rows")
            for load in self._loads
        ]
        most = np.zeros(self._tensor)
        for unit in self._units[pipeline]:
            kept = np.repeat(
                [sizes[self._names.index(one.task)] for one in unit], [one.tokens for one in unit]
            )
            parts = np.array_split(kept, self._tensor)
            most = np.maximum(most, [part.sum() for part in parts])
        return int((most * self._size + self._adapters * _OF_A_VALUE).argmax())

    def _most(self, memory: EngineMemory, units: Sequence[Sequence[Slice]]) -> Array:
        """`[S]` bytes that last, and of the heaviest micro-batch."""
        if not units:
            return memory.lasting.total
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
        found = memory.passes(Rows(rows, rows.sum(axis=1), labels, copied))
        most: Array = memory.lasting.total + (found.lasting + found.working).max(axis=0)
        return most


def _units(run: RunSpec) -> list[list[list[Slice]]]:
    """For each pipeline, the slices of every micro-batch, or of every chunk of it."""
    pad_to = padded_lengths(
        run.plan.alignment, {one.name: one.task["data"]["max_length"] for one in run.tasks}
    )
    lengths = {
        one.name: Lengths(tuple(one.lengths), tuple(one.labels), pad_to.get(one.name, 0)) for one in run.tasks
    }
    grids = [step_grid(run.plan, lengths, pipeline) for pipeline in range(run.plan.data)]
    return [[[one for chunk in chunks for one in chunk] for chunks in grid.chunks.values()] for grid in grids]


def _method(run: RunSpec) -> Method:
    return Method(
        data=run.plan.data,
        pipeline=run.plan.ranks,
        tensor=run.tensor,
        expert=run.expert,
        sequence_parallel=run.sequence_parallel,
        zero=3 if run.residence == "sharded" else 0,
        recompute=run.recompute,
        offload=run.residence == "offloaded",
    )


def _adapter_values(run: RunSpec, shape: BackboneShape) -> Array:
    """`[tensor]` trained values of linear_qkv, which more ranks than heads of keys divide unevenly; else zeros."""
    held = [parts(shape, "linear_qkv", rank, run.tensor) for rank in range(run.tensor)]
    found: Array = np.zeros(run.tensor)
    for one in run.tasks:
        adapter = TaskSpec.model_validate(one.task).adapter
        for module in adapter.modules(shape) if shape.kv_heads < run.tensor else ():
            columns = [
                own[path].features.shape[0] for own in held for path in own if module.path.endswith(path)
            ]
            if module.op != "linear_qkv":
                continue
            for tensor in adapter.module_tensors(module, shape).values():
                if tensor.trained and tensor.dim is not None:
                    found += np.array(columns) * math.prod(tensor.shape) / tensor.shape[tensor.dim]
    return found
