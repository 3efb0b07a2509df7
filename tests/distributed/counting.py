"""Stages that compute whole numbers by which every pass can be told."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_mux.pipeline.action import Action, ChunkId

FACTORS = (2, 3, 5, 7, 11, 13, 17, 19)
"""Of the stages."""


class Counting:
    """A rank whose every pass can be told by its numbers: stage `s` makes `x` into `FACTORS[s] x` + steps so far.

    What arrives is compared with what one process would have computed, chunk after chunk.

    Args:
        rank, ranks: Which of how many.
        stages: Of all ranks.
        tokens: Of every chunk of all steps.
        period: Buckets of a step.
    """

    def __init__(
        self, rank: int, ranks: int, stages: int, tokens: Mapping[ChunkId, int], period: int
    ) -> None:
        self.rank, self.ranks, self.stages, self.tokens, self.period = rank, ranks, stages, tokens, period
        self.number = {chunk_id: i + 1 for i, chunk_id in enumerate(tokens)}
        self.steps = [0] * period
        self.adapters = [torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(period)]
        self.own: dict[int, Tensor] = {}
        self.done: list[Action] = []

    def shape(self, action: Action) -> tuple[int, ...]:
        return (self.tokens[action.chunk_id],) if action.is_pass else (1,)

    def needs_gradient(self, action: Action) -> bool:
        return True

    def label(self, action: Action) -> str:
        return str(action)

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        self._begin(action, hidden is None, action.stage == 0)
        if hidden is None:
            hidden = self._hidden(action.chunk_id, 0)
        assert torch.equal(hidden, self._hidden(action.chunk_id, action.stage)), f"hidden states of {action}"
        of = action.bucket % self.period
        output = FACTORS[action.stage] * hidden + self.steps[of] + self.adapters[of]
        return (output * self.number[action.chunk_id]).sum() if action.stage == self.stages - 1 else output

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        self._begin(action, gradient is None, action.stage == self.stages - 1)
        if gradient is not None:
            wanted = torch.full_like(gradient, self._gradient(action.chunk_id, action.stage))
            assert torch.equal(gradient, wanted), f"gradient of {action}"
        output.backward(gradient)

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        self._begin(action, others is None, self.rank == self.ranks - 1)
        if others is not None:
            assert others.item() == self._sum(action.bucket, self.rank + 1), f"statistics of {action}"
        grad = self.adapters[action.bucket % self.period].grad
        whole = torch.zeros(1, dtype=torch.float64) if others is None else others.clone()
        if grad is not None:
            whole += grad
        self.own[action.bucket] = whole
        return whole

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        self._begin(action, whole is None, self.rank == 0)
        own = self.own.pop(action.bucket)
        whole = own if whole is None else whole
        assert whole.item() == self._sum(action.bucket, 0), f"statistics of all stages for {action}"
        self.adapters[action.bucket % self.period].grad = None
        self.steps[action.bucket % self.period] += 1
        return whole

    def _begin(self, action: Action, nothing: bool, alone: bool) -> None:
        assert nothing == alone, f"{action} got {'nothing' if nothing else 'what nobody sends'}"
        self.done.append(action)

    def _hidden(self, chunk_id: ChunkId, stage: int) -> Tensor:
        """What comes into a stage, its bucket's steps before done on all stages before."""
        hidden = torch.arange(self.tokens[chunk_id], dtype=torch.float64) + 100 * self.number[chunk_id]
        for factor in FACTORS[:stage]:
            hidden = factor * hidden + chunk_id.bucket // self.period
        return hidden

    def _gradient(self, chunk_id: ChunkId, stage: int) -> int:
        """What comes back to a stage, for each token."""
        product = self.number[chunk_id]
        for factor in FACTORS[stage + 1 : self.stages]:
            product *= factor
        return product

    def _sum(self, bucket: int, first: int) -> int:
        """A bucket's gradients on all ranks from `first` on."""
        chunk_ids = [chunk_id for chunk_id in self.tokens if chunk_id.bucket == bucket]
        return sum(
            self._gradient(chunk_id, stage) * self.tokens[chunk_id]
            for chunk_id in chunk_ids
            for stage in range(self.stages)
            if stage % self.ranks >= first
        )
