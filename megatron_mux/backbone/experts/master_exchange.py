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

from megatron_mux.backbone.experts.exchange import Choice, Exchange, PendingRows, Sent
from megatron_mux.backbone.experts.router import Routes
from megatron_mux.expert_managers import ManagedExperts, PendingSend


class MasterExchange(Exchange):
    """The master's side.

    Args:
        ranks: The expert ranks, the master first.
        layer: Global index of the layer, to notice where managers and master are not in step.
    """

    def __init__(self, ranks: ManagedExperts, layer: int) -> None:
        self._ranks, self._layer = ranks, layer

    def begin(self, routes: Routes) -> tuple[Choice, PendingRows]:
        """See `Exchange.begin`: headers are sent, and the master knows its own."""
        choice = Choice.of(routes, self.serving, self._ranks)
        counts = choice.counts.cpu()
        for manager, sizes in enumerate(counts.tolist()[1:], start=1):
            header = torch.tensor([*sizes, self._layer], device="cpu")  # rows, their pairs and layer
            self._ranks.outbox.send(header, manager, self._ranks.headers)
        return choice, PendingRows(counts, [])

    def agreed(self, choice: Choice, sizes: Tensor) -> Sent:
        """See `Exchange.agreed`."""
        outgoing, none = tuple(sizes[:, 0].tolist()), (0,) * self._ranks.size
        return _SentFromMaster(self._ranks, choice, outgoing, none, 0)


class ManagerExchange(MasterExchange):
    """A manager's side; see `MasterExchange`."""

    def begin(self, routes: Routes) -> tuple[Choice, PendingRows]:
        """See `Exchange.begin`: a header is received."""
        choice = Choice.of(routes, self.serving, self._ranks)
        header = torch.tensor([0, 0, self._layer], device="cpu")
        work = dist.irecv(header, group=self._ranks.headers, group_src=0)
        assert work is not None
        return choice, PendingRows(header, [work])

    def agreed(self, choice: Choice, sizes: Tensor) -> Sent:
        """See `Exchange.agreed`; `sizes` is a header.

        Raises:
            RuntimeError: The master is at another layer.
        """
        rows, pairs, layer = sizes.tolist()
        if layer != self._layer:
            raise RuntimeError(
                f"expert manager {self._ranks.rank} is at layer {self._layer}, the master at {layer}"
            )
        none = (0,) * self._ranks.size
        incoming = (rows, *none[1:])
        return _SentFromMaster(self._ranks, choice, none, incoming, pairs)


class _SentFromMaster(Sent):
    def __init__(self, ranks: ManagedExperts, *sent: Any) -> None:
        super().__init__(*sent)
        self._ranks = ranks
        self._sends: list[PendingSend] = []

    def _exchange(
        self, given: Tensor, outgoing: tuple[int, ...], incoming: tuple[int, ...], forth: bool
    ) -> PendingRows:
        answered, outbox = self._sends, self._ranks.outbox
        group = self._ranks.forth if forth else self._ranks.back
        self._sends = [
            outbox.send(part, rank, group) for rank, part in enumerate(given.split(outgoing)) if len(part)
        ]
        made = given.new_empty(sum(incoming), given.shape[1])
        works = [
            dist.irecv(part, group=group, group_src=rank)
            for rank, part in enumerate(made.split(incoming))
            if len(part)
        ]
        return PendingRows(made, [*(work for work in works if work is not None), *answered])
