"""Sizes that depend on the values of integer tensors, on a fake device."""

from __future__ import annotations

import torch

from megatron_mux.backbone.experts.permutation import ExpertPermutation
from megatron_mux.dry_run.known_values import set_known
from megatron_mux.dry_run.real_host import RealHostMode, read_fake_value
from megatron_mux.memory.fake_gpu.fake_tensors import FakeTensors
from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import StepPosition

EXPERTS = [[0, 2], [1, 2], [2, 0], [1, 3]]
SLOTS = [0, 0, 1, 1]


def _pairs(known: bool, read: bool) -> ExpertPermutation:
    """Pairs on a fake device; with `read`, the host has read the sizes of their groups."""
    experts, slots = torch.tensor(EXPERTS), torch.tensor(SLOTS)
    places = torch.tensor([0, -1, 1, -1, -1])  # of five with none: this rank holds experts 0 and 2
    with FakeTensors(), RealHostMode():
        on_device = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (experts, slots, places)]
        for fake, values in zip(on_device, (experts, slots, places), strict=True):
            set_known(fake, values if known else None)
        with Recorder(StepPosition(), "cuda", 0, read_fake_value):
            pairs = ExpertPermutation.of(on_device[0], on_device[1], on_device[2], 2, 5)
            if read:
                assert pairs.groups.counts and pairs.groups.groups
            return pairs


def test_pairs_of_known_experts_are_those_of_real_ones() -> None:
    real = ExpertPermutation.of(
        torch.tensor(EXPERTS), torch.tensor(SLOTS), torch.tensor([0, -1, 1, -1, -1]), 2, 5
    )
    fake = _pairs(known=True, read=True)
    assert fake.groups.counts == real.groups.counts == (2, 3)
    assert fake.groups.groups == real.groups.groups
    assert fake.rows.shape == real.rows.shape and fake.starts.shape == real.starts.shape
