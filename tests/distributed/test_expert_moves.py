"""Experts that move between steps: losses, gradients and adapters go on as if they had always been there, fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_shape
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape
from tests import tiny_models
from tests.distributed.test_expert_layouts import Layout, cases_of, train
from tests.distributed.test_expert_managers import uneven
from tests.distributed.test_experts import scattered
from tests.end_to_end.harness import assert_close

Joined = Callable[..., Parallel]
LAYOUTS = [
    Layout(1, 1, 4),
    Layout(1, 1, 2, recompute="full"),
    Layout(2, 1, 2, 2),
    Layout(1, 2, 2, split=(1, 1, 1, 1), policy="temporal"),
    Layout(1, 1, 1, managers=3),
]


@pytest.fixture(scope="module")
def checkpoint(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("expert-moves", lambda directory: tiny_models.make(directory, "mixtral")) / "mixtral"


def permuted(shape: BackboneShape, size: int) -> Placement:
    """As many experts on each rank as by default, in random order."""
    assert shape.experts is not None
    drawn, count = random.Random(7), shape.experts.count
    layers = {
        layer: tuple((place * size // count,) for place in drawn.sample(range(count), count))
        for layer in shape.experts.layers(shape.layers)
    }
    return Placement(size, layers)


def others(shape: BackboneShape, layout: Layout) -> list[Placement]:
    """Two placements to move to: uneven ones with replicas, then a permuted one; managers have no replicas."""
    if not layout.managers:
        return [scattered(shape, layout.expert), permuted(shape, layout.expert)]
    found = uneven(shape)
    rotated = {
        layer: tuple((owner % layout.managers + 1,) for (owner,) in row) for layer, row in found.ranks.items()
    }
    return [found, Placement(found.size, rotated)]


def test_a_run_goes_on_as_if_experts_had_not_moved(checkpoint: Path, joined: Joined) -> None:
    shape = read_shape(checkpoint)
    cases = [case for case in cases_of(96) if case.name in ("lora", "experts", "few_experts", "prefix")]
    without = [case for case in cases if "target_parameters" not in case.adapter]
    whole = {len(own): train(joined, checkpoint, own, Layout(1, 1, 1)) for own in (cases, without)}
    for layout in LAYOUTS:
        tasks = without if layout.expert_tensor > 1 else cases
        start = None
        if layout.managers:
            assert shape.experts is not None
            rows = tuple((1 + expert % 3,) for expert in range(shape.experts.count))
            start = Placement(4, dict.fromkeys(range(shape.layers), rows))
        wanted, adapters = whole[len(tasks)]
        found, own = train(joined, checkpoint, tasks, layout, start, others(shape, layout))
        for step, (theirs, ours) in enumerate(zip(wanted, found, strict=True)):
            for name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-10), (layout, step, name)
        for name, tensors in own.items():
            reference = adapters[name]
            if tensors is not None and reference is not None:
                assert_close(tensors, reference, 1e-10, f"{layout} {name}")


def test_weights_arrive_where_they_would_be_read(checkpoint: Path, joined: Joined) -> None:
    parallel = joined(1, 1, False, 2, 2)
    shape = read_shape(checkpoint)
    moved, wanted = (
        Backbone.load(checkpoint, parallel, placement=placement)
        for placement in (permuted(shape, 2), scattered(shape, 2))
    )
    received = moved.place_experts(scattered(shape, 2))
    expected = dict(wanted.model.named_parameters())
    for name, parameter in moved.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    own = parallel.experts.rank
    moves = [m for layer in moved.layers for m in permuted(shape, 2).moves(scattered(shape, 2), layer)]
    one = 3 * shape.hidden * shape.experts.ffn * 4 // 2 if shape.experts is not None else 0
    assert received == one * sum(move.target == own for move in moves) and received
    assert moved.place_experts(scattered(shape, 2)) == 0
    # Replicas that only leave: nothing is sent, and each rank keeps the others' weights.
    first = {layer: tuple(ranks[:1] for ranks in row) for layer, row in scattered(shape, 2).ranks.items()}
    assert moved.place_experts(Placement(2, first)) == 0
    fewer = Backbone.load(checkpoint, parallel, placement=Placement(2, first))
    expected = dict(fewer.model.named_parameters())
    for name, parameter in moved.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_offloaded_experts_stay(checkpoint: Path, joined: Joined) -> None:
    parallel = joined(1, 1, False, 2, 2)
    backbone = Backbone.load(checkpoint, parallel, residence="offloaded")
    with pytest.raises(UserError, match="needs --mux-backbone-weights resident"):
        backbone.place_experts(permuted(read_shape(checkpoint), 2))
