"""Bytes that the exchanges of a backbone's experts send and receive, counted layer by layer and message by message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from megatron_mux.attributes import replaced
from megatron_mux.backbone.experts.exchange import Sent
from megatron_mux.backbone.model import Backbone

FORTH, BACK = ("rows", "result gradients"), ("results", "row gradients")
"""Messages in the order in which a pass sends them to the experts' ranks and back."""
MESSAGES = (*FORTH, *BACK)


class Traffic:
    """Bytes of a layer, by message `[ranks]`: what ranks send themselves in a collective is at their own place."""

    def __init__(self, ranks: int) -> None:
        self.sent, self.received = (
            {message: np.zeros(ranks, np.int64) for message in MESSAGES} for _ in range(2)
        )

    def watch(self, sent: Sent) -> Sent:
        """Count what is sent with it."""

        def counting(send: Any, messages: Iterator[str], outgoing: Any, incoming: Any, rows: Any) -> Any:
            message, width = next(messages), rows.shape[1] * rows.element_size()
            self.sent[message] += np.multiply(outgoing, width)
            self.received[message] += np.multiply(incoming, width)
            return send(rows)

        both = sent.outgoing, sent.incoming
        vars(sent)["forth"] = partial(counting, sent.forth, iter(FORTH), *both)
        vars(sent)["back"] = partial(counting, sent.back, iter(BACK), *reversed(both))
        return sent


@contextmanager
def counted(backbone: Backbone) -> Iterator[dict[int, Traffic]]:
    """Context in which the traffic of each layer with an exchange is counted."""
    found: dict[int, Traffic] = {}

    def agreed(original: Any, traffic: Traffic, *about: Any) -> Sent:
        return traffic.watch(original(*about))

    with ExitStack() as context:
        for index, layer in backbone.expert_layers():
            if layer.exchange is not None:
                found[index] = Traffic(layer.ranks.group.size())
                counting = partial(agreed, layer.exchange.agreed, found[index])
                context.enter_context(replaced(layer.exchange, "agreed", counting))
        yield found
