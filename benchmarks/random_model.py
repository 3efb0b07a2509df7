"""Models with random weights that are made on the device: one of `transformers`, and our backbone of the same weights.

No file is written but a config.json, and nothing is loaded.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from workload import config_of

from megatron_mux.backbone.checkpoint import Checkpoint
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import info_without_weights
from megatron_mux.quantised.scheme import QuantMethod
from megatron_mux.runtime import Parallel


def make(
    shape: str, layers: int | None, dtype: torch.dtype, device: torch.device, attention: str = "sdpa"
) -> nn.Module:
    """Make a causal language model of `transformers` with random weights; norms are ones.

    Args:
        shape: A name in `workload.SHAPES`.
        layers: Number of layers; None: that of the shape.
        dtype: Of the weights.
        device: Where they are made.
        attention: The implementation of attention.
    """
    from transformers import AutoModelForCausalLM

    config = config_of(shape, layers)
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.02)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def quantised_copy(model: nn.Module) -> nn.Module:
    """A model with the same weights whose layers bitsandbytes holds in NF4 with double quantisation, as QLoRA does."""
    import bitsandbytes as bnb

    made = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    for name, module in list(made.named_modules()):
        if type(module) is not nn.Linear or "layers." not in name:
            continue
        weight, dtype = module.weight, module.weight.dtype
        linear = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=False,
            compute_dtype=dtype,
            quant_type="nf4",
            device="meta",
        )
        held = bnb.nn.Params4bit(
            weight.detach().to("cpu") if weight.device.type == "cpu" else weight.detach().clone(),
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
            module=linear,
        )
        linear.weight = held.to(weight.device)
        made.set_submodule(name, linear)
    made.is_loaded_in_4bit = True  # type: ignore[assignment]
    return made


def backbone_of(
    model: nn.Module, parallel: Parallel, dtype: torch.dtype, quantise: QuantMethod | None = None
) -> Backbone:
    """Load our backbone with copies of a model's weights.

    Args:
        model: Made by `make`.
        parallel: Ranks and device of this process.
        dtype: Of weights and hidden states.
        quantise: How to quantise the weights of linear modules.
    """
    config: Any = model.config
    with tempfile.TemporaryDirectory() as directory, _quantising_on(parallel.device, quantise):
        config.save_pretrained(directory)
        info = info_without_weights(Path(directory), quantise)
        # It has what loading needs of a `Checkpoint`.
        source = cast(Checkpoint, _Tensors(_stored(model)))
        layers = range(info.shape.layers)
        return Backbone(info, parallel, layers, dtype, "none", "resident", source)


@contextmanager
def _quantising_on(device: torch.device, quantise: QuantMethod | None) -> Iterator[None]:
    """Make the codebooks of quantisation on the device, so that it computes there."""
    if quantise is None:
        yield
    else:
        with torch.device(device):
            yield


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """A model's weights by their names in a checkpoint, which has each expert's matrices apart."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            for i, (gate, up) in enumerate(expert.chunk(2) for expert in tensor):
                stem = name.removesuffix("gate_up_proj")
                found |= {f"{stem}{i}.gate_proj.weight": gate, f"{stem}{i}.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            stem = name.removesuffix("down_proj")
            found |= {f"{stem}{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


class _Tensors:
    """Tensors in memory in the place of a `Checkpoint`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, name: str, rows: slice, columns: slice | None = None) -> Tensor:
        """A part of a tensor."""
        part = self.tensors[name].detach()[rows]
        return part if columns is None else part[:, columns]

    def read_chunks(
        self, name: str, rows: slice, columns: slice, chunk_bytes: int
    ) -> Iterator[tuple[int, Tensor]]:
        """A part of a matrix in one chunk, since nothing is read from a file."""
        yield 0, self.read(name, rows, columns)
