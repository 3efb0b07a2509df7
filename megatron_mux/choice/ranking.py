"""All methods for some GPUs, ranked: what fits, the largest batch, the worst rank, the predicted speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_mux.choice.engine_step import Tables
from megatron_mux.choice.fit import Fit, Fitting
from megatron_mux.choice.flags import not_by_this_engine
from megatron_mux.choice.task_file import TaskFile
from megatron_mux.errors import UserError
from megatron_mux.fusion.device import Device, device_of
from megatron_mux.gpus import known
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import ParallelConfig, impossible, methods
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.skeleton import read_architecture
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.memory.question import OFFLOAD, Question
from megatron_mux.memory.step_profile import Profiles, StepProfiles

Told = Callable[[int, int, Fit | None], None]
"""Told of progress: methods that are predicted or cannot be, of how many, and the fastest so far that fits."""


@dataclass(frozen=True)
class Ranking:
    """The methods, best first: those that fit, by speed, then the others, by how little memory they lack.

    Attributes:
        impossible: Methods that the model's sizes exclude, that the engine does not run or whose memory cannot be
            predicted, and why.
        device: The GPU whose speeds are assumed.
        tasks: The tasks that are trained; empty: every parameter is.
    """

    entries: Sequence[Fit]
    impossible: Mapping[str, str]
    device: str
    tasks: Sequence[TaskAdapters] = ()

    @property
    def chosen(self) -> Fit | None:
        """The fastest that fits; None if nothing does."""
        return self.entries[0] if self.entries and self.entries[0].fits else None

    @property
    def selected(self) -> str | None:
        """The name of the chosen method; `offload` if it needs host memory."""
        if self.chosen is None:
            return None
        return OFFLOAD if self.chosen.method.offload else self.chosen.method.name

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        best = self.chosen
        return {
            "selected": self.selected,
            "selected_kind": best.method.details if best else None,
            "batch_size": best.sequences if best else 0,
            "flags": list(best.command.flags) if best else [],
            "device": self.device,
            "impossible": dict(self.impossible),
            "tasks": [
                {name: getattr(task, name) for name in ("name", "sequences", "length")} for task in self.tasks
            ],
            "methods": [entry.to_json() for entry in self.entries],
        }


def answer(
    question: Question,
    file: TaskFile | None = None,
    tables: Tables | None = None,
    told: Told = lambda done, total, best: None,
) -> Ranking:
    """Rank every method for a user's question.

    Args:
        file: The tasks that train a frozen backbone; None: every parameter is trained.
        told: See `Told`.

    Raises:
        UserError: A name is unknown, the model is not understood, its experts are placed on other numbers of ranks, or
            the engine runs none of the methods.
    """
    how, adapters = question.options, file.adapters if file is not None else ()
    known(how.device)
    recipe = Recipe(
        question.length, how.precision, how.optimizer, how.master_weights, how.attention, adapters
    )
    return rank(
        file.architecture if file is not None else read_architecture(question.skeleton),
        recipe,
        question.gpus,
        question.gpu_memory,
        device_of("cuda", how.device, 0),
        question.batch,
        profiles=StepProfiles(question, recipe.autocast) if file is None else None,
        tables=tables,
        told=told,
    )


def rank(
    architecture: Architecture,
    recipe: Recipe,
    gpus: int,
    memory: int,
    device: Device,
    batch: int | None = None,
    kind: str = "cuda",
    profiles: Profiles | None = None,
    tables: Tables | None = None,
    only: Callable[[ParallelConfig], bool] = lambda method: True,
    told: Told = lambda done, total, best: None,
) -> Ranking:
    """Rank every method.

    Args:
        memory: Bytes of each.
        batch: Sequences of a micro-batch; None for as many as fit. Not used for tasks, which set their own.
        kind: `cuda`, or `cpu` for processes that compute there.
        told: See `Told`.
    """
    fit = Fitting(architecture, recipe, memory, device, kind, profiles, tables)
    asked = [method for method in methods(gpus, architecture, recipe) if only(method)]
    excluded = impossible(gpus, architecture)
    if recipe.frozen:  # what the engine refuses cannot be predicted from it
        why = partial(not_by_this_engine, recipe=recipe, model_type=architecture.model_type)
        refused = {method.name: reason for method in asked if (reason := why(method)) is not None}
        asked = [method for method in asked if method.name not in refused]
        excluded |= refused
        if refused and not asked:
            raise UserError(f"this engine runs none of the methods: {'; '.join(sorted({*refused.values()}))}")
    if not asked and architecture.placement is not None:
        ranks = architecture.placement.size
        raise UserError(f"--mux-expert-placement: is for {ranks} expert ranks, which {gpus} GPU(s) cannot be")
    predicted: dict[ParallelConfig, Fit] = {}
    problems: dict[str, str] = {}

    def predict(method: ParallelConfig) -> None:
        try:
            predicted[method] = fit(method, batch)
        except UserError as error:  # its tables cannot be made
            if tables is None:
                raise
            problems[method.title] = " ".join(error.problems)
        fitting = (one for one in predicted.values() if one.fits)
        best = max(fitting, key=lambda one: one.throughput, default=None)
        told(len(predicted) + len(problems), len(asked), best)

    if tables is None:
        for method in asked:
            predict(method)
    else:
        tables.prepare(asked, predict)
    if asked and not predicted:
        raise UserError(*dict.fromkeys(problems.values()))
    excluded |= problems
    fits = [predicted[method] for method in asked if method in predicted]
    # Sorting keeps the order of equals: the plainest first.
    fitting = sorted((f for f in fits if f.fits), key=lambda f: -f.throughput)
    others = sorted((f for f in fits if not f.fits), key=lambda f: f.peak_process)
    return Ranking([*fitting, *others], excluded, device.name, recipe.adapters)
