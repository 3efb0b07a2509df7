"""Which operators make the host wait for a GPU: by what they are called with, so that a dry run tells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_READ = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "bincount",
        "equal",
        "histc",
        "is_nonzero",
        "item",
        "masked_scatter",
        "masked_scatter_",
        "masked_select",
        "nonzero",
        "unique",
        "unique_consecutive",
        "unique_dim",
    }
)
"""Operators for which the host may need values: of the result, of its size, or of a range."""


def host_waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits for a GPU in a call of an operator; blocking copies between them are among those.

    Args:
        func: The operator.
        args, kwargs: What it is called with.
    """
    if func.namespace != "aten":
        return False
    name = func._schema.name.removeprefix("aten::")
    devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    if name == "_to_copy" and kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    if "cuda" not in devices:
        return False
    if name in ("copy_", "_to_copy"):
        blocks = not (kwargs.get("non_blocking") or args[2:] == (True,))
        target = args[0].device.type if name == "copy_" else torch.device(kwargs.get("device") or "cuda").type
        # To pageable memory no copy goes on alone, and a dry run has no other: `pinned` has none to give.
        return len(devices) > 1 and (blocks or target == "cpu")
    if name in ("index", "index_put", "index_put_"):
        # A mask is turned into the places where it is true, unless one value is put there.
        return any(_is_mask(index) for index in args[1]) and not (args[2:] and args[2].numel() == 1)
    return name in _READ or (
        func is torch.ops.aten.repeat_interleave.Tensor and not kwargs.get("output_size")
    )


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
