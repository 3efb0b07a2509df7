"""The low-rank terms of all tasks at one BaseOp, as kernels take them.

A term adds `scale * b * ((d * (A dropout(x))) B^T)` to its columns of the BaseOp's output, in the rows of its task. The
factors d and b are one, unless the term trains them in the place of A and B (VeRA). A task has a term for each module
of the BaseOp that it targets.

Terms of two more forms act on single rows of a BaseOp's finished output, or of its input: see `grouped_rows`. A
bottleneck has biases and an activation between A and B; factors alone are a term of rank 0, whose b multiplies the
columns.

Shapes: K and N width of the BaseOp's input and output on this rank, R rank of a term, n its columns, W width of the
latent tensor, which has the products of all of a row's terms side by side.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.dropout import halves, threshold
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.columns import Columns, overlap
from megatron_mux.runtime import to_device

LATENT_MULTIPLE = 16
"""Latent columns of a row come in whole 32 bytes, so that rows of the latent tensor are aligned."""

ACTIVATIONS = ("relu", "gelu", "silu", "tanh")
"""Activations of bottlenecks; in `ENTRY` they are numbers in this order."""

_MOST_WIDTHS = 256
"""Combinations of tasks whose width is remembered."""

ENTRY = (
    "down", "up", "down_gradient", "up_gradient", "down_factors", "up_factors", "down_factors_gradient",
    "up_factors_gradient", "columns", "column_count", "rank", "latent", "first_feature", "key_low", "key_high",
    "threshold", "scale", "keep_scale", "down_bias", "up_bias", "down_bias_gradient", "up_bias_gradient", "activation",
    "sharing",
)  # fmt: skip
"""Fields of a row of `TermTable.entries`: addresses (0: no such tensor), sizes, and the bits of fp64 numbers.

`sharing`: of the first of a task's terms with the same output columns, how many there are: they are next to each other,
and one program adds them all. Of the others, 0.
"""


@dataclass(frozen=True)
class BiasedActivation:
    """What makes a term a bottleneck: `scale * (B activation(A x + down_bias) + up_bias)`.

    Attributes:
        name: One of `ACTIVATIONS`.
        down_bias, up_bias: `[R]` and `[n]`, in the dtype of the computation.
        down_bias_gradient, up_bias_gradient: Like the biases, in the dtype of parameters: gradients are added here.
    """

    name: str
    down_bias: Tensor
    up_bias: Tensor
    down_bias_gradient: Tensor
    up_bias_gradient: Tensor


@dataclass(frozen=True)
class Term:
    """One low-rank product of one task.

    Attributes:
        down: `[R, K]` A in the dtype of the computation.
        up: `[n, R]` B likewise.
        columns: `[n]` int32 output columns; None: all of them, in order.
        down_gradient, up_gradient: Like A and B, in the dtype of parameters: gradients are added here. None: they are
            fixed, and the factors are trained.
        down_factors, up_factors: `[R]` d and `[n]` b; None: ones.
        down_factors_gradient, up_factors_gradient: Like the factors.
        dropout: Probability of dropping an entry of the input while training.
        key: Of the dropout mask: see `dropout.keep_mask`.
        first_feature: Global index of the input's first feature on this rank, for the mask.
        activation: Of a bottleneck, with its biases; None: the term is none.
        known_place: What `columns` are; None: they are read for it, for which the host waits if they are on a GPU.
    """

    slot: int
    down: Tensor
    up: Tensor
    scale: float
    columns: Tensor | None = None
    down_gradient: Tensor | None = None
    up_gradient: Tensor | None = None
    down_factors: Tensor | None = None
    up_factors: Tensor | None = None
    down_factors_gradient: Tensor | None = None
    up_factors_gradient: Tensor | None = None
    dropout: float = 0.0
    key: int = 0
    first_feature: int = 0
    activation: BiasedActivation | None = None
    known_place: Columns | None = None

    @classmethod
    def of_factors(
        cls,
        slot: int,
        factors: Tensor,
        gradient: Tensor,
        columns: Tensor | None,
        known_place: Columns | None = None,
    ) -> Term:
        """Factors `[n]` that multiply columns, with their gradient `[n]`."""
        n = factors.shape[0]
        none, fixed = factors.new_empty(0, n), factors.new_empty(n, 0)
        return cls(
            slot,
            none,
            fixed,
            1.0,
            columns,
            up_factors=factors,
            up_factors_gradient=gradient,
            known_place=known_place,
        )

    @property
    def rank(self) -> int:
        """R."""
        return int(self.down.shape[0])

    @cached_property
    def place(self) -> Columns:
        """The term's columns of the output."""
        return self.known_place or Columns.of(self.columns, int(self.up.shape[0]))


@dataclass(frozen=True)
class Stack:
    """Terms of a task whose A lie on top of each other in memory and get the same input: one product serves them.

    Attributes:
        terms: With their latent columns.
        down: `[R of all, K]`.
        down_gradient: Likewise, unless they train factors.
    """

    terms: tuple[tuple[Term, slice], ...]
    down: Tensor
    down_gradient: Tensor | None

    @property
    def term(self) -> Term:
        """The first: whose dropout and factors are those of all."""
        return self.terms[0][0]

    @property
    def latent(self) -> slice:
        """Their latent columns."""
        return slice(self.terms[0][1].start, self.terms[-1][1].stop)


class TermTable:
    """The terms at one BaseOp; made anew when a task comes or goes, never within a step.

    Terms of a task have either the same output columns or none in common; factors alone (rank 0) have none in common.

    Args:
        terms: Of all tasks. A task's terms that share columns come next to each other in the table.

    Raises:
        ValueError: Terms of a task overlap in some of their columns.

    Attributes:
        of_slot: The terms of each slot that has any, with the first of their columns in the latent tensor.
        most_terms: Of one task.
        largest_rank: R of the widest term.
        has_dropout: Whether any term drops entries while training.
        factor_dtype: Of the factors d and b; None if no term has them.
        has_biases: Whether the terms are bottlenecks; then all of them are.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self.of_slot: dict[int, tuple[tuple[Term, int], ...]] = {}
        self._sharing: list[int] = []
        for slot, of_slot in groupby(sorted(terms, key=lambda term: term.slot), key=lambda term: term.slot):
            at, placed = 0, []
            for sharing in _by_columns(list(of_slot)):
                for number, term in enumerate(sharing):
                    placed.append((term, at))
                    self._sharing.append(0 if number else len(sharing))
                    at += term.rank
            self.of_slot[slot] = tuple(placed)
        self._widths: dict[tuple[int, ...], int] = {}
        self.most_terms = max(map(len, self.of_slot.values()), default=0)
        self.largest_rank = max((term.rank for term in terms), default=0)
        self.device = terms[0].down.device if terms else torch.device("cpu")
        self.has_dropout = any(term.dropout > 0 for term in terms)
        factors = (f for term in terms for f in (term.down_factors, term.up_factors) if f is not None)
        self.factor_dtype = next((f.dtype for f in factors), None)
        self.has_biases = any(term.activation is not None for term in terms)
        assert not self.has_biases or all(term.activation is not None for term in terms)

    def any_of(self, groups: RowGroups) -> bool:
        """Whether some task with rows in a micro-batch has terms here."""
        return not groups.slot_set.isdisjoint(self.of_slot)

    def width(self, groups: RowGroups) -> int:
        """W, a multiple of 16: what the tasks with rows in a micro-batch need."""
        width = self._widths.get(groups.slots)
        if width is None:
            last = [self.of_slot[slot][-1] for slot in groups.slots if slot in self.of_slot]
            widest = max((latent + term.rank for term, latent in last), default=0)
            if len(self._widths) >= _MOST_WIDTHS:
                self._widths.clear()
            width = self._widths[groups.slots] = -(-widest // LATENT_MULTIPLE) * LATENT_MULTIPLE
        return width

    @cached_property
    def stacks(self) -> dict[int, tuple[Stack, ...]]:
        """The terms of each slot that has any, stacked where they can be."""
        return {slot: tuple(_stacked(terms)) for slot, terms in self.of_slot.items()}

    @cached_property
    def entries(self) -> Tensor:
        """`[terms, len(ENTRY)]` int64 on the device, by slot; see `ENTRY`."""
        placed = (both for terms in self.of_slot.values() for both in terms)
        rows = [[*_entry(*both), sharing] for both, sharing in zip(placed, self._sharing, strict=True)]
        return to_device(torch.tensor(rows, dtype=torch.int64).view(-1, len(ENTRY)), self.device)

    @cached_property
    def first_entry(self) -> Tensor:
        """`[slots + 1]` int32 on the device: a slot's entries begin here and end where the next one's begin."""
        slots = max(self.of_slot, default=-1) + 1
        counts = [len(self.of_slot.get(slot, ())) for slot in range(slots)]
        return to_device(torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32), self.device)

    def bring(self) -> None:
        """Copy the table to the device, unless it is there, so that the first launch has nothing to prepare."""
        if self.of_slot:
            _ = self.entries, self.first_entry, self.alignment

    @cached_property
    def alignment(self) -> int:
        """The largest of 8, 4, 2 and 1 that divides every rank, if kernels can access rows 16 bytes at once; else 0.

        It is one number for all tasks, so that one launch computes them, and decides about the width of accesses alone:
        products have the same instructions in the same order whatever it is, and sums over rows have an order of their
        own (`low_rank.triton_device._sum_rows`). So a task's bits do not depend on whether its neighbours are aligned.

        For that, addresses have to be multiples of 16 bytes, numbers of columns multiples of 8, lists of columns made
        of aligned runs of 8, and first features even (two share a hash of the dropout mask).
        """
        terms = [term for pairs in self.of_slot.values() for term, _ in pairs]
        return math.gcd(8, *(term.rank for term in terms)) if all(map(_is_aligned, terms)) else 0


def _by_columns(terms: Sequence[Term]) -> list[list[Term]]:
    """A task's terms, those with the same columns together; in their order otherwise."""
    shared: dict[tuple[tuple[int, int], ...], list[Term]] = {}
    for term in terms:
        shared.setdefault(term.place.ranges, []).append(term)
    if any(ranges and len(ts) > 1 and not ts[0].rank for ranges, ts in shared.items()):
        raise ValueError(f"factors of slot {terms[0].slot} share output columns")
    if any(overlap(a, b) for a, b in combinations(shared, 2)):
        raise ValueError(
            f"terms of slot {terms[0].slot} overlap in some of their output columns, but not in all"
        )
    return list(shared.values())


def _is_aligned(term: Term) -> bool:
    addressed = [term.down, term.up, term.down_gradient, term.up_gradient]
    if term.activation is not None:
        addressed += [term.activation.down_bias, term.activation.up_bias]
    uneven = term.up.shape[0] % 8 or term.first_feature % 2
    if uneven or any(address(tensor) % 16 for tensor in addressed):
        return False
    place = term.place
    return place.index is None and not (place.start % 8 or place.run % 8 or place.distance % 8)


def _stacked(placed: Sequence[tuple[Term, int]]) -> Iterator[Stack]:
    """One stack if the terms share their input and lie next to each other; else one for each."""
    terms = [(term, slice(latent, latent + term.rank)) for term, latent in placed]
    downs, gradients = [term.down for term, _ in terms], [term.down_gradient for term, _ in terms]
    whole, gradient = _joined(downs), _joined(gradients)
    if whole is not None and gradient is not None and not any(term.dropout for term, _ in terms):
        yield Stack(tuple(terms), whole, gradient)
        return
    for term, latent in terms:
        yield Stack(((term, latent),), term.down, term.down_gradient)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Matrices of one width that lie one behind the other in one storage, as one; None if they do not."""
    first, rows, end = parts[0], 0, None
    for part in parts:
        if part is None or first is None or part.shape[1] != first.shape[1]:
            return None
        if end not in (None, part.storage_offset()) or not _same_storage(part, first):
            return None
        rows, end = rows + part.shape[0], part.storage_offset() + part.numel()
    assert first is not None
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())


def _same_storage(a: Tensor, b: Tensor) -> bool:
    same: bool = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same


def _entry(term: Term, latent: int) -> list[int]:
    """A term as a row of `TermTable.entries`."""
    addressed = (
        term.down, term.up, term.down_gradient, term.up_gradient, term.down_factors, term.up_factors,
        term.down_factors_gradient, term.up_factors_gradient, term.columns,
    )  # fmt: skip
    a = term.activation
    biases = (a.down_bias, a.up_bias, a.down_bias_gradient, a.up_bias_gradient) if a else (None,) * 4
    assert all(tensor is None or tensor.is_contiguous() for tensor in (*addressed, *biases))
    low, high = halves(term.key)
    return [
        *map(address, addressed),
        int(term.up.shape[0]),
        term.rank,
        latent,
        term.first_feature,
        low,
        high,
        threshold(term.dropout),
        bits(term.scale),
        bits(1.0 / (1.0 - term.dropout)),
        *map(address, biases),
        ACTIVATIONS.index(a.name) if a else 0,
    ]


def address(tensor: Tensor | None) -> int:
    """Where a tensor lies in memory; 0 if it is None or fake."""
    return 0 if tensor is None or isinstance(tensor, FakeTensor) else tensor.data_ptr()


def bits(value: float) -> int:
    """The bits of an fp64 number as an integer."""
    integer: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return integer
