"""The memory of the engine: what lasts, what micro-batches keep and take. Dry runs are elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.memory.forms.architecture import Architecture, Unit
from megatron_mux.memory.forms.engine_memory import EngineMemory, Rows
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from tests.unit.memory.architectures import llama, lora

LAYERS = 8
MODEL = llama(LAYERS, tied=True, head=Unit())


def memory(
    tasks: list[TaskAdapters],
    stages: int = 1,
    device: str = "cpu",
    model: Architecture = MODEL,
    **method: Any,
) -> EngineMemory:
    divided = stage_layers(even_split(LAYERS, stages))
    return EngineMemory(
        model, tasks, divided, Method(pipeline=stages, **method), 4, [(64,)] * len(tasks), device
    )


def rows(*of_tasks: list[float]) -> Rows:
    of = np.array(of_tasks)
    return Rows(of, of.sum(axis=1), of.sum(axis=1) / 2, np.zeros(len(of)))


def elements(task: TaskAdapters) -> float:
    return sum(task.divided) + sum(task.copied)


def test_what_lasts() -> None:
    task = lora(MODEL)
    layer, embedding = MODEL.layers[0].total, MODEL.embedding.total
    first, last = memory([task], stages=2).lasting.total
    assert first == 4 * (4 * layer + embedding) + 16 * elements(task) / 2
    assert last == pytest.approx(first + 4 * MODEL.hidden), (
        "the final norm; a tied output layer is a copy there"
    )
    plain = replace(task, optimizer="sgd")
    assert first - memory([plain], stages=2).lasting.total[0] == 8 * elements(task) / 2, "no moments"
    fixed = replace(task, fixed=1000)
    assert memory([fixed], stages=2).lasting.total[0] - first == 4000, "nothing trains what is fixed"
    copied = replace(task, copies=2)
    more = memory([copied], stages=2).lasting.total[0] - first
    assert more == 8 * elements(task) / 2, (
        "a frozen copy for reference has values and gradients, but no moments"
    )


def test_weights_that_live_elsewhere_leave_memory_free() -> None:
    task = lora(MODEL)
    (whole,) = memory([task], data=4).lasting.total
    (sharded,) = memory([task], data=4, zero=3).lasting.total
    (offloaded,) = memory([task], device="cuda", data=4, offload=True).lasting.total
    two = 2 * MODEL.layers[0].total  # more than the embedding and a layer
    assert whole - offloaded == 4 * (MODEL.total - two)
    assert sharded - offloaded == pytest.approx(MODEL.total, rel=1e-3)


def test_a_process_takes_more_than_tensors_on_a_gpu_alone() -> None:
    assert memory([]).overhead == 0.0
    alone, pair = memory([], device="cuda").overhead, memory([], stages=2, device="cuda").overhead
    assert alone > 512 << 20 and pair > alone


def test_what_is_computed_again_is_not_kept() -> None:
    task = lora(MODEL)
    plain, again = (memory([task], recompute=how).passes(rows([256.0])) for how in ("none", "full"))
    assert again.lasting[0, 0] < plain.lasting[0, 0] / 2 and again.working[0, 0] > plain.working[0, 0]


def test_below_the_lowest_adapter_nothing_is_kept_and_tasks_share_inputs() -> None:
    def at(name: str, layer: int) -> TaskAdapters:
        task = lora(MODEL, name=name)
        return replace(task, ops=tuple(op for op in task.ops if op.layer == layer))

    model = memory([at("low", 1), at("high", 6), at("twin", 1)])
    kept = model.passes(rows([64.0, 0.0, 0.0], [0.0, 64.0, 0.0], [32.0, 0.0, 32.0])).kept[:, 0]
    assert kept[1] < kept[0] / 2
    assert kept[2] == pytest.approx(kept[0]), "the input once for both, and latent rows as many as one has"
    (below, top), (first, second) = (
        memory([at("low", 1), at("high", 6)], stages=2).passes(rows(mix)).kept[0]
        for mix in ([0.0, 64.0], [64.0, 0.0])
    )
    assert below == 64 * model.row_inputs + 32 * 60 < first, (
        "a stage below all adapters keeps what a batch itself is"
    )
    assert top < second, "a later stage keeps nothing below its lowest adapter, if no stage before it trains"


def test_many_micro_batches_at_once_are_priced_like_each() -> None:
    tasks = [lora(MODEL, 8, "a"), replace(lora(MODEL, 32, "b"), optimizer="sgd")]
    for method in (
        {},
        {"recompute": "full"},
        {"tensor": 2, "sequence_parallel": True},
        {"zero": 3, "data": 2},
    ):
        model = memory(tasks, stages=2, device="cuda", **method)
        mixes = [[64.0, 0.0], [0.0, 100.0], [64.0, 100.0]]
        together = model.passes(rows(*mixes), 8)
        for i, mix in enumerate(mixes):
            alone = model.passes(rows(mix), 8)
            assert alone.lasting[0] == pytest.approx(together.lasting[i])
            assert alone.working[0] == pytest.approx(together.working[i])


def test_neighbours_messages_are_there() -> None:
    """Received ahead and sent, on each side of a stage that has a neighbour there; as many as a step can have."""
    model = memory([lora(MODEL)], stages=4, tensor=2)
    few, some, many = (model.passes(rows([64.0]), n).messages[0] / (64 * 256 * 4) for n in (1, 3, 100))
    assert few.tolist() == [0, 0, 0, 0], "of one micro-batch, nothing beside what it keeps"
    assert some.tolist() == [0, 3, 4, 3]
    assert many.tolist() == [6, 11 + 7, 11 + 8, 11]
    task = lora(MODEL)
    upper = replace(task, ops=tuple(op for op in task.ops if op.layer >= 4))
    above = memory([upper], stages=4, tensor=2).passes(rows([64.0]), 100).messages[0] / (64 * 256 * 4)
    assert above.tolist() == [6, 1 + 7, 1 + 8, 11], (
        "the first two stages get no gradient, the third sends none"
    )
