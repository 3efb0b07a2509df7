"""Values of integer tensors on a fake device, where they decide the sizes of others.

Which rows go to which expert is computed on the device, and the host reads how many there are. A fake tensor has no
values; integer and boolean tensors that are computed from known ones alone, beginning with what is copied from host
memory and with the experts that `assumed_routes` stands for, have them beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from megatron_mux.attributes import replaced
from megatron_mux.backbone.experts import layer as moe_layer
from megatron_mux.backbone.experts.all_to_all import AllToAll
from megatron_mux.backbone.experts.exchange import Received, Sent, dispatch
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.experts.router import Router, Routes
from megatron_mux.expert_ranks import ExpertRanks
from megatron_mux.expert_shape import Placement, Routing
from megatron_mux.memory.assumed_routes import Access, assumed_experts

_KNOWN = "_known_values"
_INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
_DYNAMIC = torch.Tag.dynamic_output_shape
_HASHES = (
    torch.ops.aten.bitwise_xor,
    torch.ops.aten.bitwise_xor_,
    torch.ops.aten.__ixor__,
    torch.ops.aten.__xor__,
)
"""Operators of random masks, which decide no sizes and would take most of a dry run's time."""
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
        args, kwargs: Its arguments, at least one of them fake, or the device of a new tensor.
    """
    first = args[0] if args else None
    if isinstance(first, FakeTensor) and first.dtype.is_floating_point and not _has_dynamic_shape(func):
        return run()  # most calls: only integers are known, and what comes of integers alone
    if _has_dynamic_shape(func):
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


@cache
def _has_dynamic_shape(func: Any) -> bool:
    return _DYNAMIC in func.tags


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
    if func.overloadpacket in _HASHES or (not tensors and not _makes_integers(func, args, kwargs)):
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


class _Assumed:
    """What is assumed of routes in a dry run; see `assumed_routes`."""

    def __init__(self, ranks: ExpertRanks, placement: Placement | None, access: Access | None) -> None:
        self._ranks, self._placement, self._access = ranks, placement, access
        self._layer = 0
        self._serving = torch.empty(0, dtype=torch.int64)

    def enter(self, layer: MoELayer) -> None:
        """Note which layer routes its rows."""
        self._layer = layer.layer
        if layer.exchange is not None:
            serving = known(layer.exchange.serving)
            assert serving is not None
            self._serving = serving

    def selected(self, rows: int, experts: int, routing: Routing) -> Tensor:
        """`[rows, K]` int64: the experts of rows, in host memory."""
        access = None if self._access is None else self._access[self._layer]
        return torch.from_numpy(assumed_experts(rows, experts, routing, access))

    def arriving(self, experts: Tensor) -> list[tuple[Tensor, Tensor]]:
        """From each process, its rows that come here, and their experts; -1 for those of other ranks.

        Args:
            experts: `[R, K]` int64, those of rows; each process has rows like this one's.
        """
        ranks, serving, found = self._ranks, self._serving, []
        for source in range(ranks.size):
            if self._placement is not None:  # of replicas, sources use different ones
                serving = torch.tensor(self._placement.serving(self._layer, source))
            here = serving[experts] == ranks.rank
            rows = here.any(dim=1).nonzero().squeeze(1)
            found += [(rows, experts.masked_fill(~here, -1)[rows])] * ranks.tensor_size
        return found


@contextlib.contextmanager
def assumed_routes(
    ranks: ExpertRanks, placement: Placement | None = None, access: Access | None = None
) -> Iterator[None]:
    """Inside, routers select what `memory.assumed_routes` says, and the rows of other expert ranks are as this one's.

    Args:
        ranks: The expert ranks.
        placement: Which of them hold which experts; None: neighbouring ones share a rank.
        access: How likely experts are selected; None: all equally.
    """
    assumed = _Assumed(ranks, placement, access)
    route, choose, begin, send = MoELayer.route, Router.forward, AllToAll.begin, dispatch

    def routed(layer: MoELayer, *arguments: Any, **named: Any) -> Any:
        assumed.enter(layer)
        return route(layer, *arguments, **named)

    def chosen(router: Router, x: Tensor, balance: Any = None) -> Routes:
        routes = choose(router, x, balance)
        with _disable_current_modes():  # what stands for it is not recorded
            values = assumed.selected(len(x), router.weight.shape[0], router.routing)
        set_known(routes.experts, values)
        return routes

    def begun(exchange: AllToAll, routes: Routes) -> Any:
        choice, sizes = begin(exchange, routes)
        experts = known(routes.experts)
        if experts is not None:
            with _disable_current_modes():
                sizes_of = [(len(own), int((own >= 0).sum())) for _, own in assumed.arriving(experts)]
                counts = torch.tensor(sizes_of, dtype=torch.int32)
            set_known(sizes.wait(), counts)
        return choice, sizes

    def dispatched(x: Tensor, routes: Routes, slots: Tensor, sent: Sent, anchor: Tensor) -> Received:
        received = send(x, routes, slots, sent, anchor)
        experts, of_rows = known(routes.experts), known(slots)
        if experts is not None and of_rows is not None:
            with _disable_current_modes():
                rows, own = zip(*assumed.arriving(experts), strict=True)
                both = torch.cat(own), of_rows[torch.cat(rows)]
            for tensor, values in zip((received.experts, received.slots), both, strict=True):
                set_known(tensor, values)
        return received

    with (
        replaced(MoELayer, "route", routed),
        replaced(Router, "forward", chosen),
        replaced(AllToAll, "begin", begun),
        replaced(moe_layer, "dispatch", dispatched),
    ):
        yield
