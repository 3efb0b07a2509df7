"""What is recorded: storages, not tensors."""

from __future__ import annotations

import torch

from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import FORWARD, StepPosition
from megatron_mux.memory.stream.events import Stream

_RESIZE = torch.UntypedStorage.resize_


def _recorder() -> Recorder:
    place = StepPosition()
    place.enter(FORWARD)
    return Recorder(place, "cpu", vocabulary=7)


def _told(stream: Stream) -> list[str]:
    return [f"{event.kind} {event.block} {event.size} {event.moment.operator}".strip() for event in stream]


def test_views_and_what_is_done_in_place_bring_no_storage() -> None:
    with _recorder() as recorder:
        a = torch.zeros(4, 3)
        b = a.view(12)[2:5].add_(1)
        del a
        c = b + 1
        del b
    del c
    assert _told(recorder.done()) == ["allocate 0 48 zeros", "allocate 1 12 add", "free 0 48", "free 1 12"]


def test_what_autograd_saves_lives_until_the_backward_pass_has_used_it() -> None:
    x = torch.ones(8, requires_grad=True)
    with _recorder() as recorder:
        y = (x.exp() * x).sum()  # exp's result is saved twice, the product's not at all
        told = len(recorder.done())
        y.backward()
    assert _told(recorder.done())[:told] == [
        "allocate 0 32 exp",
        "allocate 1 32 mul",
        "allocate 2 4 sum",
        "free 1 32",
    ]
    assert "free 0 32" in _told(recorder.done())[told:]


def test_a_storage_without_bytes_is_none() -> None:
    with _recorder() as recorder:
        torch.zeros(0, 5)
    assert not len(recorder.done())


def test_another_device_does_not_count() -> None:
    place = StepPosition()
    with Recorder(place, "cuda", vocabulary=7) as recorder:
        torch.zeros(5)
    assert not len(recorder.done())


def test_a_storage_that_gives_its_memory_back_and_gets_it_again_is_noted() -> None:
    with _recorder() as recorder:
        a = torch.zeros(8)
        storage = a.untyped_storage()
        storage.resize_(0)
        storage.resize_(0)
        storage.resize_(64)
        del a, storage
        b = torch.zeros(2)
        b.untyped_storage().resize_(0)
        del b  # nothing is left to free
    assert torch.UntypedStorage.resize_ is _RESIZE
    assert _told(recorder.done()) == [
        "allocate 0 32 zeros",
        "free 0 32",
        "allocate 1 64 resize_",
        "free 1 64",
        "allocate 2 8 zeros",
        "free 2 8",
    ]


def test_a_view_of_memory_that_was_there_before_allocates_nothing() -> None:
    before = torch.zeros(6)
    with _recorder() as recorder:
        parts = before.view(2, 3).split(1)
        del parts
        torch.tensor([1.0, 2.0])
    assert _told(recorder.done()) == ["allocate 0 8 lift_fresh", "free 0 8"]
