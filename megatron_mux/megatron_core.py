"""Adapting Megatron-Core: to CPUs, to what differs between its versions 0.16.1 and 0.19, and to fewer warnings.

Importing this module changes nothing and imports nothing of Megatron-Core.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_of_torch = (torch.cuda.current_device, torch.cuda.synchronize)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Megatron-Core's warnings about optional packages and its deprecated `GPTModel`."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def adapt_to(device: torch.device | None) -> None:
    """Make the parts of Megatron-Core that we use run without CUDA if this process computes on a CPU.

    They allocate the results of collectives on `torch.cuda.current_device()`, which becomes the CPU. Nothing else is
    needed: weights are built on the meta device and filled by us, the backbone has no dropout, and recomputation is
    torch's, so neither Megatron's initialisers nor its CUDA generators are used.

    Args:
        device: The device this process computes on; a GPU or None restores `torch.cuda`.
    """
    current, synchronize = _of_torch
    if device is not None and device.type == "cpu":
        current, synchronize = lambda: device, lambda device=None: None  # type: ignore[assignment,return-value]
    torch.cuda.current_device, torch.cuda.synchronize = current, synchronize


def replace_in_layer_spec(layer: Any, norm: Any, core_attention: Any) -> None:
    """Put our norm and core attention into the layer spec that Megatron-Core made, in place.

    The two versions nest specs alike down to here: a `ModuleSpec` of the layer, within it one of the attention.
    """
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.self_attention.submodules.core_attention = core_attention


def set_mlp_width(layer: Any, width: int) -> None:
    """Give the MLP of a layer spec an inner width of its own, in place.

    The MLP is a `ModuleSpec` in 0.16.1, and a function with some of its arguments in 0.19.
    """
    parts = layer.submodules
    if isinstance(parts.mlp, partial):
        parts.mlp = partial(parts.mlp, ffn_hidden_size=width)
    else:
        parts.mlp.params["ffn_hidden_size"] = width


def set_output_width(linear_fc2: Any, width: int) -> None:
    """Give the second linear module of such an MLP the same inner width: 0.16.1 builds it with the config's.

    Args:
        linear_fc2: On the meta device, not filled yet.
        width: Its input features on this rank.
    """
    weight = linear_fc2.weight
    linear_fc2.input_size_per_partition = width
    linear_fc2.weight = torch.nn.Parameter(weight.new_empty(weight.shape[0], width))


def gather_input(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """All rows of a column-parallel product's input on every tensor rank; the backward sums their gradients."""
    from megatron.core.tensor_parallel import mappings

    if sequence_parallel:
        gathered: Tensor = mappings.gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=group
        )
        return gathered
    copied: Tensor = mappings.copy_to_tensor_model_parallel_region(x, group=group)
    return copied
