"""Filling a rank's parameters from the checkpoint, by a plan of which part of which stored tensor goes where.

The plan consists of names and ranges. Filling reads exactly what the plan says, a MiB at a time: a rank never holds
more than its own shard and one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_mux.backbone import columns
from megatron_mux.backbone.checkpoint import Checkpoint, NoWeights
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.base_ops import BASE_OPS, BaseOpName

_CHUNK_BYTES = 1 << 20
_MODULE_PATHS: dict[BaseOpName, str] = {
    "linear_qkv": "self_attention.linear_qkv",
    "linear_proj": "self_attention.linear_proj",
    "linear_fc1": "mlp.linear_fc1",
    "linear_fc2": "mlp.linear_fc2",
}


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
    """

    row: int
    source: str
    start: int
    length: int
    inputs: tuple[int, int] | None = None
    transposed: bool = False
    offset: float = 0.0


Plan = dict[str, list[Piece]]


@dataclass(frozen=True)
class Shard:
    """Which layers and which tensor rank's share of them a process holds."""

    layers: range
    first: bool
    last: bool
    tp_rank: int
    tp_size: int


def plan(shape: BackboneShape, shard: Shard) -> Plan:
    """The pieces of each parameter of Megatron's model on one rank, whose layers count from 0."""
    names = shape.names
    filled: Plan = {}
    vocabulary = _Vocabulary(shape, shard)
    if shard.first:
        filled["embedding.word_embeddings.weight"] = vocabulary(f"{names.embedding}.weight")
        if names.positions is not None:
            rows = (shape.position_limit or 0) + shape.position_offset
            filled["embedding.position_embeddings.weight"] = [
                Piece(0, f"{names.positions}.weight", 0, rows, (0, shape.hidden))
            ]
    for here, layer in enumerate(shard.layers):
        filled |= dict(_layer(shape, shard, f"decoder.layers.{here}", names.layer.format(layer)))
    if shard.last:
        filled |= _norm(shape, "decoder.final_layernorm", names.final_norm)
        if not (shape.tied and shard.first):  # else the output layer is the embedding itself
            source = names.embedding if shape.tied else names.head
            filled["output_layer.weight"] = vocabulary(f"{source}.weight")
    return filled


class _Vocabulary:
    """The rows of the vocabulary on a rank; padding rows have no source and stay zero."""

    def __init__(self, shape: BackboneShape, shard: Shard) -> None:
        size = shape.padded_vocab // shard.tp_size
        self.start = shard.tp_rank * size
        self.rows = max(0, min(size, shape.vocab - self.start))
        self.hidden = shape.hidden

    def __call__(self, source: str) -> list[Piece]:
        return [Piece(0, source, self.start, self.rows, (0, self.hidden))] if self.rows else []


def _norm(shape: BackboneShape, target: str, source: str) -> Plan:
    return {
        f"{target}.{leaf}": [
            Piece(0, f"{source}.{leaf}", 0, shape.hidden, offset=shape.norm_offset * (leaf == "weight"))
        ]
        for leaf in shape.norm_leaves
    }


def _layer(shape: BackboneShape, shard: Shard, target: str, source: str) -> Iterator[tuple[str, list[Piece]]]:
    names = shape.names
    for module, path in names.layer_norms.items():
        yield from _norm(shape, f"{target}.{module}", f"{source}.{path}").items()
    for module, path in names.head_norms.items():
        stored = Piece(0, f"{source}.{path}.weight", 0, shape.head_dim, offset=shape.norm_offset)
        yield f"{target}.{module}.weight", [stored]
    for op in BASE_OPS:
        inputs = columns.in_range(shape, op, shard.tp_rank, shard.tp_size)
        weight, bias = [], []
        for path, place in columns.parts(shape, op, shard.tp_rank, shard.tp_size).items():
            for row, start, length in columns.runs(place.columns, place.features):
                weight.append(Piece(row, f"{source}.{path}.weight", start, length, inputs, names.transposed))
                bias.append(Piece(row, f"{source}.{path}.bias", start, length))
        yield f"{target}.{_MODULE_PATHS[op]}.weight", weight
        if shape.biases[op]:
            yield f"{target}.{_MODULE_PATHS[op]}.bias", bias


def check_complete(model: nn.Module, filled: Plan) -> None:
    """Check that a plan fills all parameters of the model and no others.

    Raises:
        RuntimeError: It does not.
    """
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if wanted != filled.keys():
        raise RuntimeError(f"the weight plan and the model differ in {sorted(wanted ^ filled.keys())}")


def fill(
    model: nn.Module,
    filled: Plan,
    stored: dict[str, str],
    checkpoint: Checkpoint | NoWeights,
    dtype: torch.dtype,
    device: torch.device,
) -> list[nn.Parameter]:
    """Replace parameters on the meta device by frozen ones with the checkpoint's values.

    Args:
        model: The model.
        filled: The plan, or a part of it.
        stored: Stored name of each tensor, from `resolve`.
        checkpoint: To read from.
        dtype: Of the parameters.
        device: Of the parameters.

    Returns:
        The parameters.

    Raises:
        UserError: A file cannot be read.
    """
    made = []
    for name, pieces in filled.items():
        shape = model.get_parameter(name).shape
        covered = sum(piece.length for piece in pieces) == shape[0]
        make = torch.empty if covered else torch.zeros
        value = make(shape, dtype=dtype, device=device)
        for piece in pieces:
            _copy(value, piece, stored[piece.source], checkpoint)
        owner, _, leaf = name.rpartition(".")
        made.append(nn.Parameter(value, requires_grad=False))
        model.get_submodule(owner).register_parameter(leaf, made[-1])
    return made


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
    inputs = slice(*piece.inputs)
    if piece.transposed:
        target, features, inputs = target.t(), inputs, features
    for done, chunk in checkpoint.read_chunks(name, features, inputs, _CHUNK_BYTES):
        target[done : done + chunk.shape[0]].copy_(chunk)
