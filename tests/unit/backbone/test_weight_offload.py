"""Weights that live elsewhere between uses: the same results, bit for bit, and memory for what is in use alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone, Recompute
from megatron_mux.backbone.weight_group import WeightGroup
from megatron_mux.backbone.weight_offload import WeightOffload, weight_group_of
from megatron_mux.engine import Engine, Planning
from megatron_mux.runtime import Parallel
from tests.distributed.test_engine_layouts import cases_of
from tests.end_to_end.harness import Case, Trained, assert_same, random_records, train
from tests.end_to_end.held_out import evaluated, make_case, plain
from tests.weight_groups import bytes_of

PLANNINGS: dict[str, Callable[[], Planning]] = {
    "whole": lambda: Planning("spatial", 1),
    "chunks": lambda: Planning("spatial", 1, chunk=4),
    "in turns": lambda: Planning("temporal", 1, micro_batches=3),
}


def _trained(
    path: Path, parallel: Parallel, kind: Any, cases: list[Case], planning: str, **load: Any
) -> Trained:
    backbone = Backbone.load(path, parallel, torch.float64, residence=kind, **load)
    return train(backbone, parallel, cases, 2, planning=PLANNINGS[planning]())


def _assert_same_training(found: Trained, wanted: Trained) -> None:
    assert found.results == wanted.results
    for name, tensors in wanted.tensors.items():
        assert_same(found.tensors[name], tensors, name)


@pytest.mark.parametrize(
    ("family", "recompute", "planning"),
    [
        ("llama-tied", "none", "whole"),
        ("llama-tied", "none", "chunks"),
        ("llama-tied", "full", "chunks"),
        ("llama-tied", "selective", "in turns"),
        ("gpt2", "none", "in turns"),
        ("gpt2", "full", "whole"),
        ("gpt2", "selective", "chunks"),
    ],
)
def test_offloaded_trains_bit_for_bit_as_resident(
    family: str, recompute: Recompute, planning: str, checkpoints: Callable[..., Path], parallel: Parallel
) -> None:
    cases = cases_of("gpt2" if family == "gpt2" else "llama", 96)
    path = checkpoints(family)
    wanted, found = (
        _trained(path, parallel, kind, cases, planning, recompute=recompute)
        for kind in ("resident", "offloaded")
    )
    _assert_same_training(found, wanted)


def _at_layer(name: str, layer: int) -> Case:
    section = {"peft_type": "LORA", "r": 2, "target_modules": rf".*layers\.{layer}\..*q_proj"}
    training: dict[str, object] = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4}
    return Case(name, section, training, random_records(4, 96, 4, 9, seed=layer))


@pytest.mark.parametrize("layers", [[3], [1, 3]])
def test_adapters_that_begin_at_different_layers(
    layers: list[int], checkpoints: Callable[..., Path], parallel: Parallel
) -> None:
    cases = [_at_layer(f"at-{layer}", layer) for layer in layers]
    path = checkpoints("llama")
    wanted, found = (_trained(path, parallel, kind, cases, "in turns") for kind in ("resident", "offloaded"))
    _assert_same_training(found, wanted)


def test_an_evaluation_is_the_same(checkpoints: Callable[..., Path], parallel: Parallel) -> None:
    path = checkpoints("llama")
    found = [
        evaluated(Backbone.load(path, parallel, residence=kind), parallel, make_case("lora", path), plain())
        for kind in ("resident", "offloaded")
    ]
    assert found[0] == found[1]


def test_one_data_parallel_rank_has_nobody_to_share_with(
    checkpoints: Callable[..., Path], parallel: Parallel
) -> None:
    path = checkpoints("llama")
    assert not Backbone.load(path, parallel, residence="sharded").offload.groups
    assert Backbone.load(path, parallel, residence="sharded-offloaded").offload.groups


def test_a_step_of_a_resident_backbone_asks_nobody_for_weights(
    checkpoints: Callable[..., Path], parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()

    def noting(name: str) -> Callable[..., Any]:
        own = getattr(WeightOffload, name)

        def note(*arguments: Any) -> Any:
            asked.add(name)
            return own(*arguments)

        return note

    for name in ("using", "layers"):
        monkeypatch.setattr(WeightOffload, name, noting(name))
    path, cases = checkpoints("llama"), cases_of("llama", 96)[:1]
    nothing: set[str] = set()
    for kind, wanted in (("resident", nothing), ("offloaded", {"using", "layers"})):
        _trained(path, parallel, kind, cases, "whole")
        assert asked == wanted


# ---- memory, names and the weights themselves


def _storages(backbone: Backbone) -> dict[int, int]:
    """Bytes that each group's buffer has now."""
    return {
        id(group): bytes_of(group).whole.untyped_storage().nbytes()
        for group in backbone.offload.groups.values()
    }


@contextmanager
def _watched(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[int]]]:
    """Which weights were waited for, and how many groups had memory each time that one was on its way."""
    names = {id(group): str(key) for key, group in backbone.offload.groups.items()}
    used: list[str] = []
    alive: list[int] = []
    wait, bring = WeightGroup.wait, WeightGroup.bring

    def waited(group: WeightGroup) -> None:
        wait(group)
        used.append(names[id(group)])

    def brought(group: WeightGroup) -> None:
        bring(group)
        alive.append(sum(size > 0 for size in _storages(backbone).values()))

    with monkeypatch.context() as patched:
        patched.setattr(WeightGroup, "wait", waited)
        patched.setattr(WeightGroup, "bring", brought)
        yield used, alive


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_there_for_what_is_in_use(
    recompute: Recompute,
    checkpoints: Callable[..., Path],
    parallel: Parallel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = Backbone.load(checkpoints("llama"), parallel, recompute=recompute, residence="offloaded")
    engine = Engine(backbone, parallel, Planning("spatial", 1, micro_batches=1))
    engine.register_tasks([_at_layer("first", 1).task, _at_layer("second", 2).task])
    assert set(_storages(backbone).values()) == {0}, "nothing between loading and the first step"
    for _ in range(2):
        with _watched(backbone, monkeypatch) as (used, alive):
            engine.step()
        assert set(_storages(backbone).values()) == {0}, "nothing between steps"
        assert max(alive) == 2, "a unit and the next one at the most"
        # Down to the lowest adapter, and no further: nothing below needs a gradient.
        assert used == ["embedding", *"0123", "head", *"321"]


def test_names_and_values_are_untouched(checkpoints: Callable[..., Path], parallel: Parallel) -> None:
    path = checkpoints("llama-tied")
    whole, away = (Backbone.load(path, parallel, residence=kind) for kind in ("resident", "offloaded"))
    wanted = dict(whole.model.named_parameters(remove_duplicate=False))
    found = dict(away.model.named_parameters(remove_duplicate=False))
    assert list(found) == list(wanted)
    assert found["output_layer.weight"] is found["embedding.word_embeddings.weight"]
    for name, parameter in found.items():
        assert not parameter.requires_grad
        with away.offload.using(weight_group_of(name, len(away.layers))):
            assert torch.equal(parameter, wanted[name]), name
            assert parameter.data_ptr() % 64 == 0, "where torch would put it itself"
    kept = sum(
        bytes_of(group).share.nbytes for group in {id(u): u for u in away.offload.groups.values()}.values()
    )
    size = sum(p.nbytes for p in whole.model.parameters())
    assert size <= kept <= size + 256 * (len(wanted) + len(away.offload.groups))


def test_a_second_backward_is_not_taken_for_a_changed_weight(parallel: Parallel) -> None:
    """Autograd keeps views of the buffer; dropping and filling it again must not count as a change in place."""
    weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
    wanted = weight.clone()
    offload = WeightOffload("offloaded", parallel)
    offload.store(0, [weight])
    x = torch.randn(3, 4, requires_grad=True)
    layers = offload.layers(x, 0)
    layers.through(0, lambda h: torch.nn.functional.linear(h, weight) @ weight.t())
    assert weight.untyped_storage().nbytes() == 0
    for _ in range(3):
        with offload.using(0):
            pass
    layers.hidden.sum().backward()
    expected: Tensor = torch.ones(3, 4) @ wanted @ wanted
    torch.testing.assert_close(x.grad, expected)
