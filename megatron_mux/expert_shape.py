"""Mixture-of-experts layers as data: how many experts, how rows are routed, and which ranks hold which experts.

Shared by the packages that build experts, adapt them and place them. Experts count by their number in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

TARGETS = ("q_proj", "v_proj")
"""The modules that tasks adapt by default in families with experts."""


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts for a row and weights what they return.

    Attributes:
        top_k: Experts of a row.
        score: What makes scores of the router's products.
        normalised: Whether the scores of the chosen experts are divided by their sum.
        scale: What they are multiplied by after that.
        groups, top_groups: Experts are chosen among those of the best groups of experts; 1 and 1: among all.
        group_score: What the score of a group is: its best expert's, or the sum of its two best ones'.
        bias: Whether a bias is added to the scores for choosing, but not for weighting.
        fp32_product: Whether the router is kept and its product computed in fp32 whatever the backbone's dtype.
        cast: Whether the weights are rounded to the dtype of the hidden states.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two best"] = "best"
    bias: bool = False
    fp32_product: bool = False
    cast: bool = False


@dataclass(frozen=True)
class ExpertNames:
    """Where a family keeps its experts. Paths are relative to the layer.

    Attributes:
        router: Module of the router.
        stored_router: The same in checkpoints.
        stored: Module of an expert in checkpoints, with `{}` for its number.
        gate, up, down: Its projections there.
        router_bias: Within the router, the bias added to scores for choosing, if it has one.
        fused: Module of all experts in transformers, whose parameters `gate_up_proj` and `down_proj` hold them all.
    """

    router: str
    stored_router: str
    stored: str
    gate: str
    up: str
    down: str
    router_bias: str = "e_score_correction_bias"
    fused: str = "mlp.experts"


@dataclass(frozen=True)
class Experts:
    """The experts of a backbone.

    Attributes:
        count: Routed experts of a layer.
        ffn: Inner width of an expert.
        shared_ffn: Inner width of the MLP that every row passes; 0: there is none.
        routing: How rows are routed.
        dense: Layers that have an MLP instead.
        names: Where the family keeps them.
    """

    count: int
    ffn: int
    shared_ffn: int
    routing: Routing
    dense: frozenset[int]
    names: ExpertNames

    def layers(self, layers: int) -> tuple[int, ...]:
        """The layers that have experts, of so many."""
        return tuple(layer for layer in range(layers) if layer not in self.dense)


class Move(NamedTuple):
    """An expert's weights on their way from one expert rank to another."""

    layer: int
    expert: int
    source: int
    target: int


@dataclass(frozen=True)
class Placement:
    """Which expert ranks hold which experts.

    Attributes:
        size: Expert ranks.
        ranks: Layer to, for each expert, the expert ranks that hold it: one, or several if it is replicated.
        nodes: The node of each expert rank; empty: not known.
    """

    size: int
    ranks: Mapping[int, tuple[tuple[int, ...], ...]]
    nodes: tuple[str, ...] = ()

    @classmethod
    def contiguous(cls, experts: int, size: int, layers: Sequence[int]) -> Placement:
        """What Megatron-Core does: neighbouring experts on the same rank, and as many on each."""
        ranks = tuple((expert * size // experts,) for expert in range(experts))
        return cls(size, dict.fromkeys(layers, ranks))

    @classmethod
    def among_managers(cls, experts: int, managers: int, layers: Sequence[int]) -> Placement:
        """Experts one after the other on expert managers 1, 2 and so on; their master, rank 0, has none."""
        ranks = tuple((1 + expert % managers,) for expert in range(experts))
        return cls(managers + 1, dict.fromkeys(layers, ranks))

    def held(self, layer: int, rank: int) -> tuple[int, ...]:
        """The experts of a layer that a rank holds, in ascending order."""
        return tuple(expert for expert, ranks in enumerate(self.ranks[layer]) if rank in ranks)

    def held_by(self, rank: int) -> int:
        """Experts that a rank holds over all layers."""
        return sum(len(self.held(layer, rank)) for layer in self.ranks)

    def moves(self, after: Placement, layer: int) -> list[Move]:
        """What has to be sent to make another placement of this one: each expert from the nearest rank that has it."""
        nodes = after.nodes or ("",) * self.size
        return [
            Move(layer, expert, serving_rank(old, target, nodes[target], nodes), target)
            for expert, (old, new) in enumerate(zip(self.ranks[layer], after.ranks[layer], strict=True))
            for target in new
            if target not in old
        ]

    def serving(self, layer: int, source: int) -> list[int]:
        """For each expert of a layer, the rank that computes the rows of expert rank `source`."""
        nodes = self.nodes or ("",) * self.size
        return [serving_rank(ranks, source, nodes[source], nodes) for ranks in self.ranks[layer]]


def serving_rank(ranks: Sequence[int], source: int | None, node: str | None, nodes: Sequence[str]) -> int:
    """Return the replica of an expert that computes the rows of a source.

    That is the source itself if it holds the expert, else one on its node, else any; equally near ones share the
    sources evenly.

    Args:
        source: The expert rank whose rows they are; None: the master's.
        node: The node of the source.
        nodes: The node of each expert rank.
    """
    if source is not None and source in ranks:
        return source
    near = [rank for rank in ranks if nodes[rank] == node] or list(ranks)
    return near[(source or 0) % len(near)]
