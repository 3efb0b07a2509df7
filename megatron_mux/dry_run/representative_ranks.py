"""Chooses the ranks of a run that may have the highest peak memory.

Ranks of one stage differ in their sequences (data parallelism), in their rows where tensor ranks divide rows, in their
parts of adapters where there are more tensor ranks than heads of keys, and in their experts. What these weigh is not
known before a dry run, so one rank for each is chosen that has most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from megatron_mux.backbone.columns import parts
from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.expert_shape import Placement
from megatron_mux.footprint.content import Contents
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.alignment import Slice, padded_lengths
from megatron_mux.fusion.contents import contents_of
from megatron_mux.fusion.step import Lengths, step_chunks
from megatron_mux.tasks import TaskSpec

Array = npt.NDArray[np.float64]


def representative_ranks(run: RunSpec, stages: Sequence[int] = ()) -> list[int]:
    """Choose the ranks that a dry run executes.

    These are ranks of the first stage (most micro-batches in flight), of the last (the loss) and of `stages`; in each
    stage those with the micro-batch that has most tokens, most of one kind of task or, on the last one, most labels,
    and those with most experts.
    """
    last = run.plan.ranks - 1
    chosen = sorted({0, last, *(stage for stage in stages if 0 <= stage <= last)})
    each = run.world // run.plan.ranks
    if each == 1:
        return chosen
    work = _Work(run)
    return [
        stage * each + pipeline * run.tensor + tensor
        for stage in chosen
        for pipeline in _with_most([*work.of_pipelines(stage == last), *work.of_experts(stage)])
        for tensor in _with_most(work.of_tensor_ranks(pipeline))
    ]


def _with_most(features: Sequence[Array]) -> list[int]:
    """A few of N that have most of each feature, `[N]`; ascending."""
    has_most = np.stack([own >= own.max() for own in features])
    chosen = []
    while len(has_most):
        chosen.append(int(has_most.sum(axis=0).argmax()))
        has_most = has_most[~has_most[:, chosen[-1]]]
    return sorted(chosen)


class _Work:
    """What ranks have to do and to hold in a step."""

    def __init__(self, run: RunSpec) -> None:
        self._run = run
        self._shape = read_info(run.config, run.quantise).shape
        specs = [TaskSpec.model_validate(one.task) for one in run.tasks]
        self._adapters = [spec.adapter for spec in specs]
        kinds = [Signature.of(spec.plain()) for spec in specs]
        distinct = list(dict.fromkeys(kinds))
        self._kinds = len(distinct)
        self._columns = {one.name: distinct.index(kind) for one, kind in zip(run.tasks, kinds, strict=True)}
        pad_to = padded_lengths(
            run.plan.alignment, {one.name: one.task["data"]["max_length"] for one in run.tasks}
        )
        self._lengths = {
            one.name: Lengths(
                tuple(one.lengths),
                tuple(one.labels),
                pad_to.get(one.name, 0),
                spec.training.sequences_per_record,
            )
            for one, spec in zip(run.tasks, specs, strict=True)
        }

    @cached_property
    def _micro_batches(self) -> list[list[list[Slice]]]:
        """For each pipeline, the slices of every micro-batch, or of every chunk of it."""
        plan = self._run.plan
        steps = [step_chunks(plan, self._lengths, pipeline) for pipeline in range(plan.data)]
        return [[[*chain(*chunks)] for chunks in step.chunks.values()] for step in steps]

    def of_pipelines(self, last: bool) -> list[Array]:
        """`[P]` each: the most that a micro-batch has of rows, of one kind's rows, and of rows copied for it; on the
        last stage of labels, too.
        """
        each = self._contents
        rows = np.array([one.rows.max(axis=0, initial=0.0) for one in each])
        total = [one.rows.sum(axis=1).max(initial=0.0) for one in each]
        copied = [one.copied.max(initial=0.0) for one in each]
        labels = [one.labels.sum(axis=1).max(initial=0.0) for one in each]
        return [np.array(total), *rows.T, np.array(copied), *([np.array(labels)] if last else [])]

    def of_experts(self, stage: int) -> list[Array]:
        """`[P]` each: the experts of a stage that a pipeline's ranks hold, and how often rows select these; nothing
        where all hold as many, selected as often.
        """
        run, experts = self._run, self._shape.experts
        if experts is None or (run.placement is None and run.access is None):
            return []
        plan = run.plan
        split = stage_layers(plan.split or even_split(self._shape.layers, plan.stages))
        own = {layer for part in split[stage :: plan.ranks] for layer in part}
        layers = [layer for layer in experts.layers(self._shape.layers) if layer in own]
        placement = run.placement or Placement.contiguous(experts.count, run.expert, layers)
        held, selected = (np.zeros(run.expert) for _ in range(2))
        for layer in layers:
            access = run.access[layer] if run.access is not None else (1.0,) * experts.count
            for ranks, share in zip(placement.ranks[layer], access, strict=True):
                held[list(ranks)] += 1
                selected[list(ranks)] += share / len(ranks)
        of_pipeline = np.arange(plan.data) * run.tensor // run.expert_tensor % run.expert
        return [held[of_pipeline], selected[of_pipeline]]

    def of_tensor_ranks(self, pipeline: int) -> list[Array]:
        """`[tensor]` each: columns of an adapted module that more ranks than heads of keys divide unevenly; the most
        rows of one kind in a rank's part of a micro-batch, where they divide rows.
        """
        run, shape = self._run, self._shape
        columns = []
        if shape.kv_heads < run.tensor:
            held = [parts(shape, "linear_qkv", rank, run.tensor) for rank in range(run.tensor)]
            adapted = {module.path for adapter in self._adapters for module in adapter.modules(shape)}
            columns = [
                np.array([float(len(own[path].features)) for own in held])
                for path in held[0]
                if any(one.endswith(path) for one in adapted)
            ]
        most = np.zeros((self._kinds, run.tensor))
        for micro_batch in self._micro_batches[pipeline] if run.sequence_parallel else ():
            kinds = np.repeat(
                [self._columns[one.task] for one in micro_batch], [one.tokens for one in micro_batch]
            )
            for rank, own in enumerate(np.array_split(kinds, run.tensor)):
                most[:, rank] = np.maximum(most[:, rank], np.bincount(own, minlength=self._kinds))
        return [*columns, *most]

    @cached_property
    def _contents(self) -> list[Contents]:
        """What every micro-batch of each pipeline, or every chunk of it, contains."""
        return [
            contents_of(micro_batches, self._lengths, self._columns, self._kinds, self._run.device)
            for micro_batches in self._micro_batches
        ]
