"""The memory of a run's stages from tables: what lasts, and what micro-batches keep and take (equation 5 of MuxTune).

A micro-batch of one signature is priced by that signature's table; one of several by the table of all, with no rows of
those that are absent: what one signature's adapters keep of all rows, others may keep too, so that is a bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_mux.footprint.content import Array, Contents
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group, StageTable
from megatron_mux.pipeline.transfers import received_ahead, sends_kept


@dataclass(frozen=True)
class Taken:
    """`[B, S]` bytes of micro-batches.

    Attributes:
        kept: From the forward to the backward pass.
        working: The most that is held besides while one is computed.
    """

    kept: Array
    working: Array


def groups_of(signatures: Sequence[Signature]) -> list[Group]:
    """The groups that tables are of: each signature alone, and all families together, each with its highest rank."""
    singles: list[Group] = [(i,) for i in range(len(signatures))]
    every = tuple(sorted(set(_highest(signatures, range(len(signatures))))))
    return singles if len(every) == 1 else [*singles, every]


def _highest(signatures: Sequence[Signature], among: Iterable[int]) -> list[int]:
    """For each signature the one of its family with the highest rank among these: rows of both take the same."""
    top = {signatures[i].family: i for i in sorted(among, key=lambda i: signatures[i].rank)}
    return [top.get(own.family, i) for i, own in enumerate(signatures)]


@dataclass(frozen=True)
class Memory:
    """The memory of tasks on a backbone divided into stages.

    Attributes:
        tables: Of each stage; stages of one kind share theirs.
        layers: How many each stage has.
        chunk: Rows whose logits are computed at once.
        message: Bytes of a row's hidden states on a rank.
        ranks: Of the pipeline.
        sends_zeros: Whether the first stage keeps zeros to send where memory runs out.
        sums: The most bytes of the buffer in which ranks sum the gradients of all tasks; 0: a single one has them.
        referring: Signatures whose rows have a pass with a reference, too: its hidden states are in the same messages.
    """

    signatures: Sequence[Signature]
    tables: Sequence[StageTable]
    layers: Sequence[int]
    chunk: int
    message: float = 0.0
    ranks: int = 1
    sends_zeros: bool = True
    sums: float = 0.0
    referring: Collection[int] = ()

    def persistent(self, counts: Array) -> Array:
        """`[S]` bytes that last with so many tasks of each signature; one of a lower rank is less than one."""
        return sum(self.persistent_parts(counts).values(), np.zeros(len(self.tables)))

    def persistent_parts(self, counts: Array) -> dict[str, Array]:
        """`[S]` of them each: of the backbone, of adapters, gradients and optimizers, and of the buffer for sums."""
        each = list(zip(self.tables, self.layers, strict=True))
        backbone = np.array([own.backbone(n) for own, n in each])
        tasks, gradients, optimizer = (
            np.array([own.of_tasks(counts, n, what) for own, n in each])
            for what in ("tasks", "gradients", "optimizer")
        )
        return {
            "backbone": backbone,
            "adapters": tasks - gradients - optimizer,
            "gradients": gradients,
            "optimizer": optimizer,
            "sums": np.minimum(gradients, self.sums),
        }

    def updating(self, counts: Array) -> Array:
        """`[S]` temporary bytes of an optimizer's step, of the task that takes most; `counts` as for `persistent`."""
        steps = [
            own.persistent.updating + (n - own.layers) * own.deeper.updating
            for own, n in zip(self.tables, self.layers, strict=True)
        ]
        found: Array = (np.array(steps) * (counts > 0)).max(axis=1)
        return found

    def passes(self, contents: Contents, in_step: float = np.inf) -> Taken:
        """Bytes of micro-batches on every stage.

        Args:
            in_step: The most micro-batches of a step.
        """
        found = Taken(*(np.zeros((len(contents.rows), len(self.tables))) for _ in range(2)))
        patterns, which = np.unique(contents.rows > 0, axis=0, return_inverse=True)
        for number, pattern in enumerate(patterns):
            present = np.flatnonzero(pattern).tolist()
            at = np.flatnonzero(which.reshape(-1) == number)
            if not present:
                continue
            group, features = self._features(contents.of(at), present)
            for stage, table in enumerate(self.tables):
                further = self.layers[stage] - table.layers
                found.kept[at, stage], found.working[at, stage] = table.passes[group].at(features, further)
        sent = contents.rows.sum(axis=1) + contents.rows[:, list(self.referring)].sum(axis=1)
        total = sent[:, None] * self.message
        ends = np.arange(len(self.tables))
        found.kept[:] += total * ((ends > 0).astype(float) + (ends < len(self.tables) - 1))
        found.working[:] += total * (
            self._messages(in_step) + (ends < len(self.tables) - 1)
        )  # and the gradient in use
        return found

    def moments(self, contents: Contents) -> list[Mapping[str, tuple[float, float]]]:
        """On every stage by name, what one micro-batch takes at most besides what it keeps, without messages; and
        logits among that.
        """
        group, features = self._features(contents, np.flatnonzero(contents.rows[0] > 0).tolist())
        return [
            table.passes[group].named(features, layers - table.layers)
            for table, layers in zip(self.tables, self.layers, strict=True)
        ]

    def elsewhere(self, share: float, in_use: Sequence[float], recomputed: bool) -> Memory:
        """The same where frozen weights are in place only while they are used: a bound from above.

        Both ends of a pipeline then keep more hidden states, and every moment has at most one more.

        Args:
            share: Of the weights that a rank keeps on its device between uses.
            in_use: Bytes of weights that are in place at a time, on each stage.
            recomputed: Whether layers are computed again: they keep their inputs anyway.
        """
        last = len(self.tables) - 1
        tables = []
        for stage, (table, weights) in enumerate(zip(self.tables, in_use, strict=True)):
            ends = (stage == 0 and not recomputed) + (stage == last)
            tables.append(table.elsewhere(share, weights, ends * self.message, (ends + 1) * self.message))
        return replace(self, tables=tables)

    def _features(self, contents: Contents, present: Sequence[int]) -> tuple[Group, Array]:
        """The group whose table prices micro-batches of these signatures, and their features there."""
        alone = len({self.signatures[i].family for i in present}) == 1
        onto = _highest(self.signatures, present if alone else range(len(self.signatures)))
        group = tuple(sorted({onto[i] for i in present} if alone else set(onto)))
        return group, contents.moved(onto).only(group).features(self.chunk)

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
