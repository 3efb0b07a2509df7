"""Counting which experts tokens select while they pass through the backbone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_mux.moe.entries import Floats, Ints

if TYPE_CHECKING:
    from megatron_mux.backbone.model import Backbone

_SETS_OF = 1 << 14
"""Tokens whose sets of experts are counted in a layer: enough for the expected number of workers of a token."""


@dataclass
class LayerCounts:
    """What is counted in one layer. E: experts.

    Attributes:
        selected: [E] tokens that selected each expert.
        scores: [E] sums of the router's scores of the tokens that selected it (VELA's Figure 3).
        together: [E][E] tokens that selected both.
        sets: How many of the first tokens selected each set.
        tokens: Tokens that passed.
    """

    selected: Ints
    scores: Floats
    together: Ints
    sets: Counter[tuple[int, ...]] = field(default_factory=Counter)
    tokens: int = 0

    @classmethod
    def of(cls, experts: int) -> LayerCounts:
        """Counts that begin at zero."""
        zeros = np.zeros((experts, experts), np.int64)
        return cls(np.zeros(experts, np.int64), np.zeros(experts), zeros)

    def add(self, experts: Ints, scores: Floats) -> None:
        """Count tokens.

        Args:
            experts: [tokens][K] the experts that each selects.
            scores: Likewise, their scores.
        """
        count, wide = len(experts), len(self.selected)
        self.selected += np.bincount(experts.ravel(), minlength=wide)
        self.scores += np.bincount(experts.ravel(), scores.ravel(), minlength=wide)
        chosen = np.zeros((count, wide), np.float32)
        np.put_along_axis(chosen, experts, 1.0, axis=1)
        self.together += np.rint(chosen.T @ chosen).astype(np.int64)
        sampled = np.sort(experts[: max(0, _SETS_OF - self.tokens)], axis=1)
        if len(sampled):
            sets, times = np.unique(sampled, axis=0, return_counts=True)
            for routed, number in zip(sets.tolist(), times.tolist(), strict=True):
                self.sets[tuple(routed)] += number
        self.tokens += count

    def access(self) -> Floats:
        """[E] probability that a token selects each expert."""
        return np.asarray(self.selected / max(1, self.tokens), np.float64)

    def merge(self, other: LayerCounts) -> None:
        """Add what was counted elsewhere; of sets, as many as are sampled."""
        if sum(self.sets.values()) < _SETS_OF:
            self.sets.update(other.sets)
        self.selected += other.selected
        self.scores += other.scores
        self.together += other.together
        self.tokens += other.tokens


Counts = dict[int, LayerCounts]
"""By index of the layer in the backbone."""


@contextmanager
def observing(stages: Sequence[Backbone]) -> Iterator[Counts]:
    """Count which experts this process's rows select in all passes inside.

    Padding rows count like others: give micro-batches without them.
    """
    counts: Counts = {}
    with ExitStack() as hooks:
        for stage in stages:
            experts = stage.shape.experts
            for index, layer in zip(stage.layers, stage.model.decoder.layers, strict=True):
                if experts is None or not stage.shape.has_experts(index):
                    continue
                counts[index] = LayerCounts.of(experts.count)
                handle = layer.mlp.router.register_forward_hook(_counting(counts[index]))
                hooks.callback(handle.remove)
        yield counts


def _counting(counts: LayerCounts) -> Any:
    def hook(router: Any, inputs: tuple[Any, ...], routes: Any) -> None:
        scores = router.scores(inputs[0].detach()).gather(1, routes.experts)
        counts.add(routes.experts.cpu().numpy(), scores.double().cpu().numpy())

    return hook
