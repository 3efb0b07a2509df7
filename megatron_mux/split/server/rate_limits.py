"""Limits on how often each client may do something, so that one of them cannot keep the server busy."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron_mux.split.protocol.wire import RefusedError


class RateLimit:
    """So many a second of each client, and a second's worth at once after a pause.

    Args:
        what: Whose number is limited, for the refusal.
        per_second: That number.
        clock: Seconds, from any start.
    """

    def __init__(self, what: str, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._per_second = per_second
        self._clock = clock
        self._free_at: dict[str, float] = {}  # when a client's earlier ones will have been paid for

    def count(self, client: str) -> None:
        """Count one of a client.

        Raises:
            RefusedError: It has had too many; it may try again.
        """
        now = self._clock()
        free_at = max(now, self._free_at.get(client, now)) + 1 / self._per_second
        if free_at > now + max(1.0, 1 / self._per_second):
            text = f"a client may have {self._per_second:g} {self._what} a second"
            raise RefusedError("too_many", text, retry=True)
        self._free_at[client] = free_at
