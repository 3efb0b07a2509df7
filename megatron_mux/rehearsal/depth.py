"""A deep stage from rehearsals with two and with three layers to a stage: its layers insert the same events each."""

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
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.memory.stream.events import Moment, Stream, StreamError
from megatron_mux.memory.stream.extension import extended
from megatron_mux.memory.trace.depth import renamed
from megatron_mux.memory.trace.model import configuration
from megatron_mux.rehearsal.recording import Recording
from megatron_mux.rehearsal.setting import Cast, Setting
from megatron_mux.tasks import TaskSpec

LAYERS = (2, 3)
"""Of each stage, in the two rehearsals."""


def shallow(setting: Setting) -> list[Setting]:
    """The same with fewer layers, as `LAYERS` says; nothing if it takes all of them to tell.

    That is so where layers differ (in their windows, in the adapters on them) or share a tensor that grows with them
    (a prefix), where stages are hardly deeper, where a rank has several of them, or where weights come and go. (And
    where the first layer to be trained is unlike the others, since its attention is not: then `deepened` refuses.)
    """
    info = read_info(setting.config)
    if setting.residence != "resident":
        return []
    if setting.device == "cpu" or setting.plan.virtual > 1 or min(_split(setting, info)) <= LAYERS[-1] + 1:
        return []
    if len(set(info.shape.windows)) > 1 or not all(_is_everywhere(one, info) for one in setting.tasks):
        return []
    found = []
    for layers in LAYERS:
        config = configuration(setting.config, layers * setting.plan.stages)
        plan = replace(setting.plan, split=(layers,) * setting.plan.stages)
        found.append(replace(setting, config=json.loads(config.to_json_string(use_diff=False)), plan=plan))
    return found


def deepened(setting: Setting, rank: int, two: Recording, three: Recording) -> Recording:
    """A rank's recording from those of `shallow`.

    Raises:
        StreamError: They do not line up.
    """
    stage = rank // (setting.world // setting.plan.ranks)
    layers = stage_layers(_split(setting, read_info(setting.config)))[stage]
    small, large = (
        _moved(one.stream, -stage * count) for one, count in zip((two, three), LAYERS, strict=True)
    )
    stream = _moved(extended(small, large, len(layers)), layers.start)
    if [what for _, what in two.marks] != [what for _, what in three.marks]:
        raise StreamError("two layers and three are not stepped alike")
    # Each layer inserts as many events before any action as the third one does.
    marks = tuple(
        (b + (b - a) * (len(layers) - 3), what)
        for (a, what), (b, _) in zip(two.marks, three.marks, strict=True)
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


def _split(setting: Setting, info: BackboneInfo) -> tuple[int, ...]:
    return setting.plan.split or even_split(info.shape.layers, setting.plan.stages)


def _is_everywhere(one: Cast, info: BackboneInfo) -> bool:
    """Whether a task's adapter acts alike on all layers, with tensors of their own."""
    lengths = np.array(one.lengths, np.int32)
    load = TaskLoad.of(TaskSpec.model_validate(one.task), lengths, np.array(one.labels, np.int32), info)
    sites = defaultdict(set)
    for site in load.sites:
        sites[site.layer].add((site.op, site.kind, site.size))
    if load.virtual_tokens:
        return False
    return len(sites) == info.shape.layers and len(set(map(frozenset, sites.values()))) == 1


def _moved(stream: Stream, by: int) -> Stream:
    """A stream whose layers have other numbers."""

    def move(moment: Moment) -> Moment:
        return moment if moment.layer is None else moment._replace(layer=moment.layer + by)

    return renamed(stream, move)
