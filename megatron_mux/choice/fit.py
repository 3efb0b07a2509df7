"""How a method is run: in how many micro-batches of what, so that a rank's memory suffices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_mux.choice.speed import Work
from megatron_mux.choice.step import Content, FileStep
from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.phases import StepMemory
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.step_memory import Profiles, step_memory
from megatron_mux.memory.largest_batch import largest_batch

SEQUENCES = 64
"""Of a step, at least, where nobody says how many a GPU has at once: what a method does once a step is shared by as
many with every method, by further micro-batches where one's largest batch is less."""


@dataclass(frozen=True)
class Fit:
    """A method with its micro-batches.

    Attributes:
        method: With its number of micro-batches.
        memory: Of a step, for the heaviest micro-batch.
        rows: Tokens of that.
        sequences: Of it.
        largest: Sequences that it could have, of the same tasks in the same proportion; 0 if not even one fits.
        work: What a step computes.
    """

    method: Method
    memory: StepMemory
    rows: int
    sequences: int
    largest: int
    work: Work

    @property
    def fits(self) -> bool:
        """Whether its memory suffices."""
        return self.sequences <= self.largest


def as_many_as_fit(
    architecture: Architecture,
    recipe: Recipe,
    method: Method,
    memory: int,
    batch: int | None = None,
    device: str = "cuda",
    gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
    profiles: Profiles | None = None,
) -> Fit:
    """Micro-batches of a given number of sequences, as few as the method needs; or of as many as fit, for `SEQUENCES`.

    Args:
        architecture, recipe, method: What is trained, and how.
        memory: Bytes of a GPU.
        batch: Sequences; None for as many as fit, or one if none does.
        device: `cuda` or `cpu`.
        gpu: Which one.
        profiles: Profiles of full fine-tuning.
    """
    step = step_memory(architecture, recipe, method, profiles, device=device, gpu=gpu)
    largest = largest_batch(lambda count: step.peak(count * recipe.length) <= memory)
    shown = batch or max(largest, 1)
    rows = shown * recipe.length
    if batch is None:
        together = method.data * method.micro_batches * shown
        count = method.micro_batches * -(-SEQUENCES // together)
        accumulated = replace(method, parts=count)
        with_sums = step_memory(architecture, recipe, accumulated, profiles, device=device, gpu=gpu)
        # Else gradients have to be gone before the next micro-batch.
        if with_sums.peak(rows) <= memory or shown > largest:
            method, step = accumulated, with_sums
    count = method.micro_batches
    return Fit(method, step, rows, shown, largest, Work(rows, count, method.data * count * rows))


def of_file(
    architecture: Architecture,
    recipe: Recipe,
    method: Method,
    memory: int,
    step: FileStep,
    device: str = "cuda",
    gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
) -> Fit:
    """A file's step in the fewest micro-batches that fit, of those that fill a pipeline; else in the most there can be.

    Args:
        architecture, recipe, method: What is trained, and how.
        memory: Bytes of a GPU.
        step: The file's.
        device: `cuda` or `cpu`.
        gpu: Which one.
    """

    def fit(count: int) -> Fit:
        own = replace(method, parts=count)
        division = step.divided(method.data, count)
        found, content = max(
            (
                (step_memory(architecture, step.mix(content, recipe), own, device=device, gpu=gpu), content)
                for content in division.heaviest
            ),
            key=lambda pair: pair[0].peak(pair[1].total),
        )
        work = Work(division.rows / division.micro_batches, division.micro_batches, step.tokens)
        return Fit(own, found, content.total, content.count, _largest(found, content, memory), work)

    most = step.most(method.data)
    low = min(method.micro_batches, most)
    found = fit(low)
    if found.fits or low == most:
        return found
    last = fit(most)
    if not last.fits:
        return last
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        tried = fit(middle)
        if tried.fits:
            high, last = middle, tried
        else:
            low = middle
    return last


def _largest(step: StepMemory, content: Content, memory: int) -> int:
    return largest_batch(lambda count: step.peak(_rows(content, count)) <= memory)


def _rows(content: Content, sequences: int) -> int:
    """Of so many sequences in the same proportion."""
    return math.ceil(sequences * content.total / content.count)
