"""What is timed of a layer's experts, selected evenly; without messages, and the messages alone.

Expert ranks would send each other alike messages, so a rank stands in for the others: it computes the rows that it
would send, as if they had come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_mux.attributes import replaced_in
from megatron_mux.backbone.experts.all_to_all import AllToAll
from megatron_mux.backbone.experts.exchange import Choice, Exchange, PendingRows, Received, Sent
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.experts.permutation import ExpertPermutation
from megatron_mux.backbone.experts.router import Routes
from megatron_mux.backbone.layer import mlp_half
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.expert_ranks import ExpertRanks
from megatron_mux.fusion.even_experts import even_selection
from megatron_mux.fusion.profiler.probed_stage import Probe, ProbedStage, Run


class ExpertProbes:
    """Makes the probes of a stage's layers with experts.

    Args:
        stage: One that has such layers.
    """

    def __init__(self, stage: ProbedStage) -> None:
        self.stage = stage
        self.layer: MoELayer = stage.stacks["experts"][0].mlp
        self.ranks = stage.parallel.experts
        experts = stage.shape.experts
        assert experts is not None
        selected = even_selection(experts.count, experts.routing, stage.own(stage.most_tokens))
        self._selected = torch.from_numpy(selected).to(stage.device)
        self._echo = None if self.ranks.group.size() == 1 else _Echo(self.layer, self.ranks)

    def routes(self, rows: int) -> Routes:
        """Experts of this rank's rows of a micro-batch of so many."""
        selected = self._selected[: self.stage.own(rows)]
        return Routes(selected, torch.ones(selected.shape, dtype=self.stage.dtype, device=selected.device))

    def given(self, batch: PackedBatch) -> Received:
        """What this rank's experts would compute of a micro-batch."""
        routes, stage = self.routes(batch.rows), self.stage
        with activate(batch):
            slots = self.layer.slots(len(routes.experts))
        experts, pairs = routes.experts, routes.experts.numel()
        if self._echo is not None:
            sent = self._echo.send_to(routes)
            experts, slots, pairs = sent.experts, slots[sent.rows], sent.pairs
        weights = torch.ones(experts.shape, dtype=stage.dtype, device=stage.device)
        return Received(stage.input(len(slots), stage.shape.hidden), weights, experts, slots, pairs)

    def pairs(self, given: Received) -> ExpertPermutation:
        """Their order."""
        return ExpertPermutation.of(
            given.experts, given.slots, self.layer.places, len(self.layer.held), given.pairs
        )

    def parts(self, rows: int) -> list[Probe]:
        """Routed experts, shared ones, and the whole half layer."""
        layer, stage = self.layer, self.stage
        probes = [
            Probe("experts", rows, partial(self._routed, rows)),
            Probe("experts_half", rows, partial(self._half, rows), cold=True),
        ]
        if layer.shared_experts is not None:
            make = partial(stage.of_module, layer.shared_experts, rows, stage.shape.hidden)
            probes.append(Probe("shared", rows, make))
        return probes

    def _routed(self, rows: int) -> Run:
        """From rows as they come to this rank's experts to their weighted sums."""
        batch = self.stage.batch(rows)
        given = self.given(batch)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            with activate(batch):
                return self.layer.compute(given), (given.x,)

        return run

    def _half(self, rows: int) -> Run:
        """Half layers on top of each other, each with its own routers' weights for experts selected evenly."""
        stage, batch = self.stage, self.stage.batch(rows)
        x = stage.input(stage.own(rows), 1, stage.shape.hidden)
        layers, routes = stage.stacks["experts"], self.routes(rows)

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            out = x
            with activate(batch), _even([layer.mlp for layer in layers], routes, self._echo):
                for layer in layers:
                    out = mlp_half(layer, out)
            return out, (x,)

        return run

    def messages(self) -> list[Probe]:
        """One message of rows, and agreeing on the sizes of messages; none where a process has all experts."""
        if self.ranks.group.size() == 1:
            return []
        probes = [Probe("exchange", rows, partial(self._exchange, rows)) for rows in self.stage.rows]
        return [*probes, Probe("exchange_sizes", 1, self._sizes)]

    def message(self, rows: int) -> Callable[[], PendingRows]:
        """A function that begins to send a micro-batch's rows to their experts. Every rank calls it."""
        exchange = AllToAll(self.ranks)
        exchange.serving = self.serving
        sent = exchange.send_to(self.routes(rows))
        x = self.stage.input(len(sent.rows), self.stage.shape.hidden).detach()
        return lambda: sent.forth(x)  # nothing but rows

    @property
    def serving(self) -> Tensor:
        """Of each expert, the rank that computes this rank's rows."""
        assert self.layer.exchange is not None
        return self.layer.exchange.serving

    def _exchange(self, rows: int) -> Run:
        begin = self.message(rows)
        return lambda: (begin().wait(), ())

    def _sizes(self) -> Run:
        exchange = AllToAll(self.ranks)
        counts = Choice.of(self.routes(self.stage.rows[-1]), self.serving, self.ranks).counts

        def run() -> tuple[Tensor, Sequence[Tensor]]:
            sizes = exchange.tell(counts).wait()
            sizes.tolist()  # the host reads them
            return sizes, ()

        return run


class _Echo(Exchange):
    """Does everything that an exchange does but sending: what this rank sends comes back for its own experts."""

    def __init__(self, layer: MoELayer, ranks: ExpertRanks) -> None:
        assert layer.exchange is not None
        self._ranks = ranks
        self.serving = layer.exchange.serving
        places: dict[int, int] = {}
        local = []
        for rank in self.serving.tolist():
            places[rank] = places.get(rank, -1) + 1
            local.append(layer.held[places[rank] % len(layer.held)])
        self._own = torch.tensor(local, device=self.serving.device)

    def begin(self, routes: Routes) -> tuple[Choice, PendingRows]:
        """See `Exchange.begin`: experts of other ranks become those in the same places of this rank."""
        choice = Choice.of(routes, self.serving, self._ranks)
        return replace(choice, experts=self._own[choice.experts]), PendingRows(choice.counts, [])

    def agreed(self, choice: Choice, sizes: Tensor) -> Sent:
        """See `Exchange.agreed`."""
        outgoing, pairs = zip(*sizes.tolist(), strict=True)
        return _Returned(choice, outgoing, outgoing, sum(pairs))


class _Returned(Sent):
    def _exchange(self, given: Tensor, *_: Any, **__: Any) -> PendingRows:
        return PendingRows(given, [])


@contextmanager
def _even(layers: Sequence[MoELayer], routes: Routes, echo: _Echo | None) -> Iterator[None]:
    """Context in which layers select experts evenly, with their routers' weights, and send nothing."""

    def select(router: Any, args: Any, made: Routes) -> Routes:
        return made._replace(experts=routes.experts)

    hooks = [layer.router.register_forward_hook(select) for layer in layers if layer.router is not None]
    try:
        with replaced_in(layers, "exchange", echo):
            yield
    finally:
        for hook in hooks:
            hook.remove()
