"""What the host has to know is really computed, while everything else is fake.

A step's layout (which rows are labelled, which columns are an adapter's) is worked out with small whole numbers in host
memory, whose values decide about shapes. They stay real as long as no fake tensor takes part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_STEPS_IN_PLACE = torch.ops.aten._fused_sgd_
"""It allocates nothing and has no fake kernel (torch 2.13)."""


class HostComputes(TorchDispatchMode):
    """Computes for real what concerns real tensors alone; it belongs above a fake mode.

    Tensors of whole numbers (int64) that are made in host memory are real; all others that are made are fake.

    Attributes:
        groups: Names of the groups of ranks that fake tensors have been exchanged in.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if fake and func.namespace == "c10d":
            group = next(leaf for leaf in args if isinstance(leaf, torch.ScriptObject))
            self.groups.add(dist.ProcessGroup.unbox(group).group_name)
        if on_host and not fake and (tensors or _makes_numbers(func, args, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if fake and func.overloadpacket is _STEPS_IN_PLACE:
            return None
        made = func(*args, **kwargs)
        if _is_in_place(func) and tensors[0] is args[0] and not isinstance(args[0], FakeTensor):
            return args[0]  # its values are unknown from now on, but it stays where it is
        return made


def _makes_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None and func.overloadpacket is torch.ops.aten.arange:
        return all(isinstance(number, int) for number in args)
    return bool(dtype == torch.int64)


def _is_in_place(func: Any) -> bool:
    """Whether an operator overwrites its first argument and returns it."""
    first = next(iter(func._schema.arguments), None)
    written = first is not None and first.alias_info is not None and first.alias_info.is_write
    return written and func._schema.name.endswith("_") and func.namespace == "aten"


def read_from_nothing(tensor: torch.Tensor) -> Any:
    """What is read from a fake tensor: zero. No flag is raised, no loss is infinite, nobody lacked memory."""
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.is_floating_point() else 0


def everyone_says_the_same(found: list[Any], mine: Any, group: Any = None) -> None:
    """In place of `torch.distributed.all_gather_object`, where no other rank is there."""
    found[:] = [mine] * len(found)
