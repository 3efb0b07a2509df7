"""Rows from a master to its expert managers: one message to each, which begins as soon as its own rows are there.

VELA, section IV.A. In the forward pass a header goes ahead that says how many rows will come; the backward pass needs
none. The master's messages to all managers are on their way at once, while it computes shared experts; it receives
only what managers can send without waiting for it. A manager without rows gets the header only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.experts.exchange import Arriving, Choice, Exchange, Sent
from megatron_mux.backbone.experts.router import Routes
from megatron_mux.backbone.experts.traffic import Traffic
from megatron_mux.expert_ranks import Broker, ExpertRanks, Leaving

HEADER_BYTES = 16
"""Rows and layer, int64 each."""


class FromMaster(Exchange):
    """The exchange of a master and its managers.

    Args:
        ranks: The expert ranks, the master first.
        layer: Global index of the layer, to notice where managers and master are not in step.
    """

    def __init__(self, ranks: ExpertRanks, layer: int) -> None:
        self._ranks, self._layer = ranks, layer
        self.traffic = Traffic(ranks.size)

    def send_to(self, routes: Routes) -> Sent:
        """See `Exchange.send_to`: the master sends headers; a manager's host waits for its own."""
        broker, size = self._ranks.broker, self._ranks.size
        assert broker is not None
        choice = Choice.of(routes, self.serving, self._ranks)
        none = (0,) * size
        if self._ranks.is_manager:
            counts = self._header(broker), *none[1:]
            self.traffic.add("sizes", HEADER_BYTES, none, (1, *none[1:]))
            return _SentFromMaster(broker, choice, none, counts, self.traffic)
        counts = tuple(choice.counts.tolist())
        for manager in range(1, size):
            header = torch.tensor([counts[manager], self._layer], device="cpu")
            broker.outbox.send(header, manager, broker.headers)
        self.traffic.add("sizes", HEADER_BYTES, (0, *(1,) * (size - 1)), none)
        return _SentFromMaster(broker, choice, counts, none, self.traffic)

    def _header(self, broker: Broker) -> int:
        """Receive how many rows will come."""
        header = torch.tensor([0, self._layer], device="cpu")
        dist.recv(header, group=broker.headers, group_src=0)
        rows, layer = header.tolist()
        if layer != self._layer and rows:
            raise RuntimeError(
                f"expert manager {self._ranks.rank} is at layer {self._layer}, the master at {layer}"
            )
        return int(rows)


class _SentFromMaster(Sent):
    def __init__(self, broker: Broker, *sent: Any) -> None:
        super().__init__(*sent)
        self._broker = broker
        self._leaving: list[Leaving] = []

    def _forth(self, x: Tensor) -> Arriving:
        return self._exchange(x, self.outgoing, self.incoming, self._broker.forth)

    def _back(self, y: Tensor) -> Arriving:
        return self._exchange(y, self.incoming, self.outgoing, self._broker.back)

    def _exchange(
        self, given: Tensor, outgoing: tuple[int, ...], incoming: tuple[int, ...], group: dist.ProcessGroup
    ) -> Arriving:
        answered, outbox = self._leaving, self._broker.outbox
        self._leaving = [
            outbox.send(part, rank, group) for rank, part in enumerate(given.split(outgoing)) if len(part)
        ]
        made = given.new_empty(sum(incoming), given.shape[1])
        works = [
            dist.irecv(part, group=group, group_src=rank)
            for rank, part in enumerate(made.split(incoming))
            if len(part)
        ]
        return Arriving(made, [*(work for work in works if work is not None), *answered])
