"""Collectives on copies: what a rank holds then depends on its own thread alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_BETWEEN_TWO = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


class OnCopies(TorchDispatchMode):
    """Within, collectives exchange copies of tensors, and are over when they return; it belongs below a recorder.

    gloo's threads keep what they exchange a little beyond the end of `wait`: until they get the processor again. Where
    many processes share it, a tensor that its program has dropped is then seen to live on, and the peak to be higher.
    Nobody counts copies. (gloo sends and receives on the program's own thread.)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or func._schema.name in _BETWEEN_TWO:
            return func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        copies = {id(tensor): tensor.clone() for tensor in tensors}
        made = func(*_with(copies, args), **(kwargs or {}))
        for work in _works(made):
            work.wait()
        for tensor in tensors:
            tensor.copy_(copies[id(tensor)])
        originals: dict[int, Any] = {id(copies[id(tensor)]): tensor for tensor in tensors}
        return _with({**originals, **{id(work): _done() for work in _works(made)}}, made)


def _works(made: Any) -> list[Any]:
    """What there is to wait for."""
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.ScriptObject)]


def _with(others: Mapping[int, Any], values: Any) -> Any:
    """The same, with others in the place of these."""
    return tree_map(lambda leaf: others.get(id(leaf), leaf), values)


def _done() -> Any:
    """Some work that is over. (Waiting for gloo's a second time would copy its result a second time.)"""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    made: Any = _distributed_c10d
    return made._create_work_from_future(future).boxed()
