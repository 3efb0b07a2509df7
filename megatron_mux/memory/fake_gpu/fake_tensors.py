"""Fake tensors whose views and operators in place, most of those of a dry run, take a fraction of torch's time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from megatron_mux.memory.fake_gpu.recorder import is_view

_CHANGES_SHAPE = torch.Tag.inplace_view


class FakeTensors(FakeTensorMode):
    """Inside, new tensors are fake; real ones may be given to operators.

    Torch asks for each operator whether it has seen these arguments, and else has most shapes computed in Python. A
    view needs the kernel for the meta device alone, and what is written into another tensor has its shape: that the
    others fit is not checked.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `FakeTensorMode.dispatch`."""
        kwargs = kwargs or {}
        if _is_view(func) and self._owns(args[0]):
            with in_kernel_invocation_manager(self):
                made = func(*args, **kwargs)
            device = args[0].fake_device
            if isinstance(made, torch.Tensor):
                return FakeTensor(self, made, device)
            return [FakeTensor(self, one, device) for one in made]
        if (written := _written(func)) is not None:
            given = [args[place] if place < len(args) else kwargs.get(name) for place, name in written]
            if all(self._is_filled(one) for one in given):
                returned = given[: len(func._schema.returns)]
                return tuple(returned) if len(returned) > 1 else returned[0] if returned else None
        return super().dispatch(func, types, args, kwargs)

    def _owns(self, given: Any) -> bool:
        """Whether this is a fake tensor, and no constant, whose values torch keeps."""
        return isinstance(given, FakeTensor) and given.fake_mode is self and given.constant is None

    def _is_filled(self, given: Any) -> bool:
        """Whether tensors are fake and have elements: an empty one is made larger by what is written into it."""
        tensors = given if isinstance(given, (list, tuple)) else [given]
        return all(self._owns(one) and one.numel() > 0 for one in tensors)


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator always makes a view of its first argument: those that are made of others may copy it."""
    single = len(func._schema.returns) == 1
    return single and func.namespace == "aten" and is_view(func) and not func._can_decompose()


@cache
def _written(func: Any) -> Sequence[tuple[int, str]] | None:
    """The place and name of each argument that an operator writes; None if it writes none, or makes other tensors."""
    returns = func._schema.returns
    own = [] if func.namespace != "aten" or _CHANGES_SHAPE in func.tags else list(_places(func))
    if not own or not all(map(_is_written, returns)) or (returns and len(returns) != len(own)):
        return None
    return own


def _places(func: Any) -> Iterator[tuple[int, str]]:
    for place, argument in enumerate(func._schema.arguments):
        if _is_written(argument):
            yield place, argument.name


def _is_written(of: Any) -> bool:
    return of.alias_info is not None and of.alias_info.is_write
