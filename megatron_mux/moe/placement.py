"""The placement file: which workers hold each expert of each layer.

    {"model": {...}, "workers": 3, "placement": [[[0], [0], [1], [2]], [[1], [0], [0, 2], [2]]]}

An expert with several workers has replicas. A sender's tokens use the replica on itself, else one on its own node, else
any (`expert_shape.serving_rank`). `"nodes": ["a", "a", "b"]` names the node of each worker. The file that a run keeps
says what its workers are: `"workers_are": "expert managers"`, or `"expert ranks"`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from megatron_mux.errors import UserError
from megatron_mux.files import write_atomically
from megatron_mux.moe.access_profile import ModelIdentity
from megatron_mux.moe.entries import Ints, index, read_model

Placement = tuple[tuple[tuple[int, ...], ...], ...]
"""[L][E] the workers that hold an expert, in rising order."""

WorkerKind = Literal["expert ranks", "expert managers"]


class PlacementFile(BaseModel):
    """Content of a placement file; keys that describe how it was found are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: ModelIdentity
    """The model whose experts are placed."""
    workers: Annotated[int, Field(ge=1, strict=True)]
    """Number of workers."""
    placement: tuple[tuple[tuple[Annotated[int, Field(strict=True)], ...], ...], ...]
    """[L][E] indices of the workers that hold the expert."""
    nodes: tuple[str, ...] | None = None
    """[N] the node of each worker, which decides between replicas; None: all workers are equally near."""
    workers_are: WorkerKind | None = None
    """What the workers are; None: either."""


@dataclass(frozen=True)
class Solution:
    """A placement and what is known of it.

    Attributes:
        objective: Predicted seconds of a step's communication, and of compute if the objective counts it.
        lower_bound: Seconds that no placement can be below.
        finished: Whether the search ended by itself, not by its time limit.
    """

    placement: Placement
    objective: float
    lower_bound: float
    seconds: float
    solver: str
    finished: bool = True

    @property
    def gap(self) -> float:
        """Distance to the lower bound, relative to it; infinite if the bound is 0 and the objective is not."""
        above = max(0.0, self.objective - self.lower_bound)
        if above == 0.0:
            return 0.0
        return above / self.lower_bound if self.lower_bound > 0 else math.inf


def from_owners(owners: Ints) -> Placement:
    """Make a placement without replicas from [L][E] workers."""
    return tuple(tuple((int(worker),) for worker in row) for row in owners)


def to_owners(placement: Placement) -> Ints:
    """Return [L][E] first workers; inverse of `from_owners` if there are no replicas."""
    return np.array([[workers[0] for workers in row] for row in placement], dtype=np.int64)


def has_replicas(placement: Placement) -> bool:
    """Whether some expert has several workers."""
    return any(len(workers) > 1 for row in placement for workers in row)


def held(placement: Placement, workers: int) -> Ints:
    """[N] experts that each worker holds, over all layers."""
    flat = [worker for row in placement for owners in row for worker in owners]
    return np.bincount(np.array(flat, dtype=np.int64), minlength=workers)


def check_placement(
    placement: Placement,
    layers: int,
    experts: int,
    workers: int,
    capacities: Ints | None = None,
    replicas: bool = True,
) -> None:
    """Check that a placement is complete and fits.

    Args:
        capacities: [N] experts that each worker can hold over all layers; None: any number.
        replicas: Whether an expert may have several workers.

    Raises:
        UserError: Names the entry: an expert left out or doubled, a worker that does not exist or holds too many.
    """
    problems = []
    if len(placement) != layers:
        raise UserError(f"placement: has {len(placement)} layers, but the model has {layers}")
    for layer, row in enumerate(placement):
        if len(row) != experts:
            raise UserError(f"placement[{layer}]: has {len(row)} experts, but the model has {experts}")
        for expert, owners in enumerate(row):
            where = f"placement{index(layer, expert)}"
            if not owners:
                problems.append(f"{where}: leaves the expert out: name at least one worker")
            for worker in owners:
                if not 0 <= worker < workers:
                    problems.append(
                        f"{where}: worker {worker} does not exist: workers are 0 to {workers - 1}"
                    )
            if len(set(owners)) != len(owners):
                problems.append(f"{where}: names a worker twice: {list(owners)}")
            elif len(owners) > 1 and not replicas:
                problems.append(
                    f"{where}: places the expert {len(owners)} times, but replicas are not allowed here"
                )
    if problems:
        raise UserError(*problems)
    if capacities is not None:
        counts = held(placement, workers)
        problems += [
            f"placement: worker {n} holds {counts[n]} experts, but its capacity is {capacities[n]}"
            for n in np.flatnonzero(counts > capacities)
        ]
        if problems:
            raise UserError(*problems)


def read_placement(
    path: str | Path,
    model: ModelIdentity | None = None,
    workers: int | None = None,
    capacities: Ints | None = None,
    replicas: bool = True,
    workers_are: WorkerKind | None = None,
) -> PlacementFile:
    """Read a placement file and check it.

    Args:
        model: The model that it must be for; None: any.
        workers: Number of workers that it must be for; None: that of the file.
        capacities, replicas: See `check_placement`.
        workers_are: What its workers must be, if it says that; None: either.

    Raises:
        UserError: The file cannot be read, is for another model, or the placement is wrong: names file and entry.
    """
    content = read_model(path, PlacementFile, "a placement, as megatron-mux place-experts writes it")
    if model is not None:
        differences = content.model.differences(model)
        if differences:
            raise UserError(
                f"{path}: model: is for another model: {', '.join(differences)}: "
                "place the experts again with a profile of this model"
            )
    if workers_are is not None and content.workers_are not in (None, workers_are):
        raise UserError(
            f"{path}: workers_are: is for {content.workers_are}, but this run has {workers_are}: place experts anew, "
            "or remove the entry to have worker n of the one be worker n of the other"
        )
    if workers is not None and content.workers != workers:
        raise UserError(f"{path}: workers: is for {content.workers} workers, but there are {workers}")
    try:
        check_placement(
            content.placement,
            content.model.layers,
            content.model.experts,
            content.workers,
            capacities,
            replicas,
        )
    except UserError as error:
        raise UserError(*(f"{path}: {problem}" for problem in error.problems)) from None
    if content.nodes is not None and len(content.nodes) != content.workers:
        raise UserError(
            f"{path}: nodes: has {len(content.nodes)} entries, but there are {content.workers} workers"
        )
    return content


def write_placement(
    path: Path, model: ModelIdentity, workers: int, placement: Placement, details: Mapping[str, Any]
) -> None:
    """Write a placement file atomically.

    Args:
        details: Further keys, such as `objective_s`.
    """
    content = {
        "model": model.model_dump(),
        "workers": workers,
        "placement": placement,
        **details,
    }
    write_atomically(path, json.dumps(content) + "\n")
