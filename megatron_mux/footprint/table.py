"""Tables of a stage's bytes, linear in what a micro-batch contains, and how deeper stages follow from shallow ones.

A pass is a sequence of moments, one for each allocation. What a stage holds at a moment is linear in the features of
`footprint.content`; the peak of a pass is the largest of its moments. Only moments that can be largest are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_mux.footprint.content import Array

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
    """

    kept: Array
    deeper: Array
    moments: Array
    reach: Array

    def at(self, features: Array, further: int) -> tuple[Array, Array]:
        """`[B]` bytes kept, and the most that is taken besides while a micro-batch is computed.

        Args:
            features: `[B, F]` of micro-batches.
            further: Layers of the stage beyond those of the table.
        """
        more = further * (features @ self.deeper)
        kept = np.maximum(features @ self.kept + more, 0.0)
        held = features @ self.moments.T + more[:, None] * self.reach
        return kept, np.maximum(held.max(axis=1) - kept, 0.0)


@dataclass(frozen=True)
class Lasting:
    """Bytes that last from step to step on a stage of `StageTable.layers` layers.

    Attributes:
        backbone: Weights, and what else is there without a task.
        tasks: `[K]` of each task of a signature.
        updating: `[K]` temporary bytes of its optimizer's step.
    """

    backbone: float
    tasks: Array
    updating: Array


@dataclass(frozen=True)
class StageTable:
    """Bytes of one kind of stage.

    Attributes:
        layers: Of the stage that was run.
        lasting, deeper: What lasts on it, and more for each further layer.
        passes: By group: every signature alone, pairs, and all together.
    """

    layers: int
    lasting: Lasting
    deeper: Lasting
    passes: Mapping[Group, PassTable]

    def lasts(self, counts: Array, layers: int) -> float:
        """Bytes that last with so many tasks of each signature.

        Args:
            counts: `[K]` tasks.
            layers: Of the stage.
        """
        further = layers - self.layers
        backbone = self.lasting.backbone + further * self.deeper.backbone
        return float(backbone + counts @ (self.lasting.tasks + further * self.deeper.tasks))

    def to_json(self) -> dict[str, Any]:
        """As plain data; `of_json` reads it."""
        return {
            "layers": self.layers,
            "lasting": _plain(self.lasting),
            "deeper": _plain(self.deeper),
            "passes": [{"group": group, **_plain(own)} for group, own in self.passes.items()],
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> StageTable:
        """Read what `to_json` wrote."""
        passes = {
            tuple(own["group"]): PassTable(*(_array(own[name]) for name in PassTable.__annotations__))
            for own in data["passes"]
        }
        lasting, deeper = (
            Lasting(own["backbone"], _array(own["tasks"]), _array(own["updating"]))
            for own in (data["lasting"], data["deeper"])
        )
        return cls(data["layers"], lasting, deeper, passes)


def _plain(own: PassTable | Lasting) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(own).items()}


def _array(values: Sequence[Any]) -> Array:
    return np.array(values, np.float64)
