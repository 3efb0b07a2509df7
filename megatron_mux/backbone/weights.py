"""Filling a rank's parameters from the checkpoint, by a plan of which part of which stored tensor goes where.

The plan consists of names and ranges. Filling reads exactly what the plan says, group by group, a MiB at a time: a rank
never holds more than its own shard and one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mux.backbone import columns, resolve
from megatron_mux.backbone.checkpoint import Checkpoint, NoWeights
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.quantised_source import QuantisedSource
from megatron_mux.backbone.weight_group import WeightGroup
from megatron_mux.backbone.weight_offload import Key, WeightOffload, weight_group_of
from megatron_mux.base_ops import EXPERT_OPS, BaseOpName
from megatron_mux.expert_shape import Placement
from megatron_mux.quantised.matrix import QuantisedMatrix
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """The part of each matrix that a rank holds.

    Attributes:
        rank, size: This tensor rank, and how many there are.
        expert_rank: This expert rank.
        expert_tensor_rank, expert_tensor_size: This rank among those that divide an expert, and how many there are.
        placement: Which expert ranks hold which experts; None without experts.
        experts_only: Whether it holds routed experts and nothing else.
        ends: Whether the first stage holds the embedding, and the last one the final norm and the output layer.
    """

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1
    placement: Placement | None = None
    experts_only: bool = False
    ends: bool = True

    @classmethod
    def of(cls, parallel: Parallel, placement: Placement | None) -> Part:
        """The part of a process."""
        ranks = parallel.experts
        return cls(
            parallel.tp_rank,
            parallel.tp_size,
            ranks.rank,
            ranks.tensor_rank,
            ranks.tensor_size,
            placement,
            not ranks.holds_rows,
        )

    def ops(self, shape: BackboneShape, layer: int) -> tuple[BaseOpName, ...]:
        """The BaseOps of a layer that the rank has a part of."""
        found = shape.ops(layer)
        return tuple(op for op in found if op in EXPERT_OPS) if self.experts_only else found

    def held(self, layer: int) -> tuple[int, ...]:
        """The experts of a layer that the rank holds."""
        return () if self.placement is None else self.placement.held(layer, self.expert_rank)

    def of_op(self, op: BaseOpName) -> tuple[int, int]:
        """The tensor rank, and how many there are, that a BaseOp is divided by."""
        if op in EXPERT_OPS:
            return self.expert_tensor_rank, self.expert_tensor_size
        return self.rank, self.size


@dataclass(frozen=True)
class Piece:
    """A run of a parameter's rows and its source.

    Attributes:
        row: First row of the parameter.
        source: Full Hugging Face name.
        start: First output feature there.
        length: Number of rows.
        inputs: Range of input features; None for vectors.
        transposed: Stored `[in, out]`.
        offset: What is added to the stored values.
        wide: Kept in fp32 at least.
    """

    row: int
    source: str
    start: int
    length: int
    inputs: range | None = None
    transposed: bool = False
    offset: float = 0.0
    wide: bool = False


Plan = dict[str, list[Piece]]
Quantised = tuple[nn.Parameter, QuantisedMatrix]
"""A parameter whose values are there during use only, and what they are dequantised from."""


def plan(shape: BackboneShape, layers: range, part: Part) -> Plan:
    """The pieces of each parameter of a stage's model, whose layers count from 0.

    Args:
        shape: The backbone's, `padded_vocab` as divided here.
    """
    names, rank, size = shape.names, part.rank, part.size
    first, last = part.ends and layers.start == 0, part.ends and layers.stop == shape.layers
    filled: Plan = {}
    if part.experts_only:
        for here, layer in enumerate(layers):
            for op in part.ops(shape, layer):
                filled[f"decoder.layers.{here}.{columns.MODULE_PATHS[op]}.weight"] = _experts(
                    shape, op, part, layer
                )
        return filled
    if first:
        filled["embedding.word_embeddings.weight"] = _vocabulary(shape, names.embedding, rank, size)
        if names.positions is not None:
            filled["embedding.position_embeddings.weight"] = [
                Piece(0, f"{names.positions}.weight", 0, shape.learned_positions, range(shape.hidden))
            ]
    for here, layer in enumerate(layers):
        filled |= dict(_layer(shape, part, layer, f"decoder.layers.{here}"))
    if last:
        filled |= _norm(shape, "decoder.final_layernorm", names.final_norm)
        if not (shape.tied and first):  # else the output layer is the embedding itself
            source = names.embedding if shape.tied else names.head
            filled["output_layer.weight"] = _vocabulary(shape, source, rank, size)
    return filled


def _vocabulary(shape: BackboneShape, source: str, rank: int, size: int) -> list[Piece]:
    """The rows of the vocabulary on a rank; padding rows have no source and stay zero."""
    part = shape.padded_vocab // size
    rows = max(0, min(part, shape.vocab - rank * part))
    return [Piece(0, f"{source}.weight", rank * part, rows, range(shape.hidden))] if rows else []


def _norm(shape: BackboneShape, target: str, source: str) -> Plan:
    return {
        f"{target}.{leaf}": [
            Piece(0, f"{source}.{leaf}", 0, shape.hidden, offset=shape.norm_offset * (leaf == "weight"))
        ]
        for leaf in shape.norm_leaves
    }


def _layer(shape: BackboneShape, part: Part, layer: int, target: str) -> Iterator[tuple[str, list[Piece]]]:
    names = shape.names
    source = names.layer.format(layer)
    for module, path in names.layer_norms.items():
        yield from _norm(shape, f"{target}.{module}", f"{source}.{path}").items()
    for module, (path, width) in shape.inner_norms.items():
        stored = Piece(0, f"{source}.{path}.weight", 0, width, offset=shape.norm_offset)
        yield f"{target}.{module}.weight", [stored]
    for op in shape.ops(layer):
        if op in EXPERT_OPS:
            yield f"{target}.{columns.MODULE_PATHS[op]}.weight", _experts(shape, op, part, layer)
            continue
        inputs = columns.inputs(shape, op, *part.of_op(op))
        weight, bias = [], []
        for path, place in columns.parts(shape, op, *part.of_op(op)).items():
            for row, start, length in columns.runs(place.columns, place.features):
                weight.append(Piece(row, f"{source}.{path}.weight", start, length, inputs, names.transposed))
                bias.append(Piece(row, f"{source}.{path}.bias", start, length))
        yield f"{target}.{columns.MODULE_PATHS[op]}.weight", weight
        if shape.biases[op]:
            yield f"{target}.{columns.MODULE_PATHS[op]}.bias", bias
    if shape.experts is not None and shape.has_experts(layer):
        stored_as, count, routing = shape.experts.names, shape.experts.count, shape.experts.routing
        router, wide = f"{source}.{stored_as.stored_router}", routing.fp32_product
        weight = [Piece(0, f"{router}.weight", 0, count, range(shape.hidden), wide=wide)]
        yield f"{target}.mlp.router.weight", weight
        if routing.bias:
            stored = Piece(0, f"{router}.{stored_as.router_bias}", 0, count, wide=wide)
            yield f"{target}.mlp.router.bias", [stored]


def _experts(shape: BackboneShape, op: BaseOpName, part: Part, layer: int) -> list[Piece]:
    """The rows of a rank's experts, one expert after the other, as checkpoints store them: module by module."""
    assert shape.experts is not None
    names = shape.experts.names
    modules = {"gate": names.gate, "up": names.up, "out": names.down}
    inputs = columns.inputs(shape, op, *part.of_op(op))
    found, at = [], 0
    for expert in part.held(layer):
        module = f"{shape.names.layer.format(layer)}.{names.stored.format(expert)}"
        for role, place in columns.roles(shape, op, *part.of_op(op)).items():
            source = f"{module}.{modules[role]}.weight"
            found.append(Piece(at, source, int(place.features[0]), len(place.features), inputs))
            at += len(place.features)
    return found


@dataclass(frozen=True)
class Reading:
    """What a process tells its heartbeat while it reads a layer, or what is outside layers (None)."""

    layer: int | None

    def __str__(self) -> str:
        part = "" if self.layer is None else f"'s layer {self.layer}"
        return f"reading the backbone{part}"


def load(
    model: Any,
    shape: BackboneShape,
    layers: range,
    source: Checkpoint | NoWeights,
    stored: dict[str, str],
    offload: WeightOffload,
    part: Part,
    dtype: torch.dtype,
    embedding: nn.Parameter | None = None,
) -> None:
    """Fill a stage's tensor shard and store it where it lives between uses.

    Args:
        model: Of the stage, on the meta device.
        shape: The backbone's, `padded_vocab` as divided here.
        stored: Stored name of each tensor, from `resolve`.
        embedding: Of another stage of this process, which the output layer shares if the backbone ties the two.

    Raises:
        UserError: A file cannot be read.
        RuntimeError: The plan does not fill all parameters of the model, or others.
    """
    parallel = offload.parallel
    has_both = len(layers) == shape.layers and part.ends and not part.experts_only
    tied_here = shape.tied and (has_both or embedding is not None)
    if tied_here:
        model.output_layer.register_parameter("weight", None)
    filled = plan(shape, layers, part)
    if tied_here:
        filled.pop("output_layer.weight", None)
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if wanted != filled.keys():
        raise RuntimeError(f"the weight plan and the model differ in {sorted(wanted ^ filled.keys())}")
    groups: dict[Key, Plan] = {}
    for name, pieces in filled.items():
        groups.setdefault(weight_group_of(name, len(layers)), {})[name] = pieces
    reader = _Reader(shape, source, stored, parallel.device, dtype)
    with source:
        for key, own in groups.items():
            parallel.heartbeat.at(Reading(layers[key] if isinstance(key, int) else None), long=True)
            offload.store(key, *reader.fill(model, own))
            if isinstance(key, int):
                _select_experts(model.decoder.layers[key].mlp, offload.groups.get(key))
    if tied_here:
        shared = model.embedding.word_embeddings.weight if embedding is None else embedding
        model.output_layer.register_parameter("weight", shared)
        offload.tie("head", "embedding")


def _select_experts(mlp: Any, group: WeightGroup | None) -> None:
    """Let a layer's quantised experts be dequantised once their rows are known."""
    if isinstance(mlp, MoELayer) and group is not None and group.dequantised is not None:
        parameters = mlp.experts_fc1.weight, mlp.experts_fc2.weight
        mlp.dequantise = group.dequantised.on_demand(parameters)


class _Reader:
    """Reads parameters, and quantised matrices in the place of some.

    Args:
        stored: Stored name of each tensor.
        dtype: Of those that are not wide.
    """

    def __init__(
        self,
        shape: BackboneShape,
        source: Checkpoint | NoWeights,
        stored: dict[str, str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._source, self._stored = source, stored
        self._device, self._dtype = device, dtype
        self._quantised = resolve.quantised_weights(shape)
        if shape.quantisation is not None:
            on_gpu = device.type == "cuda"
            self._matrices = QuantisedSource(source, stored, shape.quantisation, dtype, on_gpu, device)

    def fill(self, model: Any, filled: Plan) -> tuple[list[nn.Parameter], list[Quantised]]:
        """Replace parameters on the meta device by frozen ones with the checkpoint's values, and return those.

        Quantised ones come apart from the others, without values.
        """
        made, quantised = [], []
        for name, pieces in filled.items():
            shape = model.get_parameter(name).shape
            if all(piece.source in self._quantised for piece in pieces) and pieces:
                nothing = torch.empty(0, dtype=self._dtype, device=self._device)
                parameter = nn.Parameter(nothing, requires_grad=False)
                quantised.append((parameter, self._matrix(pieces)))
            else:
                parameter = nn.Parameter(self._value(shape, pieces), requires_grad=False)
                made.append(parameter)
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_parameter(leaf, parameter)
        return made, quantised

    def _value(self, shape: torch.Size, pieces: list[Piece]) -> Tensor:
        covered = sum(piece.length for piece in pieces) == shape[0]
        make = torch.empty if covered else torch.zeros
        wide = any(piece.wide for piece in pieces)
        kept = torch.promote_types(self._dtype, torch.float32) if wide else self._dtype
        value = make(shape, dtype=kept, device=self._device)
        for piece in pieces:
            if piece.source in self._quantised:  # fused with one that is not
                self._matrix([piece]).dequantise_into(value[piece.row : piece.row + piece.length])
            else:
                _copy(value, piece, self._stored[piece.source], self._source)
        return value

    def _matrix(self, pieces: list[Piece]) -> QuantisedMatrix:
        """The rows and columns of some pieces, in the order of the parameter's rows."""
        inputs = pieces[0].inputs
        assert inputs is not None
        begins, parts, rows, end = dict[str, int](), [], [], 0
        for piece in sorted(pieces, key=lambda piece: piece.row):
            if piece.source not in begins:
                whole = self._matrices.matrix(piece.source, self._quantised[piece.source], piece.transposed)
                parts.append(whole.cut(inputs))
                begins[piece.source], end = end, end + whole.rows
            rows.append(torch.arange(piece.length) + begins[piece.source] + piece.start)
        return type(parts[0]).joined(parts).take(torch.cat(rows)).on(self._device)


def _copy(value: Tensor, piece: Piece, name: str, checkpoint: Checkpoint | NoWeights) -> None:
    features = slice(piece.start, piece.start + piece.length)
    target = value[piece.row : piece.row + piece.length]
    if piece.inputs is None:
        stored = checkpoint.read(name, features)
        # Rounded to the parameter's dtype after the sum, not before.
        target.copy_(
            stored.to(torch.promote_types(target.dtype, torch.float32)) + piece.offset
            if piece.offset
            else stored
        )
        return
    inputs = slice(piece.inputs.start, piece.inputs.stop)
    if piece.transposed:
        target, features, inputs = target.t(), inputs, features
    for done, chunk in checkpoint.read_chunks(name, features, inputs, _CHUNK_BYTES):
        target[done : done + chunk.shape[0]].copy_(chunk)
