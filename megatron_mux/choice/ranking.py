"""All methods for some GPUs, ranked: what fits, the largest batch, the worst rank, the predicted speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_mux.choice.fit import Fit, as_many_as_fit, of_file
from megatron_mux.choice.flags import (
    TRAINER,
    flags,
    megatron_flags,
    not_by_this_engine,
    remarks,
    trainer_flags,
    whose,
)
from megatron_mux.choice.speed import Speed, speed
from megatron_mux.choice.step import FileStep
from megatron_mux.fusion.device import Device
from megatron_mux.gpus import Gpu, find
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.methods import methods
from megatron_mux.memory.forms.phases import Phase
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.step_memory import Profiles
from megatron_mux.memory.question import OFFLOAD


@dataclass(frozen=True)
class Ranked:
    """What is predicted of a method.

    Attributes:
        method: The method, with its number of micro-batches.
        fits: Whether a task file trains; else the batch asked for, or one sequence if none was.
        batch: Sequences of the heaviest micro-batch, for which the rest is given.
        largest_batch: The most that fit, of the same tasks in the same proportion; 0 if not even one does.
        worst: When and on which stage memory is at its highest.
        breakdown: Bytes of that rank then, by part.
        phases: The same in every phase of its step, in order, by the phase's name.
        interval: The least and the most bytes of that rank's process, by what is not known.
        host: Bytes of host memory for what a rank keeps there.
        speed: Of a step.
        flags: That run the method.
        program: What takes them.
        elsewhere: Why our engine cannot run it; None if it can.
        remarks: What is to be known of these flags.
    """

    method: Method
    fits: bool
    batch: int
    largest_batch: int
    worst: Phase
    breakdown: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    interval: tuple[int, int]
    host: int
    speed: Speed
    flags: tuple[str, ...]
    program: str
    elsewhere: str | None
    remarks: tuple[str, ...] = ()

    @property
    def peak_process(self) -> int:
        """All bytes that the worst rank's process takes of its GPU."""
        return sum(self.breakdown.values())

    @property
    def peak_reserved(self) -> int:
        """Bytes that its allocator holds."""
        return self.peak_process - self.breakdown["context"]

    @property
    def peak_allocated(self) -> int:
        """Bytes of live tensors."""
        return self.peak_reserved - self.breakdown["fragmentation"]

    def to_json(self) -> dict[str, Any]:
        """As programs read it."""
        method = self.method
        return {
            "estimator": "ours",
            "name": method.name,
            "details": method.details,
            "data_parallel": method.data,
            "tensor_parallel": method.tensor,
            "pipeline_parallel": method.pipeline,
            "expert_parallel": method.expert,
            "sequence_parallel": method.sequence_parallel,
            "zero": method.zero,
            "recompute": method.recompute,
            "offload": method.offload,
            "micro_batches": method.micro_batches,
            "fits": self.fits,
            "batch_size": self.batch,
            "largest_batch": self.largest_batch,
            "peak_process_bytes": self.peak_process,
            "peak_process_interval_bytes": list(self.interval),
            "host_bytes": self.host,
            "peak_reserved_bytes": self.peak_reserved,
            "peak_allocated_bytes": self.peak_allocated,
            "breakdown": dict(self.breakdown),
            "worst_rank": {"stage": self.worst.stage, "rank": self.rank, "at": self.worst.name},
            "throughput_tokens_per_s": self.speed.throughput,
            "step_s": self.speed.seconds,
            "flags": list(self.flags),
            "flags_of": self.program,
            "remarks": list(self.remarks),
            "not_by_this_engine": self.elsewhere,
        }

    @property
    def rank(self) -> int:
        """The first rank of the worst stage: Megatron numbers ranks tensor first, then data, then pipeline."""
        return self.worst.stage * self.method.tensor * self.method.data


@dataclass(frozen=True)
class Ranking:
    """The methods, the best first: those that fit by speed, then the others by how little they lack."""

    entries: Sequence[Ranked]

    @property
    def chosen(self) -> Ranked | None:
        """The fastest that fits; None if nothing does."""
        return self.entries[0] if self.entries and self.entries[0].fits else None

    @property
    def selected(self) -> str | None:
        """Its name; `offload` if host memory has to help."""
        if self.chosen is None:
            return None
        return OFFLOAD if self.chosen.method.offload else self.chosen.method.name


def rank(
    architecture: Architecture,
    recipe: Recipe,
    gpus: int,
    memory: int,
    device: Device,
    batch: int | None = None,
    step: FileStep | None = None,
    kind: str = "cuda",
    profiles: Profiles | None = None,
) -> Ranking:
    """Rank every method.

    Args:
        architecture: The model.
        recipe: What is trained and how.
        gpus: How many there are.
        memory: Bytes of each.
        device: What they are.
        batch: Sequences of a micro-batch; None for as many as fit.
        step: Of a task file, which says so itself.
        kind: `cuda`, or `cpu` for processes that compute there.
        profiles: Profiles of full fine-tuning.
    """
    table = find(device.name)
    gpu = table.gpu if table is not None else Gpu()

    def fit(method: Method) -> Fit:
        if step is not None:
            return of_file(architecture, recipe, method, memory, step, kind, gpu)
        return as_many_as_fit(architecture, recipe, method, memory, batch, kind, gpu, profiles)

    found = [
        _ranked(architecture, recipe, fit(method), device) for method in methods(gpus, architecture, recipe)
    ]
    # Sorting keeps the order of equals: the plainest first.
    fitting = sorted((e for e in found if e.fits), key=lambda e: -e.speed.throughput)
    others = sorted((e for e in found if not e.fits), key=lambda e: e.peak_process)
    return Ranking([*fitting, *others])


def _ranked(architecture: Architecture, recipe: Recipe, fit: Fit, device: Device) -> Ranked:
    method, memory = fit.method, fit.memory
    elsewhere = not_by_this_engine(method, recipe, architecture.model_type)
    phases = memory.phases(fit.rows)
    worst = max(phases, key=lambda phase: phase.bytes)
    program = whose(recipe, here=not elsewhere)
    if program == TRAINER:
        words = trainer_flags(method, recipe, fit.sequences)
    else:
        words = megatron_flags(method, recipe, fit.sequences) if elsewhere else flags(method, recipe)
    return Ranked(
        method,
        fit.fits,
        fit.sequences,
        fit.largest,
        worst,
        worst.breakdown,
        {phase.name: phase.breakdown for phase in phases if phase.stage == worst.stage},
        memory.interval(fit.rows),
        memory.host,
        speed(architecture, memory.recipe, method, fit.work, device),
        tuple(words),
        program,
        elsewhere,
        tuple(remarks(recipe)) if elsewhere else (),
    )
