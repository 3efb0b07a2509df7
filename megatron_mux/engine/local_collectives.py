"""Collectives without other ranks: each becomes a local operation on tensors of the same size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_IN_PLACE = ("allreduce_", "broadcast_")


@contextmanager
def local_collectives() -> Iterator[None]:
    """Run Megatron-Core's and our collectives on this rank alone; nothing is exchanged.

    A reduction leaves its tensor as it is, a gather fills its output with zeros: memory and shapes are those of the
    real operation, values are not. Backward passes run on this thread, so that it holds for their collectives too.
    """
    with torch.autograd.set_multithreading_enabled(False), _LocalCollectives():
        yield


class _LocalCollectives(TorchDispatchMode):
    """Intercepts `c10d` operators: every collective of `torch.distributed` becomes one, whoever calls it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] not in _IN_PLACE:
            for output in tree_leaves(args[0]):
                if isinstance(output, Tensor):
                    output.zero_()
        work = torch._C._distributed_c10d.FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work
