"""A made-up cost model: a floor below which tokens cost nothing more, an adapter per task, uneven stages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mux.fusion.planner.cost import Hybrid, HybridCost


@dataclass(frozen=True)
class Synthetic:
    """A `CostModel`.

    Attributes:
        tokens: Of each task's step.
        adapters: Seconds of each task's adapter per thousand tokens.
        floor: Tokens that fill the device.
        overhead: Seconds of any pass.
        weights: `[S]` each stage's share.
        exposed: Communication as a share of the compute.
        transfer: Seconds between stages.
    """

    tokens: tuple[int, ...]
    adapters: tuple[float, ...]
    floor: float
    overhead: float
    weights: tuple[float, ...]
    exposed: float
    transfer: float

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """See `CostModel.hybrids`."""
        return [self.hybrid(tasks, micro_batches) for tasks in sets]

    def hybrid(self, tasks: Hybrid, micro_batches: int) -> HybridCost:
        """See `CostModel.hybrid`."""
        tokens = sum(self.tokens[t] for t in tasks) / micro_batches
        base = max(tokens, self.floor) / 1000 + self.overhead
        own = sum(self.adapters[t] * max(self.tokens[t] / micro_batches, 64) / 1000 for t in tasks)
        passes = tuple(weight * (base + own) for weight in self.weights)
        messages = (self.exposed * base,) * len(passes) if self.exposed else ()
        return HybridCost(
            micro_batches=micro_batches,
            forward=passes,
            backward=passes,
            communication_forward=messages,
            communication_backward=messages,
            memory=(tokens,) * len(passes),
            transfer=(self.transfer,) * (len(passes) - 1),
        )


def synthetic(seed: int, tasks: int | None = None, stages: int | None = None) -> Synthetic:
    """A random one of up to eight tasks and stages."""
    r = random.Random(seed)
    tasks, stages = tasks or r.randint(1, 8), stages or r.choice([1, 2, 4, 8])
    return Synthetic(
        tokens=tuple(r.choice([64, 128, 256, 512]) * r.randint(1, 16) for _ in range(tasks)),
        adapters=tuple(r.uniform(0.02, 0.3) for _ in range(tasks)),
        floor=r.choice([64, 256, 1024, 4096]),
        overhead=r.uniform(0.0, 0.3),
        weights=tuple(r.uniform(0.8, 1.2) for _ in range(stages)),
        exposed=r.choice([0.0, 0.1, 0.3]),
        transfer=r.uniform(0.0, 0.05),
    )
