"""Values of integer tensors on a fake device, where they decide the sizes of others.

Which rows go to which expert is computed on the device, and the host reads how many there are. A fake tensor has no
values; integer and boolean tensors that are computed from known ones alone, beginning with what is copied from host
memory and with the experts that `assumed_routes` stands for, have them beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from megatron_mux.backbone.experts import layer as moe_layer
from megatron_mux.backbone.experts.exchange import Received, Sent, dispatch
from megatron_mux.backbone.experts.router import Router, Routes
from megatron_mux.expert_ranks import ExpertRanks
from megatron_mux.memory.assumed_routes import assumed_experts
from megatron_mux.memory.fake_gpu.device import replaced

_KNOWN = "_known_values"
_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
_DYNAMIC = torch.Tag.dynamic_output_shape
_MOST = 1 << 24
"""Elements of a tensor whose values are kept: they take host memory."""


def known(tensor: Tensor) -> Tensor | None:
    """The values of a tensor, in host memory: those beside a fake one, if any; a real one's own."""
    return getattr(tensor, _KNOWN, None) if isinstance(tensor, FakeTensor) else tensor


def set_known(tensor: Tensor, values: Tensor | None) -> None:
    """Put values beside a fake tensor, or into a real one; None: they are not known any more."""
    if isinstance(tensor, FakeTensor):
        setattr(tensor, _KNOWN, values)
    elif values is not None:
        tensor.data.copy_(values)  # autograd has it already


def with_values(func: Any, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Run an operator on fake tensors, and on their values if all are known.

    Args:
        func: The operator.
        args, kwargs: Its arguments, at least one of them fake, or the device of a new tensor.
        run: Runs it on the fake tensors.
    """
    if _DYNAMIC in func.tags:
        values = _computed(func, args, kwargs)
        if values is None:
            return run()
        device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
        return _with_known(torch.empty(values.shape, dtype=values.dtype, device=device), values)
    made = run()
    small = all(one.numel() <= _MOST for one in tree_leaves(made) if isinstance(one, FakeTensor))
    values = _computed(func, args, kwargs) if small else None
    if values is not None:
        return tree_map(_with_known, made, values)
    if func._schema.is_mutable:
        for tensor in _written(func, args):
            set_known(tensor, None)
    return made


def _with_known(made: Any, values: Any) -> Any:
    if isinstance(made, FakeTensor) and isinstance(values, Tensor) and made.dtype in _INTEGERS:
        set_known(made, values)
    return made


def _written(func: Any, args: Sequence[Any]) -> Iterator[Tensor]:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor))


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator makes of the values of its arguments; None unless all are known, and the result is integers."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if func.namespace not in ("aten", "prims") or any(known(tensor) is None for tensor in tensors):
        return None
    if not tensors and not _makes_integers(func, args, kwargs):
        return None
    if tensors and not all(tensor.dtype in _INTEGERS for tensor in tensors):
        return None
    own, given = tree_map(lambda leaf: known(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    if "device" in given:
        given = given | {"device": torch.device("cpu")}
    given.pop("pin_memory", None)
    with unset_fake_temporarily(), torch.no_grad():
        values = func(*own, **given)
    results = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return values if results and all(one.dtype in _INTEGERS for one in results) else None


def _makes_integers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is None and func.overloadpacket is torch.ops.aten.arange:
        return all(isinstance(number, int) for number in args)
    return dtype in (torch.int64, torch.int32, torch.bool)


@contextlib.contextmanager
def assumed_routes(ranks: ExpertRanks) -> Iterator[None]:
    """Inside, routers select what `memory.assumed_routes` says, and the rows of other expert ranks are as this one's.

    Args:
        ranks: The expert ranks.
    """
    choose, send = Router.forward, dispatch

    def chosen(router: Router, x: Tensor) -> Routes:
        routes = choose(router, x)
        experts = assumed_experts(len(x), router.weight.shape[0], router.routing.top_k)
        with _disable_current_modes():  # what stands for it is not recorded
            values = torch.from_numpy(experts)
        set_known(routes.experts, values)
        return routes

    def dispatched(x: Tensor, routes: Routes, slots: Tensor, sent: Sent, anchor: Tensor) -> Received:
        received = send(x, routes, slots, sent, anchor)
        first = sum(sent.outgoing[: ranks.group.rank()])
        own = slice(first, first + sent.outgoing[ranks.group.rank()])
        experts, rows, of_rows = (known(tensor) for tensor in (sent.experts, sent.rows, slots))
        if experts is not None and rows is not None and of_rows is not None:
            times = len(sent.outgoing)
            with _disable_current_modes():
                both = experts[own].repeat(times, 1), of_rows[rows[own]].repeat(times)
            for tensor, values in zip((received.experts, received.slots), both, strict=True):
                set_known(tensor, values)
        return received

    with replaced(Router, "forward", chosen), replaced(moe_layer, "dispatch", dispatched):
        yield


def exchanged_sizes(args: Sequence[Any]) -> None:
    """Put values beside what an all-to-all of numbers made: every rank sends this one what it sends itself.

    Args:
        args: Of `c10d.alltoall_base_`: the result, what was sent, the group.
    """
    made, given, group = args[:3]
    values = known(given)
    if values is not None and not args[3] and made.dim() == 1:
        with unset_fake_temporarily():
            rank = dist.ProcessGroup.unbox(group).rank()
            set_known(made, values[rank].repeat(len(values)))
