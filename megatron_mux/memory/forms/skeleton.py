"""Reads the architecture of a model of `transformers` from its parameters' names and shapes, and its config.

It supports any causal language model whose layers are an attention and an MLP, of one expert or of several.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.memory.forms.architecture import Architecture, ParamCounts
from megatron_mux.memory.optimizers import Shapes
from megatron_mux.memory.tensors import ParameterTensor, Skeleton

_LAYER = re.compile(r"^\D*?\.(\d+)\.(.*)$")
_ROW_PARALLEL = re.compile(r"(o_proj|out_proj|c_proj|down_proj|fc2|fc_out|dense_4h_to_h|dense|wo|w2)\.\w+$")
"""Modules that end a sublayer: their input is divided among tensor ranks, and their bias is not."""


def read_architecture(skeleton: Skeleton) -> Architecture:
    """A model's architecture, from its parameters and its config.

    Raises:
        UserError: The structure of its layers is not understood.
    """
    tensors, config = skeleton.tensors, SimpleNamespace(**skeleton.tensors.config)
    experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts")) or 1
    if experts > 1 and not any("expert" in tensor.name for tensor in tensors.tensors):
        experts = 1  # a config may have the field for a model without
    reader = _Reader(skeleton, experts)
    layers = reader.layers()
    if len(layers) != tensors.layers or not layers[0].divided:
        raise UserError(
            f"{skeleton.path}: the layers of model_type {tensors.model_type!r} are not understood."
        )
    heads, kv_heads = tensors.heads, _kv_heads(config, tensors.heads)
    head_dim = getattr(config, "head_dim", None) or tensors.hidden // heads
    if reader.attention() != 2 * (heads + kv_heads) * head_dim * tensors.hidden:
        raise UserError(f"the attention of model_type {tensors.model_type!r} is not understood.")
    ffn, gated = reader.mlp()
    embedding, head, final = reader.ends()
    return Architecture(
        tensors.model_type,
        tensors.hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        gated,
        experts,
        (_first(config, ("num_experts_per_tok",)) or 1) if experts > 1 else 1,
        tensors.vocabulary,
        tensors.is_tied,
        tuple(layers),
        embedding,
        head,
        final,
    )


class _Reader:
    """Sorts a model's parameters."""

    def __init__(self, skeleton: Skeleton, experts: int) -> None:
        self._tensors = skeleton.tensors
        self._experts = experts

    def layers(self) -> list[ParamCounts]:
        """The parameters of the layers."""
        counts: list[ParamCounts] = []
        for number, tensor, _ in self._inside():
            while len(counts) <= number:
                counts.append(ParamCounts())
            counts[number] += self._counts_of(tensor)
        return counts

    def ends(self) -> tuple[ParamCounts, ParamCounts, ParamCounts]:
        """Parameters before the layers, of the output layer, and of what else follows the layers."""
        own = self._tensors.head_tensors
        head = sum((self._counts_of(tensor) for tensor in own), start=ParamCounts())
        before, behind, passed = ParamCounts(), ParamCounts(), False
        for tensor in self._tensors.tensors:
            if _LAYER.match(tensor.name):
                passed = True
            elif tensor not in own and (not passed or tensor.operator == "Embedding"):
                before += self._counts_of(tensor)
            elif tensor not in own:
                behind += self._counts_of(tensor)
        return before, head, behind

    def attention(self) -> int:
        """Number of values of the first layer's linear modules around attention."""
        return sum(
            tensor.count
            for number, tensor, name in self._inside()
            if not number
            and tensor.operator == "Linear"
            and len(tensor.shape) == 2
            and re.search("attn|attention", name)
        )

    def mlp(self) -> tuple[int, bool]:
        """The inner width of the MLP (of one expert), and whether it is gated."""
        into: Counter[bool] = Counter()
        place: int | None = None
        for number, tensor, name in self._inside():
            of_experts = ".experts." in f".{name}" and len(tensor.shape) == 3  # all experts' in one
            plain = self._experts == 1 and tensor.operator == "Linear" and len(tensor.shape) == 2
            if (of_experts or plain) and not re.search("attn|attention", name):
                place = number if place is None else place
                if number == place:
                    out = bool(_ROW_PARALLEL.search(f"{name}.weight" if of_experts else name))
                    into[out] += math.prod(tensor.shape[-2:]) // self._tensors.hidden
        if not into[True] or not into[False]:
            raise UserError(
                f"the MLP of model_type {self._tensors.model_type!r} is not understood: "
                "there is no layer with a product into it and one out of it."
            )
        return into[True], into[False] >= 2 * into[True]

    def _inside(self) -> Iterator[tuple[int, ParameterTensor, str]]:
        """Parameters of layers: the layer, the parameter, its name within."""
        for tensor in self._tensors.tensors:
            match = _LAYER.match(tensor.name)
            if match:
                yield int(match[1]), tensor, match[2]

    def _counts_of(self, tensor: ParameterTensor) -> ParamCounts:
        name, count = tensor.name, tensor.count
        shapes = Shapes.of(tensor.shape, tensor.operator == "Embedding")
        if ".experts." in name and "shared" not in name and self._experts > 1:
            return ParamCounts(experts=count, shapes=shapes)
        tokens = name in (self._tensors.embedding, self._tensors.head)
        bias = name.endswith("bias")
        if tokens or (tensor.operator == "Linear" and not (bias and _ROW_PARALLEL.search(name))):
            return ParamCounts(divided=count, shapes=shapes)
        return ParamCounts(copied=count, shapes=shapes)


def _first(config: Any, names: tuple[str, ...]) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _kv_heads(config: Any, heads: int) -> int:
    if getattr(config, "multi_query", False):
        return 1
    return int(_first(config, ("num_key_value_heads", "num_kv_heads")) or heads)
