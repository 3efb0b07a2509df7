"""Tables of a stage's bytes, linear in what a micro-batch contains, and how deeper stages follow from shallow ones.

A pass is a sequence of moments, one for each allocation. What a stage holds at a moment is linear in the features of
`footprint.content`; the peak of a pass is the largest of its moments. Only moments that can be largest are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from megatron_mux.footprint.content import COUNTS, Array

LOSS = "the loss"
"""Name of its moments."""
_CHUNK = COUNTS.index("labels of a chunk")
Group = tuple[int, ...]
"""Signatures whose rows a micro-batch has, ascending."""


@dataclass(frozen=True)
class PassTable:
    """Bytes of micro-batches with rows of a group's signatures, on a stage of `StageTable.layers` layers.

    Attributes:
        kept: `[F]` from the forward to the backward pass.
        deeper: `[F]` more that is kept for each further layer.
        moments: `[M, F]` above what lasts and other micro-batches keep, its own kept bytes included.
        reach: `[M]` 1 where further layers hold what they keep, else 0.
        names: `[M]` of the moments, in words; several may have one.
    """

    kept: Array
    deeper: Array
    moments: Array
    reach: Array
    names: tuple[str, ...] = ()

    def at(self, features: Array, further: int) -> tuple[Array, Array]:
        """`[B]` bytes kept, and the most that is taken besides while a micro-batch is computed.

        Args:
            features: `[B, F]` of micro-batches.
            further: Layers of the stage beyond those of the table.
        """
        kept, taken = self._each(features, further)
        return kept, taken.max(axis=1)

    def named(self, features: Array, further: int) -> Mapping[str, tuple[float, float]]:
        """Of one micro-batch, by name, what is taken at most besides what it keeps, and logits among that.

        Args:
            features, further: See `at`.
        """
        _, taken = self._each(features, further)
        logits = self.moments[:, _CHUNK] * features[0, _CHUNK]
        found: dict[str, tuple[float, float]] = {}
        for name, size, of_logits in zip(self.names, taken[0].tolist(), logits.tolist(), strict=True):
            # Where there are no logits the term is not quite zero.
            found[name] = max(
                found.get(name, (0.0, 0.0)), (size, min(size, of_logits) if of_logits > 4096 else 0.0)
            )
        return found

    def _each(self, features: Array, further: int) -> tuple[Array, Array]:
        """`[B]` bytes kept, and `[B, M]` what is taken besides at every moment."""
        more = further * (features @ self.deeper)
        kept = np.maximum(features @ self.kept + more, 0.0)
        held = features @ self.moments.T + more[:, None] * self.reach
        return kept, np.maximum(held - kept[:, None], 0.0)


@dataclass(frozen=True)
class PersistentBytes:
    """Bytes that last from step to step on a stage of `StageTable.layers` layers.

    Attributes:
        backbone: Weights, and what else is there without a task.
        tasks: `[K]` of each task of a signature.
        updating: `[K]` temporary bytes of its optimizer's step.
        gradients, optimizer: `[K]` of its bytes.
    """

    backbone: float
    tasks: Array
    updating: Array
    gradients: Array
    optimizer: Array


OF_TASKS = ("tasks", "updating", "gradients", "optimizer")
"""What `PersistentBytes` has of tasks."""


@dataclass(frozen=True)
class StageTable:
    """Bytes of one kind of stage.

    Attributes:
        layers: Of the stage that was run.
        persistent, deeper: What lasts on it, and more for each further layer.
        passes: By group: every signature alone, and one of each family together.
    """

    layers: int
    persistent: PersistentBytes
    deeper: PersistentBytes
    passes: Mapping[Group, PassTable]

    def backbone(self, layers: int) -> float:
        """Bytes that last of the backbone on a stage of so many layers."""
        return self.persistent.backbone + (layers - self.layers) * self.deeper.backbone

    def of_tasks(
        self, counts: Array, layers: int, what: Literal["tasks", "gradients", "optimizer"] = "tasks"
    ) -> float:
        """Bytes that last with so many tasks of each signature.

        Args:
            counts: `[K]` tasks.
            what: All, or those of gradients or of the optimizer's state.
        """
        each, deeper = getattr(self.persistent, what), getattr(self.deeper, what)
        return float(counts @ (each + (layers - self.layers) * deeper))

    def elsewhere(self, share: float, in_use: float, kept: float, held: float) -> StageTable:
        """See `Memory.elsewhere`.

        Args:
            share: Of the weights that a rank keeps on its device between uses.
            in_use: Bytes of weights that are in place at a time.
            kept, held: More bytes for each row that are kept, and held at every moment.
        """
        passes = {}
        for group, own in self.passes.items():
            more, moments = own.kept.copy(), own.moments.copy()
            rows = slice(len(COUNTS), (len(more) + len(COUNTS)) // 2)
            more[rows] += kept
            moments[:, rows] += held
            moments[:, 0] += in_use
            passes[group] = replace(own, kept=more, moments=moments)
        persistent, deeper = (
            replace(own, backbone=share * own.backbone) for own in (self.persistent, self.deeper)
        )
        return replace(self, persistent=persistent, deeper=deeper, passes=passes)

    def to_json(self) -> dict[str, Any]:
        """As plain data; `of_json` reads it."""
        return {
            "layers": self.layers,
            "lasting": _plain(self.persistent),
            "deeper": _plain(self.deeper),
            "passes": [{"group": group, **_plain(own)} for group, own in self.passes.items()],
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> StageTable:
        """Read what `to_json` wrote."""
        passes = {
            tuple(own["group"]): PassTable(
                _array(own["kept"]),
                _array(own["deeper"]),
                _array(own["moments"]),
                _array(own["reach"]),
                tuple(own["names"]),
            )
            for own in data["passes"]
        }
        persistent, deeper = (
            PersistentBytes(own["backbone"], *(_array(own[name]) for name in OF_TASKS))
            for own in (data["lasting"], data["deeper"])
        )
        return cls(data["layers"], persistent, deeper, passes)


def _plain(own: PassTable | PersistentBytes) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(own).items()}


def _array(values: Sequence[Any]) -> Array:
    return np.array(values, np.float64)
