"""Rows among ranks that each have some: collectives of all expert ranks, after one that tells their sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.experts.exchange import Choice, Exchange, PendingRows, Sent
from megatron_mux.backbone.experts.router import Routes
from megatron_mux.expert_ranks import ExpertRanks


class AllToAll(Exchange):
    """The exchange of expert parallelism."""

    def __init__(self, ranks: ExpertRanks) -> None:
        self._ranks = ranks

    def begin(self, routes: Routes) -> tuple[Choice, PendingRows]:
        """See `Exchange.begin`: a collective."""
        choice = Choice.of(routes, self.serving, self._ranks)
        return choice, self.tell(choice.counts)

    def tell(self, counts: Tensor) -> PendingRows:
        """Begin to tell each rank how many rows and pairs will come, and what they tell: `[ranks, 2]`. A collective."""
        incoming = torch.empty_like(counts)
        work = dist.all_to_all_single(incoming, counts, group=self._ranks.group, async_op=True)
        assert work is not None
        return PendingRows(incoming, [work], counts)

    def agreed(self, choice: Choice, sizes: Tensor) -> Sent:
        """See `Exchange.agreed`."""
        both = torch.cat((choice.counts, sizes), dim=1)
        outgoing, _, incoming, pairs = zip(*both.tolist(), strict=True)
        return _SentToAll(self._ranks.group, choice, outgoing, incoming, sum(pairs))


class _SentToAll(Sent):
    def __init__(self, group: dist.ProcessGroup, *sent: Any) -> None:
        super().__init__(*sent)
        self._group = group

    def _exchange(
        self, given: Tensor, outgoing: tuple[int, ...], incoming: tuple[int, ...], forth: bool
    ) -> PendingRows:
        made = given.new_empty(sum(incoming), given.shape[1])
        work = dist.all_to_all_single(
            made, given, list(incoming), list(outgoing), group=self._group, async_op=True
        )
        assert work is not None
        return PendingRows(made, [work], given)
