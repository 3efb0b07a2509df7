"""Building a stage of the model and filling it from its directory, unit by unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_mux.backbone import spec, weights
from megatron_mux.backbone.checkpoint import Checkpoint, NoWeights
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.backbone.residence import Key, Kind, Residence, unit_of
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.runtime import Parallel


@dataclass(frozen=True)
class Reading:
    """What a process tells its heartbeat while it reads a layer, or what is outside layers (None)."""

    layer: int | None

    def __str__(self) -> str:
        part = "" if self.layer is None else f"'s layer {self.layer}"
        return f"reading the backbone{part}"


def load_model(
    info: BackboneInfo,
    shape: BackboneShape,
    parallel: Parallel,
    dtype: torch.dtype,
    layers: range,
    recompute_attention: bool,
    residence: Kind,
    config_only: bool,
) -> tuple[nn.Module, Residence]:
    """Build a stage's tensor shard and fill it.

    Args:
        info: The backbone.
        shape: Its shape, `padded_vocab` as divided here.
        parallel: This process's place.
        dtype: Of the parameters.
        layers: Global indices of the stage's layers.
        recompute_attention: Compute core attention again in the backward.
        residence: Where weights live between uses.
        config_only: There is a config.json alone: parameters are made, and hold anything.

    Returns:
        Megatron's `GPTModel` and where its parameters live.

    Raises:
        UserError: A file that cannot be read.
    """
    model = spec.build(shape, parallel, dtype, layers, recompute_attention)
    shard = weights.Shard(
        layers=layers,
        first=layers.start == 0,
        last=layers.stop == shape.layers,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
    )
    tied_here = shape.tied and shard.first and shard.last
    if tied_here:
        model.output_layer.register_parameter("weight", None)
    home = Residence(residence, parallel)
    filled = weights.plan(shape, shard)
    weights.check_complete(model, filled)
    units: dict[Key, weights.Plan] = {}
    for name, pieces in filled.items():
        units.setdefault(unit_of(name, len(layers)), {})[name] = pieces
    with NoWeights() if config_only else Checkpoint(info.path) as source:
        for key, own in units.items():
            parallel.heartbeat.at(Reading(layers[key] if isinstance(key, int) else None), long=True)
            home.settle(key, weights.fill(model, own, info.stored, source, dtype, parallel.device))
    if tied_here:
        model.output_layer.register_parameter("weight", model.embedding.word_embeddings.weight)
        home.tie("head", "embedding")
    return model, home
