"""What tenants have been given, as the fair policy compares it."""

from __future__ import annotations

from collections.abc import Mapping

CREDIT = 3600.0
"""Seconds alone by which a tenant of weight 1 may lag behind the one that was given most, and for which running jobs
are charged ahead. Of longer jobs only so much is compared; they take turns instead (`Policy.turn`)."""


class Accounts:
    """Seconds alone that were trained for each tenant: predicted seconds of a step, times steps.

    A tenant gathers no credit while it wants nothing: one that comes or comes back starts level with the tenant that
    was given least among those with jobs, and nobody lags by more than `CREDIT`. To lose it, as when a server starts
    again, is harmless: all are level then.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: frozenset[str] = frozenset()

    def charge(self, tenant: str, seconds: float) -> None:
        """Note that steps were trained which would take so long alone."""
        self._served[tenant] = self._served.get(tenant, 0.0) + seconds

    def served(self, weights: Mapping[str, float]) -> dict[str, float]:
        """What to give `TenantView.served`.

        Args:
            weights: Of all tenants that have jobs now which are not over.
        """
        shares = {name: self._served.get(name, 0.0) / weights[name] for name in weights}
        known = [shares[name] for name in weights if name in self._active]
        least, most = min(known, default=0.0), max(known, default=0.0)
        for name, weight in weights.items():
            floor = most - CREDIT if name in self._active else least
            self._served[name] = max(shares[name], floor) * weight
        self._active = frozenset(weights)
        return {name: self._served[name] for name in weights}
