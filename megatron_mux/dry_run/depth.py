"""Extends dry runs with few layers for each stage to deep stages, whose middle layers all insert the same events."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_mux.backbone.registry import BackboneInfo, info_without_weights
from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.dry_run.run_spec import Recording, RunSpec, TaskRecords
from megatron_mux.memory.stream.events import StreamError
from megatron_mux.memory.stream.extension import Grouping, extended
from megatron_mux.memory.trace.model import configuration
from megatron_mux.quantised.scheme import QuantMethod
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec

_RESIDENT = Grouping(first=2)
"""If the first layer's attention needs no gradient, tensors that all layers share are freed in the second layer's
backward pass, not in the first one's."""
_FETCHED = Grouping(first=2, further=1)
"""The last layer's weights, including the final norm, are fetched while the layer before it computes."""


def shallow(run: RunSpec) -> list[RunSpec]:
    """The same run with two and with three groups of layers for each stage; empty if these do not represent it.

    That is so if layers differ (in their windows or adapters, in where experts are and how often they are selected, or
    only some have experts), if an adapter is one tensor for all layers (a prefix) or processes all layers between steps
    (diff pruning), if stages are hardly deeper, if a rank has several stages, if hybrid tasks are computed in turns,
    and on a CPU.
    """
    info = read_info(run.config, run.quantise)
    grouping = _grouping(run)
    if run.device == "cpu" or run.plan.virtual > 1 or any(bucket.launch for bucket in run.plan.buckets):
        return []
    if min(_split(run, info)) <= grouping.layers(3) + 1:
        return []
    if not info.shape.layers_are_alike or run.placement or run.access:
        return []
    if not all(_is_everywhere(one, info.shape) for one in run.tasks):
        return []
    return [_cut(run, grouping.layers(groups)) for groups in (2, 3)]


def deepened(run: RunSpec, rank: int, two: Recording, three: Recording) -> Recording:
    """Extend the recordings of a rank in the runs of `shallow`.

    Raises:
        StreamError: They do not line up.
    """
    stage = rank // (run.world // run.plan.ranks)
    layers = stage_layers(_split(run, read_info(run.config, run.quantise)))[stage]
    grouping = _grouping(run)
    begins = stage * grouping.layers(2), stage * grouping.layers(3), layers.start
    stream = extended(two.stream, three.stream, len(layers), grouping, begins)
    if [what for _, what in two.marks] != [what for _, what in three.marks]:
        raise StreamError("the actions of few layers and of one more are not the same")
    # Each further layer inserts as many events before an action as that one does.
    further = len(layers) - grouping.layers(3)
    marks = tuple(
        (many + (many - few) * further, what)
        for (few, what), (many, _) in zip(two.marks, three.marks, strict=True)
    )
    return Recording(stream, marks, three.communicators)


def read_info(config: Mapping[str, Any], quantise: QuantMethod | None = None) -> BackboneInfo:
    """A backbone's shape and names, from the contents of its config.json.

    Args:
        quantise: How weights are quantised on load; None: as the config says.

    Raises:
        UserError: The engine does not support it.
    """
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return info_without_weights(directory, quantise)


def _grouping(run: RunSpec) -> Grouping:
    return _RESIDENT if run.residence == "resident" else _FETCHED


def _cut(run: RunSpec, layers: int) -> RunSpec:
    """The run with so many layers for each stage."""
    config = configuration(run.config, layers * run.plan.stages)
    plan = replace(run.plan, split=(layers,) * run.plan.stages)
    return replace(run, config=json.loads(config.to_json_string(use_diff=False)), plan=plan)


def _split(run: RunSpec, info: BackboneInfo) -> tuple[int, ...]:
    return run.plan.split or even_split(info.shape.layers, run.plan.stages)


def _is_everywhere(one: TaskRecords, shape: BackboneShape) -> bool:
    """Whether a task's adapter treats all layers alike and independently."""
    adapter = TaskSpec.model_validate(one.task).adapter
    if adapter.virtual_tokens or adapter.acts_in_steps or adapter.own_rows(shape):
        return False
    return adapter.is_alike(shape, range(shape.layers))
