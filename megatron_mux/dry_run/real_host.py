"""Keeps integer tensors in host memory real while all others are fake.

A step's layout (labelled rows, an adapter's columns) is computed with small integers in host memory whose values decide
shapes. They stay real as long as no fake tensor is involved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mux.dry_run.known_values import known, with_values


class RealHostMode(TorchDispatchMode):
    """Executes operators on real tensors for real; enter it on top of a fake mode.

    Integer (int64) tensors created in host memory are real; all other new tensors are fake.

    Attributes:
        groups: Names of process groups in which fake tensors were exchanged.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], FakeTensor) and func.namespace == "aten":  # most calls
            return with_values(func, args, kwargs, lambda: func(*args, **kwargs))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_host = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if fake and func.namespace == "c10d":
            group = next(leaf for leaf in args if isinstance(leaf, torch.ScriptObject))
            self.groups.add(dist.ProcessGroup.unbox(group).group_name)
        if on_host and not fake and (tensors or _makes_numbers(func, args, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        made = with_values(func, args, kwargs, lambda: func(*args, **kwargs))
        if _is_in_place(func) and tensors[0] is args[0] and not isinstance(args[0], FakeTensor):
            return args[0]  # its values are unknown from now on, but its storage stays
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


def read_fake_value(tensor: torch.Tensor) -> Any:
    """Value read from a fake tensor: its own, if known, or zero: no flag is raised, no loss infinite, no memory out."""
    if (values := known(tensor)) is not None:
        return values.item()
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.is_floating_point() else 0


def gather_own_object(found: list[Any], mine: Any, group: Any = None) -> None:
    """Replacement of `torch.distributed.all_gather_object` in a fake world: all ranks send the same object."""
    found[:] = [mine] * len(found)
