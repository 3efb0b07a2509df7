"""How the next token of a sequence is chosen: the likeliest one, or drawn with a temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.forward_compute import ForwardCompute
from megatron_mux.engine.out_of_memory import FailedBuckets, Stages

_LEAST_TEMPERATURE = 1e-3
"""With a lower one the likeliest token is chosen."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a sequence are chosen.

    Attributes:
        temperature: What logits are divided by; 0: the likeliest token is chosen.
        top_p: Only the likeliest tokens that together have this probability may be drawn, and at least one.
        top_k: Only so many of the likeliest tokens may be drawn; None: all.
        seed: Of the random numbers, which are the same whatever is generated beside the sequence.
        top: How many of the likeliest tokens are told beside the one that was chosen.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    top: int = 0


@dataclass(frozen=True)
class Draws:
    """How the next tokens of n sequences are chosen.

    Attributes:
        uniform: `[n]` fp64 random numbers of [0, 1).
        temperature, top_p: `[n]` fp64.
        top_k: `[n]` int64.
        top: How many of the likeliest tokens are told of each.
    """

    uniform: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    top: int

    @classmethod
    def of(cls, given: Sequence[Sampling], uniform: Sequence[float], top: int, device: torch.device) -> Self:
        """Bring to a device how the tokens of sequences are chosen."""
        temperature = [own.temperature for own in given]
        top_p, top_k = [own.top_p for own in given], [own.top_k or 1 << 62 for own in given]
        rows = torch.tensor([list(uniform), temperature, top_p], dtype=torch.float64).reshape(3, len(given))
        drawn, temperatures, shares = rows.to(device).unbind()
        return cls(drawn, temperatures, shares, torch.tensor(top_k, dtype=torch.int64, device=device), top)


def choose(scores: Tensor, draws: Draws) -> Tensor:
    """Choose a token for each row.

    Args:
        scores: `[n, V]` logits.
        draws: How.

    Returns:
        `[n, 2 + 2 top]` fp64: the token and its log-probability, then the likeliest tokens and theirs. The
        probabilities are the model's own: neither temperature, top-k nor top-p changes them. The token is -1 where
        logits are not finite.
    """
    scores = scores.double()
    spoilt = ~torch.isfinite(scores.amax(dim=1, keepdim=True))  # minus infinity alone is padding
    log_probs = torch.log_softmax(scores.masked_fill(spoilt, 0.0), dim=1)
    likeliest = log_probs.argmax(dim=1, keepdim=True)
    drawn = torch.where((draws.temperature < _LEAST_TEMPERATURE)[:, None], likeliest, _draw(log_probs, draws))
    columns = [drawn.masked_fill(spoilt, -1).double(), log_probs.gather(1, drawn)]
    if draws.top:
        values, tokens = log_probs.topk(draws.top, dim=1)
        columns += [tokens.double(), values]
    return torch.cat(columns, dim=1)


def _draw(log_probs: Tensor, draws: Draws) -> Tensor:
    """`[n, 1]` tokens by the inverse of each row's distribution function, likeliest tokens first."""
    scaled = log_probs / draws.temperature.clamp_min(_LEAST_TEMPERATURE)[:, None]
    ordered, tokens = scaled.sort(dim=1, descending=True, stable=True)
    place = torch.arange(ordered.shape[1], device=ordered.device)
    # As in transformers: top-p is a share of what top-k has left.
    probs = torch.softmax(ordered.masked_fill(place >= draws.top_k[:, None], float("-inf")), dim=1)
    before = probs.cumsum(dim=1) - probs
    probs = probs * ((before < draws.top_p[:, None]) | (place == 0))
    reached = probs.cumsum(dim=1)
    at = torch.searchsorted(reached, draws.uniform[:, None] * reached[:, -1:], right=True)
    last = (probs > 0).sum(dim=1, keepdim=True) - 1  # rounding may point behind it
    return tokens.gather(1, torch.minimum(at, last))


class SamplingCompute(ForwardCompute):
    """Chooses the next token of every sequence.

    Args:
        stages: This rank's.
        batches: Micro-batches in order.
        draws: How the tokens of each micro-batch are chosen.
        failed: Notes passes that run out of memory.

    Attributes:
        chosen: Of each micro-batch, what `choose` returns; zeros beside the last stage.
    """

    def __init__(
        self, stages: Stages, batches: Sequence[PackedBatch], draws: Sequence[Draws], failed: FailedBuckets
    ) -> None:
        super().__init__(stages, batches, failed)
        self.draws = draws
        device = next(iter(stages.values())).device
        self.chosen = [
            torch.zeros(len(own.uniform), 2 + 2 * own.top, dtype=torch.float64, device=device)
            for own in draws
        ]

    def find(self, number: int, batch: PackedBatch, backbone: Backbone, output: Tensor) -> None:
        """See `ForwardCompute.find`."""
        scores = backbone.scores(output, batch)
        if batch.rows:
            self.chosen[number] = choose(scores, self.draws[number])
