"""Profiles of full fine-tuning steps: by hand for architectures that are numbers alone, or traced in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.question import Question
from megatron_mux.memory.step_profile import (
    BACKWARD,
    EMBEDDING,
    LOSS,
    Profiles,
    Samples,
    StepProfile,
    StepProfiles,
)
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.memory.trace import depth
from megatron_mux.memory.trace.case import Case, Options
from megatron_mux.memory.trace.training import trace
from tests.unit.memory.configs import write

KEPT, TAKEN = 20, 4
"""Hidden states that a layer of a profile by hand keeps, and that its backward pass takes."""


def by_hand(architecture: Architecture, length: int = 128, size: int = 2) -> Profiles:
    """Profiles whose layers keep `KEPT` hidden states, or one if they are recomputed."""
    layers, hidden = len(architecture.layers), float(architecture.hidden * size * length)

    def of(recompute: bool, single: bool) -> StepProfile:
        kept = np.zeros((layers, 2))
        kept[:, 1] = hidden * (1 if recompute else KEPT)
        count = layers + 2
        found = np.zeros((count, 3, 2))
        found[0, 1, 1] = 12 * architecture.vocabulary * length
        found[1:-1, 0, 1], found[1:-1, 2, 1] = KEPT * hidden, TAKEN * hidden
        samples = Samples(
            np.array([LOSS, *[BACKWARD] * layers, EMBEDDING]),
            np.array([layers, *range(layers - 1, -1, -1), 0]),
            found,
            np.linspace(0.0, 1.0, count),
            np.zeros(count),
        )
        return StepProfile(length, kept, np.zeros((layers, 2)), 0, samples)

    return of


def here(cases: Sequence[Case]) -> list[Stream]:
    """Steps traced in this process, of any depth from a few layers."""
    return [depth.step(case, lambda few: map(trace, few)) for case in cases]


def traced(config: dict[str, Any], directory: Path, length: int, options: Options) -> StepProfiles:
    """Profiles of a model, with weights in fp32 and autocast if the options have master weights."""
    skeleton = Skeleton(write(directory, config))
    question = Question(skeleton, 1, 80 << 30, length, options=options)
    return StepProfiles(question, options.master_weights and options.precision != "fp32", here)
