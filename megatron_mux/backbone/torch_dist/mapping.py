"""Which rows of Megatron's tensors are the rows of each Hugging Face tensor. Reading and writing go by the same table.

Megatron fuses q, k and v group by group and the MLP's gate with its plain half; whole tensors are those of one tensor
rank, whatever the number of ranks that saved them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from megatron_mux.backbone import columns
from megatron_mux.base_ops import EXPERT_OPS, BaseOpName, ModuleColumns
from megatron_mux.shape import BackboneShape

Runs = tuple[tuple[int, int, int], ...]
"""`(row in Megatron's tensor, row in the Hugging Face tensor, how many)`."""


@dataclass(frozen=True)
class TensorSource:
    """Where a Hugging Face tensor is.

    Attributes:
        names: What Megatron may call the tensor, in a layer relative to it.
        rows: All rows of it, those of other Hugging Face tensors included.
        runs: Those of this one.
        layer: Index of the layer, if it is in one.
        expert: Index of the expert, likewise.
        transposed: Whether Hugging Face stores it `[in, out]`.
        written: How many of the names are written: two where Megatron's kinds of layers look for different ones.
    """

    names: tuple[str, ...]
    rows: int
    runs: Runs
    layer: int | None = None
    expert: int | None = None
    transposed: bool = False
    written: int = 1

    @property
    def keys(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names in the checkpoint with the leading indices there, all that it may have."""
        return [self.key(name, stacked) for stacked in (True, False) for name in self.names]

    def key(self, name: str, stacked: bool) -> tuple[str, tuple[int, ...]]:
        """One of `names` in the checkpoint, and the leading indices there.

        Args:
            stacked: Whether all layers are one tensor.
        """
        expert = () if self.expert is None else (self.expert,)
        if self.layer is None:
            return name, expert
        if stacked:
            return f"decoder.layers.{name}", (self.layer, *expert)
        return f"decoder.layers.{self.layer}.{name}", expert


def places(shape: BackboneShape) -> dict[str, TensorSource]:
    """Where each tensor of a backbone is, by its full Hugging Face name."""
    names = shape.names
    found = {f"{names.embedding}.weight": _whole("embedding.word_embeddings.weight", shape.vocab)}
    if names.positions is not None:
        found[f"{names.positions}.weight"] = _whole(
            "embedding.position_embeddings.weight", shape.learned_positions
        )
    for leaf in shape.norm_leaves:
        found[f"{names.final_norm}.{leaf}"] = _whole(f"decoder.final_layernorm.{leaf}", shape.hidden)
    if not shape.tied:
        found[f"{names.head}.weight"] = _whole("output_layer.weight", shape.vocab)
    runs = cache(lambda op: _runs(shape, op))
    for layer in range(shape.layers):
        prefix = names.layer.format(layer)
        found |= {f"{prefix}.{name}": place for name, place in _norms(shape, layer)}
        for op in shape.ops(layer):
            found |= {f"{prefix}.{name}": place for name, place in _linear(shape, layer, op, runs(op))}
        if shape.experts is not None and shape.has_experts(layer):
            router = f"{prefix}.{shape.experts.names.stored_router}.weight"
            found[router] = _whole("mlp.router.weight", shape.experts.count, layer)
    return found


def _whole(name: str, rows: int, layer: int | None = None, *others: str) -> TensorSource:
    return TensorSource((name, *others), rows, ((0, 0, rows),), layer)


def _norms(shape: BackboneShape, layer: int) -> Iterator[tuple[str, TensorSource]]:
    """Transformer Engine keeps a norm with the linear module behind it, and Megatron's other layers save it so too."""
    fused = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
    for module, path in shape.names.layer_norms.items():
        for leaf in shape.norm_leaves:
            place = _whole(f"{fused[module]}.layer_norm_{leaf}", shape.hidden, layer, f"{module}.{leaf}")
            apart = module == "pre_mlp_layernorm" and shape.has_experts(layer)
            yield f"{path}.{leaf}", replace(place, written=2) if apart else place
    for module, (path, width) in shape.inner_norms.items():
        yield f"{path}.weight", _whole(f"{module}.weight", width, layer)


def _runs(shape: BackboneShape, op: BaseOpName) -> dict[str, Runs]:
    """The rows of a BaseOp's modules, by their path within the layer; of the experts' ones by role."""
    if op in EXPERT_OPS:
        return {role: _of(part) for role, part in columns.roles(shape, op, 0, 1).items()}
    return {path: _of(part) for path, part in columns.parts(shape, op, 0, 1).items()}


def _of(part: ModuleColumns) -> Runs:
    return tuple(columns.runs(part.columns, part.features))


def _linear(
    shape: BackboneShape, layer: int, op: BaseOpName, runs: dict[str, Runs]
) -> Iterator[tuple[str, TensorSource]]:
    rows = shape.out_features(op)
    if op in EXPERT_OPS:
        assert shape.experts is not None
        names = shape.experts.names
        modules = {"gate": names.gate, "up": names.up, "out": names.down}
        path = f"mlp.experts.experts.linear_{op.removeprefix('experts_')}.weight"
        for expert in range(shape.experts.count):
            for role, these in runs.items():
                name = f"{names.stored.format(expert)}.{modules[role]}.weight"
                yield name, TensorSource((path,), rows, these, layer, expert)
        return
    for module, these in runs.items():
        path = columns.MODULE_PATHS[op]
        transposed = shape.names.transposed
        yield f"{module}.weight", TensorSource((f"{path}.weight",), rows, these, layer, transposed=transposed)
        if shape.biases[op]:
            yield f"{module}.bias", TensorSource((f"{path}.bias",), rows, these, layer)
