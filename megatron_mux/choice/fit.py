"""Fits a method into memory: how many micro-batches a step is divided into, and what they hold."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

from megatron_mux.choice.engine_step import Tables, step_memory
from megatron_mux.choice.flags import Command, command
from megatron_mux.choice.speed import step_seconds
from megatron_mux.choice.task_file import FileStep
from megatron_mux.fusion.device import Device
from megatron_mux.gpus import assumed
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.phases import Phase, StepMemory
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.largest_batch import largest_batch
from megatron_mux.memory.step_profile import Profiles

SEQUENCES = 64
"""The least sequences of a step where no batch size is given, in further micro-batches if one holds fewer: then every
method spreads what it does once a step over as many sequences."""


@dataclass(frozen=True)
class Fit:
    """A method with its micro-batches, and the predictions for it.

    Attributes:
        memory: The memory of a step with the worst-case micro-batch.
        rows: Tokens of the worst-case micro-batch.
        sequences: Sequences of the worst-case micro-batch.
        largest: The most sequences that fit, of the same tasks in the same proportion; 0 if not even one fits.
        mean_rows: Mean tokens of a micro-batch.
        tokens: Tokens of the whole step, over all pipelines.
    """

    device: Device
    memory: StepMemory
    rows: int
    sequences: int
    largest: int
    mean_rows: float
    micro_batches: int
    tokens: int

    @property
    def method(self) -> ParallelConfig:
        """The method, with its number of micro-batches."""
        return self.memory.method

    @property
    def fits(self) -> bool:
        """Whether the worst-case micro-batch fits, of a task file, a batch size or one sequence."""
        return self.sequences <= self.largest

    @cached_property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return step_seconds(self.memory, self.mean_rows, self.micro_batches, self.device)

    @cached_property
    def command(self) -> Command:
        """The command line that runs it."""
        memory = self.memory
        model = memory.architecture
        return command(self.method, memory.recipe, model.model_type, self.sequences, model.quantisation)

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @cached_property
    def worst(self) -> Phase:
        """The phase and stage with the highest memory."""
        return self.memory.worst(self.rows)

    @cached_property
    def breakdown(self) -> Mapping[str, int]:
        """Bytes of the worst rank at its peak, by part."""
        return self.worst.breakdown

    @property
    def phases(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes of the worst rank by part, for each phase of its step in order, by the phase's name."""
        phases = self.memory.phases(self.rows)
        return {phase.name: phase.breakdown for phase in phases if phase.stage == self.worst.stage}

    @property
    def interval(self) -> tuple[int, int]:
        """Lower and upper bound of the bytes that the worst rank's process takes."""
        return self.memory.interval(self.rows)

    @property
    def peak_process(self) -> int:
        """Bytes of GPU memory that the worst rank's process takes."""
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
        """The JSON form."""
        method = self.method
        # Megatron numbers ranks tensor first, then data, then pipeline: the first rank of the worst stage.
        rank = self.worst.stage * method.tensor * method.data
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
            "batch_size": self.sequences,
            "largest_batch": self.largest,
            "peak_process_bytes": self.peak_process,
            "peak_process_interval_bytes": list(self.interval),
            "host_bytes": self.memory.host,
            "peak_reserved_bytes": self.peak_reserved,
            "peak_allocated_bytes": self.peak_allocated,
            "breakdown": dict(self.breakdown),
            "worst_rank": {"stage": self.worst.stage, "rank": rank, "at": self.worst.name},
            "throughput_tokens_per_s": self.throughput,
            "step_s": self.seconds,
            "flags": list(self.command.flags),
            "flags_of": self.command.program,
            "remarks": list(self.command.remarks),
            "not_by_this_engine": self.command.elsewhere,
        }


class Fitting:
    """Finds the micro-batches of methods on GPUs.

    Args:
        memory: Bytes of a GPU.
        kind: `cuda`, or `cpu` for processes that compute there.
        profiles: Profiles of full fine-tuning; None where only adapters are trained.
        tables: Of tasks; None in full fine-tuning.
    """

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        memory: int,
        device: Device,
        kind: str = "cuda",
        profiles: Profiles | None = None,
        tables: Tables | None = None,
    ) -> None:
        self._architecture, self._recipe, self._memory, self._device = architecture, recipe, memory, device
        self._kind, self._profiles, self._tables = kind, profiles, tables
        self._gpu = assumed(device.name)[0].gpu
        self._tasks = FileStep(recipe.adapters)

    def __call__(self, method: ParallelConfig, batch: int | None = None) -> Fit:
        """A method with its micro-batches.

        Args:
            batch: Sequences of a micro-batch; None for as many as fit. Not used for tasks, which set their own.
        """
        return self._of_tasks(method) if self._recipe.frozen else self._as_many_as_fit(method, batch)

    def _as_many_as_fit(self, method: ParallelConfig, batch: int | None) -> Fit:
        """Micro-batches of a given number of sequences, as few as the method needs; or of as many as fit (one if none
        does), for `SEQUENCES`.
        """
        step, length = self._step(method, self._recipe), self._recipe.length
        largest = largest_batch(lambda count: step.peak(count * length) <= self._memory)
        shown = batch or max(largest, 1)
        rows = shown * length
        if batch is None:
            together = method.data * method.micro_batches * shown
            accumulated = replace(method, parts=method.micro_batches * -(-SEQUENCES // together))
            with_sums = self._step(accumulated, self._recipe)
            # Else gradients have to be gone before the next micro-batch.
            if with_sums.peak(rows) <= self._memory or shown > largest:
                step = with_sums
        count = step.method.micro_batches
        return Fit(self._device, step, rows, shown, largest, rows, count, method.data * count * rows)

    def _of_tasks(self, method: ParallelConfig) -> Fit:
        """The tasks' step in the fewest micro-batches that fill a pipeline and fit; if none fit, in the most."""
        fit = cache(partial(self._in_parts, method))
        most = self._tasks.most(method.data)
        low = min(method.micro_batches, most)
        if fit(low).fits:
            return fit(low)
        more = bisect_left(range(low, most), True, key=lambda count: fit(count).fits)
        return fit(low + more)

    def _in_parts(self, method: ParallelConfig, count: int) -> Fit:
        """The tasks' step in a given number of micro-batches."""
        step, cut = self._tasks, replace(method, parts=count)
        division = step.divided(method.data, count)
        worst_cases = (
            (self._step(cut, step.mix(content, self._recipe)), content) for content in division.worst_cases
        )
        worst, content = max(worst_cases, key=lambda pair: pair[0].peak(step.rows(pair[1])))
        rows, sequences = step.rows(content), content.total()
        # Of more sequences in the same proportion.
        largest = largest_batch(lambda more: worst.peak(math.ceil(more * rows / sequences)) <= self._memory)
        mean = division.rows / division.micro_batches
        return Fit(self._device, worst, rows, sequences, largest, mean, division.micro_batches, step.tokens)

    def _step(self, method: ParallelConfig, recipe: Recipe) -> StepMemory:
        return step_memory(
            self._architecture,
            recipe,
            method,
            self._profiles,
            self._tables,
            device=self._kind,
            gpu=self._gpu,
        )
