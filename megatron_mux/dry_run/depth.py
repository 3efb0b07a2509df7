"""A deep stage from dry runs with few layers to a stage: those between the ends insert the same events each."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mux.backbone.registry import BackboneInfo, info_without_weights
from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.dry_run.run_spec import Recording, RunSpec, TaskRecords
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.memory.stream.events import StreamError
from megatron_mux.memory.stream.extension import Grouping, extended
from megatron_mux.memory.trace.model import configuration
from megatron_mux.tasks import TaskSpec

_RESIDENT = Grouping(first=2)
"""Where the first layer's attention needs no gradient, what all layers share is dropped in the second one's backward
pass, not in the first one's."""
_COMING_AND_GOING = Grouping(first=2, further=1)
"""The last layer's weights, the final norm among them, are brought while the one before it computes."""


def shallow(run: RunSpec) -> list[RunSpec]:
    """The same with fewer layers, for two groups of layers to a stage and for three; nothing if it takes all to tell.

    That is so where layers differ (in their windows, in the adapters on them); where an adapter is one tensor for all
    layers (a prefix, whose gradient has the size of all of them wherever it comes about) or works on all layers between
    steps (diff pruning); where stages are hardly deeper; where a rank has several of them; and on a CPU.
    """
    info = read_info(run.config)
    grouping = _grouping(run)
    if run.device == "cpu" or run.plan.virtual > 1:
        return []
    if min(_split(run, info)) <= grouping.layers(3) + 1:
        return []
    if len(set(info.shape.windows)) > 1 or not all(_is_everywhere(one, info) for one in run.tasks):
        return []
    return [_cut(run, grouping.layers(groups)) for groups in (2, 3)]


def deepened(run: RunSpec, rank: int, two: Recording, three: Recording) -> Recording:
    """A rank's recording from those of `shallow`.

    Raises:
        StreamError: They do not line up.
    """
    stage = rank // (run.world // run.plan.ranks)
    layers = stage_layers(_split(run, read_info(run.config)))[stage]
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


def read_info(config: Mapping[str, Any]) -> BackboneInfo:
    """A backbone's shape and names, from what its config.json says.

    Raises:
        UserError: It is none that this engine knows.
    """
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return info_without_weights(directory)


def _grouping(run: RunSpec) -> Grouping:
    return _RESIDENT if run.residence == "resident" else _COMING_AND_GOING


def _cut(run: RunSpec, layers: int) -> RunSpec:
    """With so many layers to a stage."""
    config = configuration(run.config, layers * run.plan.stages)
    plan = replace(run.plan, split=(layers,) * run.plan.stages)
    return replace(run, config=json.loads(config.to_json_string(use_diff=False)), plan=plan)


def _split(run: RunSpec, info: BackboneInfo) -> tuple[int, ...]:
    return run.plan.split or even_split(info.shape.layers, run.plan.stages)


def _is_everywhere(one: TaskRecords, info: BackboneInfo) -> bool:
    """Whether a task's adapter acts alike on all layers, each by itself."""
    spec = TaskSpec.model_validate(one.task)
    load = TaskLoad.of(spec, np.array(one.lengths, np.int32), np.array(one.labels, np.int32), info.shape)
    sites = defaultdict(set)
    for site in load.ops:
        sites[site.layer].add((site.op, site.curve))
    if load.virtual_tokens or spec.adapter.acts_after_steps:
        return False
    return len(sites) == info.shape.layers and len(set(map(frozenset, sites.values()))) == 1
