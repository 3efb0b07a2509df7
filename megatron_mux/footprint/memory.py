"""The memory of a run's stages from tables: what lasts, and what micro-batches keep and take (equation 5 of MuxTune).

Rows of several signatures are priced from tables of each signature and of each pair: what one signature's adapters keep
of all rows, others may keep too. Signatures are added one after another, each beside the one with which it shares most,
along the heaviest spanning tree of what pairs share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_mux.footprint.content import ATTENTION, Array, Contents
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group, StageTable
from megatron_mux.pipeline.transfers import received_ahead, sends_kept

_SHARED_AT = 1 << 12
"""Rows, half of them labelled, at which signatures are compared for what they share."""


@dataclass(frozen=True)
class Taken:
    """`[B, S]` bytes of micro-batches.

    Attributes:
        kept: From the forward to the backward pass.
        working: The most that is held besides while one is computed.
    """

    kept: Array
    working: Array


@dataclass(frozen=True)
class Memory:
    """The memory of tasks on a backbone divided into stages.

    Attributes:
        signatures: Of the tasks.
        tables: Of each stage; stages of one kind share theirs.
        layers: How many each stage has.
        chunk: Rows whose logits are computed at once.
        message: Bytes of a row's hidden states on a rank.
        ranks: Of the pipeline.
        sends_zeros: Whether the first stage keeps zeros to send where memory runs out.
    """

    signatures: Sequence[Signature]
    tables: Sequence[StageTable]
    layers: Sequence[int]
    chunk: int
    message: float = 0.0
    ranks: int = 1
    sends_zeros: bool = True

    def lasting(self, counts: Array) -> Array:
        """`[S]` bytes that last with so many tasks of each signature; one of a lower rank is less than one."""
        return np.array([own.lasts(counts, n) for own, n in zip(self.tables, self.layers, strict=True)])

    def updating(self, counts: Array) -> Array:
        """`[S]` temporary bytes of an optimizer's step, of the task that takes most; `counts` as for `lasting`."""
        steps = [
            own.lasting.updating + (n - own.layers) * own.deeper.updating
            for own, n in zip(self.tables, self.layers, strict=True)
        ]
        found: Array = (np.array(steps) * (counts > 0)).max(axis=1)
        return found

    def passes(self, contents: Contents, in_step: float = np.inf) -> Taken:
        """Bytes of micro-batches on every stage.

        Args:
            contents: The micro-batches.
            in_step: The most micro-batches of a step.
        """
        found = Taken(*(np.zeros((len(contents.rows), len(self.tables))) for _ in range(2)))
        patterns, which = np.unique(contents.rows > 0, axis=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            group = tuple(np.flatnonzero(pattern).tolist())
            at = np.flatnonzero(which.reshape(-1) == number)
            if not group:
                continue
            onto = self._highest(group)
            own, group = contents.of(at).moved(onto), tuple(sorted({onto[i] for i in group}))
            for stage, table in enumerate(self.tables):
                found.kept[at, stage], found.working[at, stage] = self._taken(table, stage, group, own)
        total = contents.rows.sum(axis=1)[:, None] * self.message
        ends = np.arange(len(self.tables))
        found.kept[:] += total * ((ends > 0).astype(float) + (ends < len(self.tables) - 1))
        found.working[:] += total * (
            self._messages(in_step) + (ends < len(self.tables) - 1)
        )  # and the gradient in use
        return found

    def _highest(self, group: Group) -> list[int]:
        """For each signature the one of its family with the highest rank in a group: rows of both take the same."""
        top = {self.signatures[i].family: i for i in sorted(group, key=lambda i: self.signatures[i].rank)}
        return [top.get(own.family, i) for i, own in enumerate(self.signatures)]

    def _taken(self, table: StageTable, stage: int, group: Group, contents: Contents) -> Array:
        """`[2, B]` kept and working bytes of micro-batches with rows of exactly this group's signatures."""
        further = self.layers[stage] - table.layers
        if group in table.passes:
            return np.array(table.passes[group].at(contents.only(group).features(self.chunk), further))
        first, *others = self._tree(stage, group)
        at = _Priced(table, further, self.chunk, contents)
        found = at.all_of(first[0])
        for new, beside in others:
            found = found + at.pair(beside, new, share=0.0) - at.all_of(beside)
            found = found + at.pair(first[0], new, share=1.0) - at.pair(first[0], new, share=0.0)
        return np.maximum(found, 0.0)

    def _tree(self, stage: int, group: Group) -> list[tuple[int, int]]:
        """The signatures in the order in which they are added, and beside which each is."""
        table, further = self.tables[stage], self.layers[stage] - self.tables[stage].layers
        rows = np.zeros((1, 1 + max(group)))
        zeros = np.zeros(1)
        at = _Priced(
            table,
            further,
            self.chunk,
            Contents(rows + _SHARED_AT, rows + _SHARED_AT / 2, zeros, zeros, np.zeros((1, len(ATTENTION)))),
        )
        left, order = list(group[1:]), [(group[0], group[0])]

        def more(new: int, old: int) -> float:
            """Bytes that all rows keep more beside `old` if `new` comes."""
            return float((at.pair(old, new, share=0.0) - at.all_of(old))[0, 0])

        def shared(new: int, old: int) -> float:
            """What both have all rows keep, but for a constant."""
            return more(new, group[0]) - more(group[0], new) - more(new, old)

        while left:
            pairs = [(new, old) for new in left for old, _ in order]
            order.append(max(pairs, key=lambda pair: shared(*pair)))
            left.remove(order[-1][0])
        return order

    def _messages(self, in_step: float) -> Array:
        """`[S]` hidden states or gradients that a stage has received ahead, or has sent and keeps."""
        stages, ranks = len(self.tables), self.ranks
        share = ranks / stages  # a rank's stages share what it keeps
        inputs, gradients = (received_ahead(stages, ranks, backward) for backward in (False, True))
        # What comes ahead and what has been sent is of other micro-batches.
        before = min(inputs + sends_kept(ranks), in_step - 1) * share
        outputs = min(sends_kept(ranks), in_step) * share  # all are sent by the last backward passes
        found = np.zeros(stages)
        found[1:] += before
        found[:-1] += min(gradients, in_step - 1) * share
        found[:-1] += np.maximum(0.0, outputs - np.arange(stages, 1, -1))
        if ranks > 1 and self.sends_zeros:
            found[0] += 1
        return found


@dataclass(frozen=True)
class _Priced:
    """Micro-batches as if all their rows were of one signature or of two."""

    table: StageTable
    further: int
    chunk: int
    contents: Contents

    @cached_property
    def total(self) -> tuple[Array, Array]:
        """`[B]` rows, and labelled ones, of all signatures."""
        return self.contents.rows.sum(axis=1), self.contents.labels.sum(axis=1)

    def all_of(self, signature: int) -> Array:
        """`[2, B]` kept and working bytes if all rows were of this signature."""
        rows, labels = (own[:, None] for own in self.total)
        return self._at((signature,), rows, labels)

    def pair(self, one: int, other: int, share: float) -> Array:
        """`[2, B]` the same with all rows of `one`, but a share of the other's own rows, in presence of both."""
        columns = []
        for own, total in zip((self.contents.rows, self.contents.labels), self.total, strict=True):
            others = own[:, other] * share
            both = {one: total - others, other: others}
            columns.append(np.stack([both[i] for i in sorted(both)], axis=1))
        return self._at((min(one, other), max(one, other)), *columns)

    def _at(self, group: Group, rows: Array, labels: Array) -> Array:
        features = replace(self.contents, rows=rows, labels=labels).features(self.chunk)
        return np.array(self.table.passes[group].at(features, self.further))
