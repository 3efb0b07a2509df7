"""Counting which experts tokens select while they pass through the backbone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from megatron_mux.moe.entries import Floats, Ints

if TYPE_CHECKING:
    from megatron_mux.backbone.experts.router import Router, Routes
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
def watched_routers(
    backbone: Backbone, seen: Callable[[int, Router, Tensor, Routes], None]
) -> Iterator[None]:
    """Context in which a function sees what each router is given: layer, router, rows `[R, H]` and their routes."""

    def hook(layer: int, router: Any, inputs: tuple[Tensor, ...], routes: Routes) -> None:
        seen(layer, router, inputs[0].detach(), routes)

    with ExitStack() as hooks:
        for index, layer in backbone.expert_layers():
            assert layer.router is not None
            hooks.callback(layer.router.register_forward_hook(partial(hook, index)).remove)
        yield


@contextmanager
def observing(backbone: Backbone) -> Iterator[Counts]:
    """Count which experts rows select in all passes inside; padding rows count like others."""
    experts = backbone.shape.experts
    assert experts is not None
    counts = {index: LayerCounts.of(experts.count) for index, _ in backbone.expert_layers()}

    def count(layer: int, router: Router, x: Tensor, routes: Routes) -> None:
        scores = router.scores(x).gather(1, routes.experts)
        counts[layer].add(routes.experts.cpu().numpy(), scores.double().cpu().numpy())

    with watched_routers(backbone, count):
        yield counts
