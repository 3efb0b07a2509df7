"""Seconds of adapters on each stage: the second term of equation 3, from a profile.

Shapes: B batches, S stages, K tasks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_mux.adapters.costs import Curve
from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.profiler.layer_operators import ORDER
from megatron_mux.fusion.profiler.profile import Profile

Array = npt.NDArray[np.float64]


_Alike = tuple[BaseOpName, list[int], tuple[Curve, ...], npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Tasks with the same adapters at a BaseOp: the BaseOp, the tasks, `[C]` the adapters, `[C, kinds]` how many layers
have each in a kind of stages, and `[S]` the kind of each stage."""


class AdapterSeconds:
    """Seconds of the adapters of tasks."""

    def __init__(self, profile: Profile, loads: Sequence[TaskLoad], stages: Sequence[range]) -> None:
        self._curves, self._description = profile.curves, profile.description
        self._sizes = _measured_sizes(profile.curves)
        self._stages = len(stages)
        self._alike = _alike(loads, stages)

    def of(self, rows: Array) -> Array:
        """`[B, 2, S, ops]` seconds of the adapters: at each BaseOp `max(sum of u_a t_a, max of t_a)`."""
        shape = (len(rows), 2, self._stages, len(ORDER))
        fused, longest = np.zeros(shape), np.zeros(shape)
        for op, tasks, curves, counts, kind in self._alike:
            of_tasks = rows[:, tasks]
            batch, member = np.nonzero(of_tasks)
            if not len(batch):
                continue
            sizes = of_tasks[batch, member]
            starts = np.flatnonzero(np.diff(batch, prepend=-1))
            alone = np.array([self._one(curve, op, sizes) for curve in curves])  # [C, 2, N]
            used = alone.copy()
            for of_curve, curve in zip(used, curves, strict=True):
                if (shares := self._curves.get(f"utilisation:{curve.name}")) is not None:
                    of_curve *= shares.many(sizes)
            place = (batch[starts], slice(None), slice(None), ORDER.index(op))
            total = np.add.reduceat(np.einsum("cwn,cs->nws", used, counts), starts)
            most = np.maximum.reduceat(np.einsum("cwn,cs->nws", alone, counts), starts)
            fused[place] += total[:, :, kind]
            longest[place] = np.maximum(longest[place], most[:, :, kind])
        seconds: Array = np.maximum(fused, longest)
        return seconds

    def _one(self, curve: Curve, op: str, rows: Array) -> Array:
        """`[2, N]` seconds of one adapter: linear in its size between and beyond those that were measured.

        Raises:
            UserError: The profile has none of its kind.
        """
        known = self._sizes.get(f"{curve.name}:{op}", [])
        if not known:
            raise UserError(
                f"the {self._description} has no cost of {curve.name} adapters at {op}: measure it with "
                "megatron-mux profile --force"
            )
        low, high = (self._curves[f"{curve.name}:{op}:{size}"].many(rows) for size in (known[0], known[-1]))
        if len(known) == 1:
            return low
        share = (curve.size - known[0]) / (known[-1] - known[0])
        return np.maximum(0.0, low + share * (high - low))


def _measured_sizes(curves: Iterable[str]) -> dict[str, list[int]]:
    """For each kind of adapter at a BaseOp the sizes that were measured, from the names of a profile's curves."""
    sizes: dict[str, list[int]] = {}
    for name in curves:
        kind, _, measured = name.rpartition(":")
        if kind.count(":") == 1 and measured.isdigit():
            insort(sizes.setdefault(kind, []), int(measured))
    return sizes


def _alike(loads: Sequence[TaskLoad], stages: Sequence[range]) -> list[_Alike]:
    """All tasks by the adapters they have at each BaseOp, those left out that take no seconds."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    for task, load in enumerate(loads):
        of_ops: dict[BaseOpName, dict[Curve, list[int]]] = {}
        for site in load.ops:
            if site.curve is not None:
                counts = of_ops.setdefault(site.op, {}).setdefault(site.curve, [0] * len(stages))
                counts[stage_of[site.layer]] += 1
        for op, indices in of_ops.items():
            alike.setdefault((op, tuple(indices), tuple(map(tuple, indices.values()))), []).append(task)
    return [
        (op, tasks, curves, *np.unique(np.array(counts), axis=1, return_inverse=True))
        for (op, curves, counts), tasks in alike.items()
    ]
