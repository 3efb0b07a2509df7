"""Communication without other ranks: collectives and transfers become local operations of the same size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_INPUTS = ("allreduce_", "broadcast_", "send")
"""Operators whose first argument stays as it is; that of the others is what they receive."""


@contextmanager
def local_collectives() -> Iterator[None]:
    """Run Megatron-Core's and our communication on this rank alone; nothing is exchanged.

    A sum leaves its tensor as it is, and what is gathered or received is zeros: memory and shapes are those of the real
    operation, values are not. Backward passes run on this thread, so that it holds for their collectives too.
    """
    with torch.autograd.set_multithreading_enabled(False), _LocalCollectives():
        yield


class _LocalCollectives(TorchDispatchMode):
    """Intercepts `c10d` operators: every operation of `torch.distributed` becomes one, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("c10d::") not in _INPUTS:
            for output in tree_leaves(args[0]):
                if isinstance(output, Tensor):
                    output.zero_()
        work = torch._C._distributed_c10d.FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work
