"""How long the ranks of a simulation idle."""

from __future__ import annotations

from megatron_mux.pipeline.draw import bubble, busy
from megatron_mux.pipeline.simulate import Simulation


def busy_seconds(found: Simulation) -> list[float]:
    """`[ranks]` seconds that each rank computes."""
    return busy([timed for actions in found.timed for timed in actions], len(found.timed))


def bubble_shares(found: Simulation) -> list[float]:
    """`[ranks]` share of the latency during which each rank is idle."""
    return bubble([timed for actions in found.timed for timed in actions], len(found.timed))


def internal_bubble(found: Simulation, rank: int) -> float:
    """Seconds during which a rank is idle between its first and its last pass."""
    passes = [timed for timed in found.timed[rank] if timed.action.is_pass]
    if not passes:
        return 0.0
    first, last = passes[0].start, passes[-1].stop
    return last - first - sum(t.stop - t.start for t in found.timed[rank] if first <= t.start < last)
