"""The access profile: how often tokens of the tasks select each expert of each MoE layer (VELA section IV-B).

    {"model": {"family": "mixtral", "layers": 2, "experts": 4, "top_k": 2, "hidden_size": 64, "fingerprint": "..."},
     "top_k": 2, "tokens": 4096, "layers": [0, 1], "access": [[0.9, 0.6, 0.3, 0.2], [...]]}

Keys that placement does not use, such as the drift over training, are left alone: a profile has other readers, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from megatron_mux.moe.entries import Floats, index, read_model, to_array

ROW_TOLERANCE = 1e-3
"""Relative deviation from top_k that the sum of a layer's probabilities may have: averages in fp32 have some."""


def _matrix(name: str) -> PlainValidator:
    return PlainValidator(lambda value: to_array(value, name, (None, None), ("layer", "expert")))


def _cube(value: Any) -> Floats:
    cube = to_array(value, "coactivation", (None, None, None), ("layer", "expert", "expert"))
    uneven = (
        np.argwhere(~np.isclose(cube, cube.transpose(0, 2, 1), rtol=1e-9, atol=1e-9))
        if cube.shape[1] == cube.shape[2]
        else np.zeros((0, 3))
    )
    for layer, a, b in uneven[:1]:
        raise ValueError(
            f"coactivation{index(layer, a, b)}: is {cube[layer, a, b]:g}, but [{b}][{a}] of the same layer is "
            f"{cube[layer, b, a]:g}: counts of pairs do not depend on their order"
        )
    return cube


def _by_task(value: Any) -> dict[str, Floats]:
    if not isinstance(value, dict):
        raise ValueError("by_task: must map the name of each task to its access probabilities")
    return {
        str(task): to_array(rows, f"by_task.{task}", (None, None), ("layer", "expert"))
        for task, rows in value.items()
    }


_AsLists = PlainSerializer(lambda value: None if value is None else value.tolist())


class ModelIdentity(BaseModel):
    """The model that a profile or a placement is for."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    family: str = Field(min_length=1)
    """Name of the family, such as `mixtral`."""
    layers: int = Field(ge=1)
    """MoE layers; dense layers do not count."""
    experts: int = Field(ge=1)
    """Routed experts of each layer."""
    top_k: int = Field(ge=1)
    """Experts that a token selects in a layer."""
    hidden_size: int | None = Field(default=None, ge=1)
    """Features of a token; None: not known."""
    fingerprint: str = ""
    """Identifies the weights or the config; empty: not known."""

    def differences(self, other: ModelIdentity) -> list[str]:
        """List the fields in which two models differ, as `experts: 8 here, 64 there`; unknown values match any."""
        names = []
        for name in type(self).model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and mine not in (None, "") and theirs not in (None, ""):
                names.append(f"{name} {mine!r} instead of {theirs!r}")
        return names


class RoutedSet(BaseModel):
    """Experts that tokens selected together, and how many tokens did."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    experts: Annotated[tuple[int, ...], Field(strict=False)]
    """The set, `top_k` experts."""
    count: int = Field(ge=1)
    """Tokens that selected exactly this set."""


class AccessProfile(BaseModel):
    """How often tokens select each expert. L: MoE layers, E: experts of a layer."""

    model_config = ConfigDict(extra="ignore", frozen=True, arbitrary_types_allowed=True)

    model: ModelIdentity
    """The model that was profiled."""
    top_k: Annotated[int, Field(ge=1, strict=True)]
    """Experts that a token selects in a layer."""
    access: Annotated[np.ndarray, _matrix("access"), _AsLists]
    """[L][E] probability that a token selects the expert; a row sums to `top_k`."""
    tokens: Annotated[int, Field(ge=1, strict=True)]
    """Tokens that were counted."""
    layers: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """[L] index of each MoE layer in the backbone; empty: all layers are MoE layers."""
    scores: Annotated[np.ndarray, _matrix("scores"), _AsLists] | None = None
    """[L][E] sums of the softmax scores of tokens that selected the expert (the paper's Figure 3)."""
    coactivation: Annotated[np.ndarray, PlainValidator(_cube), _AsLists] | None = None
    """[L][E][E] tokens that selected both experts; the diagonal counts tokens that selected the one."""
    routed_sets: tuple[tuple[RoutedSet, ...], ...] | None = None
    """[L] the sets that tokens selected, of all tokens or of a sample of them."""
    by_task: Annotated[
        Mapping[str, np.ndarray],
        PlainValidator(_by_task),
        PlainSerializer(lambda value: {task: rows.tolist() for task, rows in value.items()}),
    ] = {}
    """[L][E] access probabilities of each task by itself."""

    @model_validator(mode="after")
    def _check(self) -> AccessProfile:
        shape = (self.model.layers, self.model.experts)
        if self.top_k != self.model.top_k:
            raise ValueError(f"top_k: is {self.top_k}, but model.top_k is {self.model.top_k}")
        if self.top_k > self.model.experts:
            raise ValueError(f"top_k: is {self.top_k}, but a layer has only {self.model.experts} experts")
        _check_probabilities("access", self.access, shape, self.top_k)
        for task, rows in self.by_task.items():
            _check_probabilities(f"by_task.{task}", rows, shape, self.top_k)
        for name, array, wanted in (
            ("scores", self.scores, shape),
            ("coactivation", self.coactivation, (*shape, shape[1])),
        ):
            if array is not None and array.shape != wanted:
                raise ValueError(
                    f"{name}: has the shape {_times(array.shape)}, but the model has {_times(wanted)}"
                )
        if self.layers and (
            len(self.layers) != shape[0]
            or list(self.layers) != sorted(set(self.layers))
            or self.layers[0] < 0
        ):
            raise ValueError(f"layers: must be the {shape[0]} rising indices of the MoE layers")
        if self.routed_sets is not None:
            self._check_sets(self.routed_sets)
        return self

    def _check_sets(self, layers: tuple[tuple[RoutedSet, ...], ...]) -> None:
        if len(layers) != self.model.layers:
            raise ValueError(
                f"routed_sets: has {len(layers)} entries, but the model has {self.model.layers} layers"
            )
        for layer, sets in enumerate(layers):
            if not sets:
                raise ValueError(
                    f"routed_sets[{layer}]: is empty: count at least one token, or leave routed_sets out"
                )
            for i, routed in enumerate(sets):
                where = f"routed_sets{index(layer, i)}.experts"
                if len(set(routed.experts)) != len(routed.experts) or len(routed.experts) != self.top_k:
                    raise ValueError(
                        f"{where}: must be {self.top_k} different experts, got {list(routed.experts)}"
                    )
                if min(routed.experts) < 0 or max(routed.experts) >= self.model.experts:
                    raise ValueError(
                        f"{where}: must be experts from 0 to {self.model.experts - 1}, got {list(routed.experts)}"
                    )

    @property
    def layer_indices(self) -> tuple[int, ...]:
        """Index of each MoE layer in the backbone."""
        return self.layers or tuple(range(self.model.layers))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _check_probabilities(name: str, rows: Floats, shape: tuple[int, int], top_k: int) -> None:
    if rows.shape != shape:
        raise ValueError(
            f"{name}: has the shape {_times(rows.shape)}, but the model has {shape[0]} layers x {shape[1]} experts"
        )
    for layer, expert in np.argwhere(rows > 1 + ROW_TOLERANCE)[:1]:
        raise ValueError(
            f"{name}{index(layer, expert)}: must be a probability of at most 1, got {rows[layer, expert]:g}"
        )
    sums = rows.sum(axis=1)
    for layer in np.flatnonzero(np.abs(sums - top_k) > ROW_TOLERANCE * top_k)[:1]:
        raise ValueError(
            f"{name}[{layer}]: sums to {sums[layer]:.6g}, but a token selects top_k = {top_k} experts"
        )


def read_profile(path: str | Path) -> AccessProfile:
    """Read an access profile.

    Raises:
        UserError: The file cannot be read, or an entry is wrong: names file and entry.
    """
    return read_model(path, AccessProfile, "an access profile, as megatron-mux profile-experts writes it")
