"""Experts that move between steps: losses, gradients and adapters go on as if they had always been there, fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.adapters.flat_params import FlatParams
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_shape
from megatron_mux.engine import Engine
from megatron_mux.engine.expert_moves import adapter_bytes_per_expert, place_experts
from megatron_mux.engine.task_state import TaskState
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape
from tests.distributed.test_expert_layouts import Layout, assert_alike, cases_of, of_latent_attention, train
from tests.distributed.test_expert_managers import uneven
from tests.distributed.test_experts import scattered

Joined = Callable[..., Parallel]
MOVED = ("lora", "experts", "few_experts", "prefix", "linear")
LAYOUTS = [
    Layout(1, 1, 4),
    Layout(1, 1, 2, recompute="full"),
    Layout(2, 1, 2, 2),
    Layout(1, 2, 2, split=(1, 1, 1, 1), policy="temporal"),
    Layout(1, 1, 1, managers=3),
]


@pytest.fixture
def checkpoint(model_of: Callable[[str], Path]) -> Path:
    return model_of("mixtral")


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


def test_a_run_goes_on_as_if_experts_had_not_moved(
    checkpoint: Path, model_of: Callable[[str], Path], joined: Joined
) -> None:
    deepseek = model_of(
        "deepseek_v3"
    )  # with shared experts, a first layer without experts, and latent attention
    mixtral = [case for case in cases_of(96) if case.name in MOVED]
    without = [case for case in mixtral if "target_parameters" not in case.adapter]
    latent = [of_latent_attention(case) for case in mixtral]
    whole: dict[str, Any] = {}
    for layout, path, tasks in (
        (LAYOUTS[0], deepseek, latent),
        (LAYOUTS[1], checkpoint, mixtral),
        (LAYOUTS[2], checkpoint, without),
        (LAYOUTS[3], checkpoint, mixtral),
        (LAYOUTS[4], deepseek, latent),
    ):
        key, shape, start = f"{path} {len(tasks)}", read_shape(path), None
        if key not in whole:
            whole[key] = train(joined, path, tasks, Layout(1, 1, 1))
        if layout.managers:
            assert shape.experts is not None
            layers = shape.experts.layers(shape.layers)
            start = Placement.among_managers(shape.experts.count, 3, layers)
        found = train(joined, path, tasks, layout, start, others(shape, layout))
        assert_alike(found, whole[key], 1e-10, layout)


def test_adapters_go_straight_to_the_new_manager(checkpoint: Path, joined: Joined) -> None:
    """With their experts' weights, and nothing through the master."""
    shape = read_shape(checkpoint)
    assert shape.experts is not None
    parallel = joined(1, 1, False, 1, 1, 3)
    start = Placement.among_managers(shape.experts.count, 3, range(shape.layers))
    backbone = Backbone.load(checkpoint, parallel, torch.float64, placement=start)
    engine = Engine(backbone, parallel)
    engine.register_tasks([case.task for case in cases_of(96) if case.name in ("lora", "experts")])
    engine.step()
    after = others(shape, Layout(1, 1, 1, managers=3))[0]
    moves = [move for layer in range(shape.layers) for move in start.moves(after, layer)]
    weights = 3 * shape.hidden * shape.experts.ffn
    # A and B, rank 3, of both matrices, with two moments each.
    inner = 3 * (shape.hidden + 2 * shape.experts.ffn + shape.experts.ffn + shape.hidden)
    assert adapter_bytes_per_expert(engine) == 3 * inner * 8
    own = sum(move.target == parallel.experts.rank for move in moves)
    assert place_experts(engine, after) == own * (weights + 3 * inner) * 8
    assert parallel.experts.holds_rows or own


@pytest.mark.parametrize(
    "short", [(TaskState, "attach"), (FlatParams, "refresh"), (Engine, "reserve_gradient_buffer")]
)
def test_a_rank_without_memory_for_adapters_keeps_no_other_waiting(
    checkpoint: Path, joined: Joined, monkeypatch: pytest.MonkeyPatch, short: tuple[type, str]
) -> None:
    shape = read_shape(checkpoint)
    assert shape.experts is not None
    parallel = joined(1, 1, False, 1, 1, 3)
    start = Placement.among_managers(shape.experts.count, 3, range(shape.layers))
    engine = Engine(Backbone.load(checkpoint, parallel, torch.float64, placement=start), parallel)
    engine.register_tasks([case.task for case in cases_of(96) if case.name in ("lora", "experts")])

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("made to fail. Tried to allocate 2 GiB")

    if parallel.rank == 2:
        monkeypatch.setattr(*short, fail)
    with pytest.raises(UserError, match=r"rank 2: .*experts have moved, and there is no memory.*2 GiB"):
        place_experts(engine, others(shape, Layout(1, 1, 1, managers=3))[0])


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
