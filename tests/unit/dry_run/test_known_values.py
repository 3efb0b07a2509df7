"""Sizes that depend on the values of integer tensors, on a fake device."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from megatron_mux.backbone.experts.pairs import Pairs
from megatron_mux.dry_run.known_values import set_known
from megatron_mux.dry_run.real_host import RealHostMode, read_fake_value
from megatron_mux.memory.fake_gpu.place import Place
from megatron_mux.memory.fake_gpu.recorder import Recorder

EXPERTS = [[0, 2], [1, 2], [2, 0], [1, 3]]
SLOTS = [0, 0, 1, 1]


def _pairs(known: bool) -> Pairs:
    experts, slots = torch.tensor(EXPERTS), torch.tensor(SLOTS)
    places = torch.tensor([0, -1, 1, -1, -1])  # of five with none: this rank holds experts 0 and 2
    with FakeTensorMode(allow_non_fake_inputs=True), RealHostMode():
        on_device = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (experts, slots, places)]
        for fake, values in zip(on_device, (experts, slots, places), strict=True):
            set_known(fake, values if known else None)
        with Recorder(Place(), "cuda", 0, read_fake_value):
            return Pairs.of(on_device[0], on_device[1], on_device[2], 2)


def test_pairs_of_known_experts_are_those_of_real_ones() -> None:
    real = Pairs.of(torch.tensor(EXPERTS), torch.tensor(SLOTS), torch.tensor([0, -1, 1, -1, -1]), 2)
    fake = _pairs(known=True)
    assert fake.counts == real.counts == (2, 3) and fake.groups == real.groups
    assert fake.rows.shape == real.rows.shape and fake.starts.shape == real.starts.shape


def test_without_values_the_size_is_not_guessed() -> None:
    with pytest.raises(DynamicOutputShapeException):
        _pairs(known=False)
