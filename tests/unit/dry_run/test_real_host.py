"""What is real and what is fake in a dry run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.dry_run.real_host import RealHostMode, read_fake_value
from megatron_mux.memory.fake_gpu.fake_tensors import FakeTensors
from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import StepPosition


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Entered, above a fake host."""
    with (
        FakeTensors(),
        RealHostMode(),
        Recorder(StepPosition(), "cpu", 7, read_fake_value) as found,
    ):
        yield found


def test_what_decides_about_shapes_is_really_computed(recorder: Recorder) -> None:
    labelled = torch.tensor([False, True, True])
    rows = labelled.nonzero().squeeze(1) + torch.arange(1)
    assert rows.tolist() == [1, 2]
    assert torch.zeros(5, 3).index_select(0, rows).shape == (2, 3)


def test_all_else_has_no_memory(recorder: Recorder) -> None:
    for tensor in (
        torch.zeros(1 << 40),
        torch.empty(1 << 40, dtype=torch.uint8),
        torch.arange(1 << 40, dtype=torch.int32),
    ):
        assert isinstance(tensor, FakeTensor)
    big = torch.arange(6).view(2, 3) + torch.zeros(2, 3)
    assert isinstance(big, FakeTensor)


def test_what_is_read_from_nothing_is_zero(recorder: Recorder) -> None:
    assert torch.ones(2).sum().item() == 0.0
    assert not bool(torch.isnan(torch.ones(1)))
    assert torch.tensor([3]).item() == 3


def test_a_real_tensor_that_takes_fake_values_stays_where_it_is(recorder: Recorder) -> None:
    flags = torch.tensor([False, False])
    events = recorder.events
    assert flags.copy_(torch.ones(2) > 0) is flags
    assert not isinstance(flags, FakeTensor)
    allocated = [event.moment.operator for event in recorder.done()][events:]
    assert "copy_" not in allocated
