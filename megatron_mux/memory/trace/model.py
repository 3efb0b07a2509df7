"""The model of a case: built from its configuration without weights, wrapped by `peft`, then materialised."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.stream.events import Category
from megatron_mux.memory.trace.case import Case
from megatron_mux.memory.worker import WorkerError


class UntraceableError(WorkerError):
    """A case that cannot be traced; the message says why."""


def build(case: Case) -> nn.Module:
    """The model on the meta device, in training mode.

    Raises:
        UntraceableError: `transformers` or `peft` lacks the model or adapter, or refuses its configuration.
    """
    from transformers import AutoModelForCausalLM

    config = configuration(case.config, case.layers)
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=getattr(torch, case.weights),
                # By default transformers uses `sdpa` if a model supports it, else `eager`.
                attn_implementation=None if case.attention == "sdpa" else case.attention,
            )
            if case.adapter is not None:
                model = _adapted(model, case.adapter)
    except (ValueError, TypeError, KeyError) as error:
        raise UntraceableError(f"{case.config.get('model_type')}: {error}") from error
    if case.adapter is None:
        model.requires_grad_(True)
    if case.recompute:
        if (
            getattr(model, "active_peft_config", None) is not None
            and model.active_peft_config.is_prompt_learning
        ):
            raise UntraceableError(
                "a prefix is lost where layers are recomputed: transformers drops their caches"
            )
        # Renamed in later releases of `transformers` 5.
        kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    return model.train()  # type: ignore[no-any-return]


def configuration(config: Mapping[str, Any], layers: int) -> Any:
    """A `transformers` configuration with another number of layers; lists with an item for each layer are fitted.

    Raises:
        UntraceableError: `transformers` does not know the model type.
    """
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UntraceableError(f"transformers knows no model_type {model_type!r}")
    kind = CONFIG_MAPPING[model_type]
    name = kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    old = getattr(kind(**copy.deepcopy(dict(config))), name)
    changed: dict[str, Any] = {"use_cache": False}
    for key, value in config.items():
        if key == "num_hidden_layers":  # perhaps an alias of the name
            continue
        each = isinstance(value, (list, tuple)) and len(value) == old and key != "architectures"
        changed[key] = [value[i % old] for i in range(layers)] if each else value
    if "attention_types" in changed:  # GPT-Neo: a pattern and its number of repetitions
        pattern = changed["attention_types"][0][0]
        kinds = [pattern[i % len(pattern)] for i in range(layers)]
        changed["attention_types"] = [[[one], 1] for one in kinds]
    return kind(**{**changed, name: layers})


def materialise(model: nn.Module, device: torch.device, fill: bool) -> None:
    """Allocate every parameter and buffer, in the order of `Module.to`; tied ones stay tied.

    Args:
        fill: Whether to fill them with small numbers, for a step that really computes.
    """
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if fill:
                new.fill_(0.01 if new.is_floating_point() else 0)
            parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if parameter else new
        return made[id(tensor)]

    old = [*model.parameters(), *model.buffers()]  # kept, so that no id is used twice
    for module in _children_first(model, set()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = real(parameter)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = real(buffer)
    del old


def decoder_layers(model: nn.Module, layers: int) -> nn.ModuleList:
    """The list of a model's layers.

    Raises:
        UntraceableError: It has no list of that length.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return module
    raise UntraceableError(f"{type(model).__name__} has no list of {layers} layers")


def label_parameters(recorder: Recorder, model: nn.Module, case: Case) -> None:
    """Label the category and layer of each parameter and buffer."""
    for parameter in model.parameters():
        trained = case.adapter is not None and parameter.requires_grad
        recorder.label(parameter, Category.ADAPTERS if trained else Category.PARAMETERS)
    for tensor, layer in _of_layers(model, case.layers):
        recorder.label_layer(tensor, layer)


def label_trained(recorder: Recorder, model: nn.Module, case: Case, optimizer: torch.optim.Optimizer) -> None:
    """Label gradients and optimizer states, and their layers."""
    owners = {id(tensor): layer for tensor, layer in _of_layers(model, case.layers)}
    for parameter in model.parameters():
        states = optimizer.state.get(parameter, {}).values()
        kinds = [(parameter.grad, Category.GRADIENTS), *((state, Category.OPTIMIZER) for state in states)]
        for tensor, category in kinds:
            if isinstance(tensor, torch.Tensor):
                recorder.label(tensor, category)
                recorder.label_layer(tensor, owners.get(id(parameter)))


def _of_layers(model: nn.Module, layers: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Each tensor of a layer with the number of the layer."""
    for index, layer in enumerate(decoder_layers(model, layers)):
        for tensor in (*layer.parameters(), *layer.buffers()):
            yield tensor, index


def _adapted(model: Any, adapter: Mapping[str, Any]) -> Any:
    """The model as `peft` wraps it."""
    from peft import PeftType, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    fields = dict(adapter)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(fields.pop("peft_type"))]
    wrapped = get_peft_model(model, config(**{"task_type": "CAUSAL_LM", **fields}))
    tokens = getattr(
        wrapped, "prompt_tokens", {}
    )  # neither parameter nor buffer: peft keeps them in host memory
    for name, numbers in tokens.items():
        tokens[name] = torch.arange(len(numbers), device="cpu")
    return wrapped


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Each module once, after its children."""
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module
