"""What stands in for random bits takes the memory of what it replaces."""

from __future__ import annotations

import pytest
import torch

from megatron_mux.attributes import replaced
from megatron_mux.dry_run.stand_ins import fewer_bits_
from megatron_mux.kernels import dropout
from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import FORWARD, StepPosition


def peak_and_events(of: str) -> tuple[int, int]:
    """Of a mask, or of noise for a matrix."""
    numbers = torch.arange(40)

    def draw() -> None:
        if of == "mask":
            dropout.keep_mask(5, 1, numbers, numbers, (0, 64), 0.1)
        else:
            dropout.uniform(5, numbers, numbers)

    for _ in range(2):  # what a process records first has a tensor more alive
        place = StepPosition()
        place.enter(FORWARD)
        with Recorder(place, "cpu", 7) as recorder:
            draw()
        live = recorder.done().live()
    return max(live), len(live)


@pytest.mark.parametrize("of", ["mask", "noise"])
def test_one_round_takes_what_all_take(of: str) -> None:
    peak, events = peak_and_events(of)
    with replaced(dropout, "_mix_", fewer_bits_):
        fewer = peak_and_events(of)
    assert fewer[0] == peak and fewer[1] <= events / 2
