"""Bytes that a layer's experts cost: counted on the host, message by message, whichever way rows are exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Message = Literal["sizes", "rows", "results", "result gradients", "row gradients"]
"""How many rows will come; rows on their way to experts, in the forward pass; what experts made of them; and the
gradients of both, on their way in the backward pass."""
MESSAGES: tuple[Message, ...] = get_args(Message)


class Traffic:
    """Bytes of a layer that this rank has sent to each rank, and received, since it was made or reset.

    What ranks send themselves in a collective is counted at their own place.

    Args:
        ranks: Ranks that exchange.

    Attributes:
        sent, received: `[messages, ranks]`, in the order of `MESSAGES`.
    """

    def __init__(self, ranks: int) -> None:
        self.sent: npt.NDArray[np.int64] = np.zeros((len(MESSAGES), ranks), np.int64)
        self.received = np.zeros_like(self.sent)

    def add(self, message: Message, width: int, outgoing: Sequence[int], incoming: Sequence[int]) -> None:
        """Count rows of `width` bytes sent to each rank and received from each."""
        kind = MESSAGES.index(message)
        self.sent[kind] += np.multiply(outgoing, width)
        self.received[kind] += np.multiply(incoming, width)

    def reset(self) -> None:
        """Count from zero again."""
        self.sent.fill(0)
        self.received.fill(0)
