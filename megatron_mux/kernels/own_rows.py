"""Rows of the embedding or of the output layer that single tasks train in place of the backbone's.

The backbone's matrix is read only. A task's tokens are looked up in the task's own rows, and nothing is multiplied by
zero: a task whose rows are NaN leaves the others as they are.
Shapes: T tokens of the micro-batch on this rank, V vocabulary (this rank's part), R rows that a task trains, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Place = Literal["embedding", "head"]
"""A vocabulary matrix of the backbone: the token embedding, or the output layer."""


@dataclass(frozen=True)
class OwnRows:
    """The rows of one vocabulary matrix that one task trains, on this rank.

    Attributes:
        values: `[R, H]` in the compute dtype, without a gradient.
        gradient: `[R, H]`; passes add to it.
        tokens: `[R]` int64, the token of each row, ascending, on every tensor rank all of them; None: the rows of all
            tokens of this rank's part of the vocabulary, in order.
        held: The rows whose tokens belong to this rank's part of the vocabulary.
    """

    values: Tensor
    gradient: Tensor
    tokens: Tensor | None
    held: slice


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's part of a vocabulary matrix of the backbone, and the tasks with rows of their own in it.

    Attributes:
        start, stop: First token, and one past the last; padding rows are left out.
        read: Returns a copy of its `[V, H]` weights.
        untrained: A token whose row gets no gradient from lookups, if any (`padding_idx` of `torch.nn.Embedding`).
        own: Rows by task.
    """

    start: int
    stop: int
    read: Callable[[], Tensor]
    untrained: int | None = None
    own: dict[str, OwnRows] = field(default_factory=dict)

    def of(self, ranges: Mapping[str, tuple[int, int]]) -> tuple[tuple[slice, OwnRows], ...]:
        """The rows of a micro-batch whose tasks have rows of their own here.

        Args:
            ranges: Task to its `(start, stop)` rows.
        """
        return tuple(
            (slice(*rows), self.own[name])
            for name, rows in ranges.items()
            if name in self.own and rows[0] < rows[1]
        )


@dataclass(frozen=True)
class Lookup:
    """The lookup of a micro-batch's tokens in tasks' own rows of the embedding.

    Attributes:
        tokens: `[rows]` int64 of the whole micro-batch.
        own: Which rows of it have rows of their own.
        first: The first row of the micro-batch that this rank has.
        divided: Whether tensor ranks have different rows of the micro-batch.
        group: Tensor ranks among which the vocabulary is divided; None for one rank.
    """

    part: VocabularyPart
    tokens: Tensor
    own: Sequence[tuple[slice, OwnRows]]
    first: int
    divided: bool
    group: dist.ProcessGroup | None

    def replace(self, hidden: Tensor, anchor: Tensor) -> Tensor:
        """Write tasks' own rows over those of the backbone.

        Args:
            hidden: `[T, H]` looked up in the backbone's embedding; it is overwritten, and needs no gradient.
            anchor: Requires a gradient and gets none.

        Returns:
            `[T, H]`, whose backward pass adds to the gradients of the tasks' rows.
        """
        with torch.no_grad():
            self._write(hidden)
        replaced: Tensor = _OwnLookup.apply(anchor, hidden, self)  # type: ignore[no-untyped-call]
        return replaced

    def _here(self, rows: slice, count: int) -> tuple[slice, slice]:
        """Rows of a task that this rank has: among its `count` rows, and among the task's."""
        start = min(max(rows.start - self.first, 0), count)
        stop = min(max(rows.stop - self.first, 0), count)
        shift = self.first - rows.start
        return slice(start, stop), slice(start + shift, stop + shift) if start < stop else slice(0, 0)

    @property
    def _whole(self) -> list[tuple[slice, OwnRows]]:
        """Those of tasks with a matrix of their own, which tensor ranks divide."""
        return [(rows, trained) for rows, trained in self.own if trained.tokens is None]

    def _write(self, hidden: Tensor) -> None:
        parts = [self._looked_up(rows, trained) for rows, trained in self._whole]
        _sum(parts, self.group)
        for (rows, _), values in zip(self._whole, parts, strict=True):
            here, there = self._here(rows, hidden.shape[0])
            hidden[here] = values[there]
        for rows, trained in self.own:
            if trained.tokens is not None:
                here, there = self._here(rows, hidden.shape[0])
                at, known = _places(self.tokens[rows][there], trained.tokens)
                hidden[here] = torch.where(known.unsqueeze(1), trained.values[at], hidden[here])

    def _looked_up(self, rows: slice, trained: OwnRows) -> Tensor:
        """`[n, H]` of a task's tokens in this rank's part of its matrix; zero for tokens of other ranks."""
        tokens = self.tokens[rows]
        if not trained.values.shape[0]:
            return trained.values.new_zeros(tokens.shape[0], trained.values.shape[1])
        at, held = self._local(tokens, trained)
        return torch.where(held.unsqueeze(1), trained.values[at], trained.values.new_zeros(()))

    def _local(self, tokens: Tensor, trained: OwnRows) -> tuple[Tensor, Tensor]:
        """Places of tokens in this rank's part, and whether they are in it."""
        at = tokens - self.part.start
        held = (at >= 0) & (at < trained.values.shape[0])
        return at.clamp(0, trained.values.shape[0] - 1), held

    def add_gradient(self, gradient: Tensor) -> None:
        """Add to the gradients of the tasks' rows.

        Args:
            gradient: `[T, H]` of the rows that `replace` returned.
        """
        count = gradient.shape[0]
        whole = []
        for rows, _ in self._whole:
            here, there = self._here(rows, count)
            own_part = gradient[here]
            if self.divided:  # each rank has the gradient of its rows, for tokens of any rank
                own_part = gradient.new_zeros(rows.stop - rows.start, gradient.shape[1])
                own_part[there] = gradient[here]
            whole.append(own_part)
        if self.divided:
            _sum(whole, self.group)
        for (rows, trained), own_part in zip(self._whole, whole, strict=True):
            if trained.gradient.shape[0]:
                tokens = self.tokens[rows]
                self._scatter(own_part, tokens, *self._local(tokens, trained), trained.gradient)
        for rows, trained in self.own:
            if trained.tokens is not None:
                here, there = self._here(rows, count)
                tokens = self.tokens[rows][there]
                at, known = _places(tokens, trained.tokens)
                if not self.divided:  # every tensor rank has this gradient, and their sum is taken
                    known = known & (at >= trained.held.start) & (at < trained.held.stop)
                self._scatter(gradient[here], tokens, at, known, trained.gradient)

    def _scatter(self, gradient: Tensor, tokens: Tensor, at: Tensor, known: Tensor, into: Tensor) -> None:
        if self.part.untrained is not None:
            known = known & (tokens != self.part.untrained)
        chosen = torch.where(known.unsqueeze(1), gradient, gradient.new_zeros(()))
        into.index_add_(0, at, chosen.to(into.dtype))


class _OwnLookup(torch.autograd.Function):
    """Identity, whose backward pass adds to the gradients of tasks' own rows."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, lookup: Lookup) -> Tensor:
        ctx.lookup = lookup
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.lookup.add_gradient(gradient)
        return None, None, None


def _places(tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Places of tokens among ascending `known` ones, and whether they are among them."""
    at = torch.searchsorted(known, tokens).clamp_(max=known.shape[0] - 1)
    return at, known[at] == tokens


def _sum(parts: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors over ranks, in place, in one collective."""
    if group is None or not parts:
        return
    together = parts[0] if len(parts) == 1 else torch.cat(parts)
    dist.all_reduce(together, group=group)
    if len(parts) > 1:
        parts[:] = together.split([part.shape[0] for part in parts])
