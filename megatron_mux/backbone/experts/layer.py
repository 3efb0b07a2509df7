"""A mixture-of-experts layer in the place of Megatron's MLP.

Not Megatron's own `MoELayer`: that divides experts evenly and in order, and lays their rows out without regard to
tasks. Here experts may be anywhere, more of them on one rank than on another, and several times.

Shapes: T rows of the micro-batch on this rank, N rows that it receives, H hidden, P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mux.backbone.experts.all_to_all import AllToAll
from megatron_mux.backbone.experts.exchange import Exchange, Received, collect, dispatch
from megatron_mux.backbone.experts.grouped_linear import GroupedLinear
from megatron_mux.backbone.experts.master_exchange import ManagerExchange, MasterExchange
from megatron_mux.backbone.experts.permutation import ExpertPermutation
from megatron_mux.backbone.experts.router import Router, Routes, no_routes
from megatron_mux.backbone.weight_group import SelectExperts, before_backward
from megatron_mux.batch.packed_batch import active
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape

EXCHANGES: Mapping[str, Callable[[Any, int], Exchange]] = {
    "all to all": lambda ranks, layer: AllToAll(ranks),
    "master": MasterExchange,
    "manager": ManagerExchange,
}
"""How rows reach their experts, by `ExpertRanks.exchange`: made of the ranks and the layer's global index."""


def unobserved(routes: Routes, slots: Tensor) -> None:
    """What `MoELayer.observe` is unless somebody counts routes."""


class MoELayer(nn.Module):
    """Router, routed experts and shared experts of a layer; on a rank without rows, routed experts alone.

    Args:
        layer: Global index of the layer.
        activation: Function of the inner rows of `experts_fc1`, both halves of them.
        shared_experts: The MLP that every row passes; None: there is none.

    Attributes:
        held: The experts of this rank.
        observe: Called with the routes and slots of each pass's rows.
        dequantise: Called before experts are used, forward and backward; None: they are not quantised.
    """

    def __init__(
        self,
        shape: BackboneShape,
        layer: int,
        placement: Placement,
        parallel: Parallel,
        activation: Callable[[Tensor], Tensor],
        shared_experts: nn.Module | None,
    ) -> None:
        super().__init__()
        assert shape.experts is not None
        self.ranks = ranks = parallel.experts
        self.layer, self.device = layer, parallel.device
        self.routing = shape.experts.routing
        self.sequence_parallel = parallel.sequence_parallel
        self.tp_rank, self.tp_group = parallel.tp_rank, parallel.tp_group
        self.activation = activation
        # None where this process has all experts.
        self.exchange = None if ranks.group.size() == 1 else EXCHANGES[ranks.exchange](ranks, layer)
        self.place(placement)
        self.observe: Callable[[Routes, Tensor], object] = unobserved
        self.dequantise: SelectExperts | None = None
        self.anchor = torch.zeros(0, device=parallel.device, requires_grad=True)
        self.router: Router | None = Router(self.routing, shape.experts.count, shape.hidden)
        inner, parts = shape.out_features("experts_fc1"), ranks.tensor_size
        self.experts_fc1 = GroupedLinear(self.held, shape.hidden, inner // parts)
        self.experts_fc2 = GroupedLinear(self.held, shape.experts.ffn // parts, shape.hidden)
        self.shared_experts = shared_experts

    def place(self, placement: Placement) -> None:
        """Route rows by a placement from now on; the weights follow it (`move_experts`)."""
        self.held = placement.held(self.layer, self.ranks.rank)
        places = {expert: place for place, expert in enumerate(self.held)}
        with torch.device("cpu"):  # the model is built on the meta device
            serving = torch.tensor(placement.serving(self.layer, self.ranks.rank))
            found = torch.tensor([*(places.get(expert, -1) for expert in range(len(serving))), -1])
        self.places = found.to(self.device)
        if self.exchange is not None:
            self.exchange.serving = serving.to(self.device)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """`[T, 1, H]` to the same, and no bias, as Megatron's layer expects of an MLP (it passes a padding mask)."""
        x = hidden.squeeze(1)
        routes, slots = self.route(x)
        sent = None
        received = Received(x, routes.weights, routes.experts, slots, routes.experts.numel())
        if self.exchange is not None:
            sent = self.exchange.send_to(routes)
            anchor = self.anchor if torch.is_grad_enabled() else self.anchor.detach()
            received = dispatch(x, routes, slots, sent, anchor)
        # While others compute, in both directions: autograd runs backward what was run last.
        shared = None if self.shared_experts is None else self.shared_experts(hidden)[0]
        output = self.compute(received)
        if sent is not None:
            output = collect(output, sent)
        output = output.unsqueeze(1)
        return output if shared is None else output + shared, None

    def route(self, x: Tensor, again: bool = False) -> tuple[Routes, Tensor]:
        """The experts of rows `[T, H]`, and `[T]` int64: the slot of the task that each belongs to.

        Tells `observe` of them, unless the layer is computed `again` for its backward, here or by autograd.
        """
        again = again or torch._C._current_graph_task_id() != -1
        if self.router is None:
            routes = no_routes(self.routing, x)
        else:
            first, group = self._first(len(x)), self.tp_group if self.sequence_parallel else None
            rows = slice(first, first + len(x))
            routes = self.router(x, active().balanced.in_layer(self.layer, rows, group, again))
        slots = self.slots(len(x))
        if not again:
            self.observe(routes, slots)
        return routes, slots

    def compute(self, received: Received) -> Tensor:
        """The weighted sums of what this rank's experts make of rows: `[N, H]`."""
        if not len(received.x):
            return received.x
        # Rows of other ranks may be of any task.
        slots = active().groups.slot_set if self.exchange is None else None
        pairs = ExpertPermutation.of(
            received.experts, received.slots, self.places, len(self.held), received.pairs, slots
        )
        counts = self.select(pairs)
        inner = self.activation(self.experts_fc1(pairs.spread(received.x), pairs))
        y = self.experts_fc2(inner, pairs)
        if self.dequantise is not None and counts is not None:
            # For both products: the buffer is filled anew for each backward pass.
            y = before_backward(y, partial(self.dequantise, counts))
        weights = pairs.of_choices(received.weights).unsqueeze(1)
        return pairs.summed((y * weights).to(y.dtype))

    def select(self, pairs: ExpertPermutation) -> Tensor | None:
        """Have the experts that have pairs dequantised; returns what `dequantise` was given, None if nothing was."""
        if self.dequantise is None:
            return None
        counts = pairs.groups.sizes
        self.dequantise(counts)
        return counts

    def _first(self, rows: int) -> int:
        """Which row of the micro-batch this rank's begin with, if it has so many."""
        return self.tp_rank * rows if self.sequence_parallel else 0

    def slots(self, rows: int) -> Tensor:
        """`[rows]` int64: the slot of the task that each of this rank's rows belongs to; `NO_SLOT` for no task."""
        first = self._first(rows)
        return active().groups.slot_of_row[first : first + rows]
