"""The parameters of a causal language model, from its config.json alone: no weights are read or allocated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.errors import UserError
from megatron_mux.files import read_json
from megatron_mux.memory.store import Store
from megatron_mux.memory.worker import one_line

if TYPE_CHECKING:
    from torch import nn

_MOST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "vocab_size": 1 << 26,
    "intermediate_size": 1 << 24,
    "ffn_dim": 1 << 24,
    "n_inner": 1 << 24,
    "head_dim": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "word_embed_proj_dim": 1 << 20,
    "max_position_embeddings": 1 << 28,
}
"""Upper bounds of a config's sizes, at least ten times those of any model."""
_REQUIRED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ParameterTensor:
    """A parameter."""

    name: str
    """Name in `named_parameters()`."""
    shape: tuple[int, ...]
    operator: str
    """Kind of its module: `Embedding`, `Linear` (also `Conv1D`), or the name of its class."""

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelTensors:
    """Parameters, each once however often it is used, and sizes of a model."""

    model_type: str
    tensors: tuple[ParameterTensor, ...]
    """In the order of the modules."""
    embedding: str
    """Name of the token embedding's weight."""
    head: str
    """Name of the output layer's weight; the embedding's if they are tied."""
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int | None
    """Maximum length of a sequence; None if the config does not limit it."""
    config: Mapping[str, Any]
    """Numbers, booleans and strings of the text model's config, as `transformers` understands it."""
    per_layer: Mapping[str, list[Any]]
    """Lists of the config with an item for each layer, given or filled in by `transformers`."""
    layer_kinds: tuple[int, ...]
    """A number for each layer, equal for layers with equal modules and settings; () if there is no list of layers."""

    @property
    def total(self) -> int:
        """Number of values of all parameters."""
        return sum(tensor.count for tensor in self.tensors)

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the token embedding."""
        return self.head == self.embedding

    def tensor(self, name: str) -> ParameterTensor:
        """The parameter with a name."""
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ModelTensors:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        tensors = (ParameterTensor(t["name"], tuple(t["shape"]), t["operator"]) for t in data["tensors"])
        return cls(
            **{
                **data,
                "tensors": tuple(tensors),
                "layer_kinds": tuple(data["layer_kinds"]),
            }
        )

    @property
    def head_tensors(self) -> tuple[ParameterTensor, ...]:
        """The output layer's own parameters: its weight and bias, or none."""
        module = _parent(self.head)
        own = () if self.is_tied else (self.tensor(self.head),)
        biases = (t for t in self.tensors if _parent(t.name) == module and t.name != self.head)
        return (*own, *(() if self.is_tied else biases))


class Skeleton:
    """A model of `transformers` on the meta device: modules and shapes, no values.

    `transformers` and torch are imported when a property needs them; sizes are kept for the next run.

    Args:
        path: config.json, or the directory that contains it.
        kept: Store for sizes; None keeps none.
        measure: Measures the model of a config.json in another process, so that this one need not import torch
            (`Tracer.sizes`); None measures here.

    Raises:
        UserError: It cannot be read, or is no JSON object.
    """

    def __init__(
        self, path: Path, kept: Store | None = None, measure: Callable[[Path], ModelTensors] | None = None
    ) -> None:
        self.path = path / "config.json" if path.is_dir() else path
        self.raw = read_json(self.path)
        self._kept = kept
        self._measure = measure
        self._about = {"config": self.raw}

    @cached_property
    def is_known(self) -> bool:
        """Whether the sizes are kept already."""
        return self._kept is not None and self._kept.read(self._about) is not None

    @cached_property
    def config(self) -> Any:
        """The config as `transformers` understands it.

        Raises:
            UserError: It is not the config of a causal language model.
        """
        return _config(self.path, self.raw)

    @cached_property
    def module(self) -> nn.Module:
        """The model.

        Raises:
            UserError: It cannot be built.
        """
        config = self.config
        import torch
        from torch import nn
        from transformers import AutoModelForCausalLM

        try:
            with torch.device("meta"):
                built = AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
                )
        except Exception as error:  # models raise whatever their assertions happen to raise
            raise UserError(
                f"{self.path}: no causal language model can be built from it: {one_line(error)}"
            ) from None
        assert isinstance(built, nn.Module)
        return built

    @cached_property
    def tensors(self) -> ModelTensors:
        """The model's parameters and sizes.

        Raises:
            UserError: It is not the config of a causal language model.
        """
        text = None if self._kept is None else self._kept.read(self._about)
        if text is not None:
            return ModelTensors.from_json(text)
        found = self._measured() if self._measure is None else self._measure(self.path)
        if self._kept is not None:
            self._kept.write(self._about, found.to_json())
        return found

    def _measured(self) -> ModelTensors:
        sizes = self.config.get_text_config()
        module: Any = self.module
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        head = module.get_output_embeddings()
        if head is None:
            raise UserError(f"{self.path}: model_type {self.config.model_type!r} has no output layer.")
        return ModelTensors(
            self.config.model_type,
            tuple(self._parameters()),
            embedding=names[id(module.get_input_embeddings().weight)],
            head=names[id(head.weight)],
            layers=sizes.num_hidden_layers,
            hidden=sizes.hidden_size,
            heads=sizes.num_attention_heads,
            vocabulary=sizes.vocab_size,
            positions=getattr(sizes, "max_position_embeddings", None),
            config=_plain(sizes),
            per_layer=_per_layer(sizes, sizes.num_hidden_layers),
            layer_kinds=_layer_kinds(self.module, sizes),
        )

    def _parameters(self) -> Iterator[ParameterTensor]:
        seen: set[int] = set()
        for name, module in self.module.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = f"{name}.{own}" if name else own
                    yield ParameterTensor(full, tuple(parameter.shape), _operator(module))


def _plain(config: Any) -> dict[str, Any]:
    """Numbers, booleans and strings of a config, including aliases and properties."""
    kind = type(config)
    properties = [name for name in dir(kind) if isinstance(getattr(kind, name, None), property)]
    names = {*config.to_dict(), *kind.attribute_map, *properties}
    found = {}
    for name in sorted(names):
        with suppress(Exception):  # properties raise whatever they do for what a config lacks
            found[name] = getattr(config, name)
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str))}


def _per_layer(config: Any, layers: int) -> dict[str, list[Any]]:
    """Lists of a config with an item for each layer, if the items differ."""
    return {
        name: list(value)
        for name, value in config.to_dict().items()
        if isinstance(value, (list, tuple))
        and len(value) == layers
        and any(item != value[0] for item in value)
        and list(value) != list(range(layers))  # numbers of layers, all of them
    }


def _layer_kinds(module: nn.Module, config: Any) -> tuple[int, ...]:
    """A number for each layer, equal for equal layers."""
    from torch import nn

    layers = config.num_hidden_layers
    lists = (m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
    found = next(lists, None)
    if found is None:
        return ()
    listed = list(zip(*_per_layer(config, layers).values(), strict=True)) or [()] * layers
    told = [_settings(layer) for layer in found]
    # A layer may know its own number.
    numbers = {
        place
        for place, first in told[0].items()
        if type(first) is int and all(told[i].get(place) == first + i for i in range(layers)) and layers > 1
    }
    kinds = [
        str(([item for item in settings.items() if item[0] not in numbers], items))
        for settings, items in zip(told, listed, strict=True)
    ]
    order = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return tuple(order[kind] for kind in kinds)


def _settings(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Classes, shapes and settings of a layer's modules, by module and name."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in layer.named_modules():
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        found[path, ""] = type(module).__name__, shapes
        for name, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, str)):
                found[path, name] = value
    return found


def _operator(module: nn.Module) -> str:
    from torch import nn

    if isinstance(module, nn.Embedding):
        return "Embedding"
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":  # GPT-2's, a transposed Linear
        return "Linear"
    return type(module).__name__


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _config(path: Path, raw: Mapping[str, Any]) -> Any:
    """A config.json as `transformers` understands it, with checked sizes."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    logging.set_verbosity_error()  # token ids and the like change no size

    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"{path} has no model_type: it is not the config.json of a model.")
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{path}: model_type {kind!r} is not a causal language model that transformers knows."
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(raw))
        sizes = config.get_text_config()
    except Exception as error:  # its validators raise whatever they happen to raise
        raise UserError(f"{path} is not a valid {kind} config: {one_line(error)}") from None
    for name, most in _MOST.items():
        value = getattr(sizes, name, None)
        if value is None and name not in _REQUIRED:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise UserError(f"{path}: {name} = {value!r}: must be a whole number from 1 to {most:,}.")
    heads, groups = sizes.num_attention_heads, getattr(sizes, "num_key_value_heads", None)
    # In latent attention, every head has its own keys, whatever the config says.
    latent = getattr(sizes, "kv_lora_rank", None) is not None
    if groups is not None and heads % groups and not latent:
        raise UserError(
            f"{path}: num_key_value_heads = {groups}: does not divide num_attention_heads = {heads}."
        )
    return config
