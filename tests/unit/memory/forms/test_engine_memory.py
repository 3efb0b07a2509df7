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


def total(model: EngineMemory) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Bytes that last on every stage."""
    return sum(model.lasting, start=np.zeros(1))


def test_what_lasts() -> None:
    task = lora(MODEL)
    layer, embedding = MODEL.layers[0].total, MODEL.embedding.total
    first, last = total(memory([task], stages=2))
    assert first == 4 * (4 * layer + embedding) + 16 * elements(task) / 2
    assert last == pytest.approx(first + 4 * MODEL.hidden), (
        "the final norm; a tied output layer is a copy there"
    )
    plain = replace(task, optimizer="sgd")
    assert first - total(memory([plain], stages=2))[0] == 8 * elements(task) / 2, "no moments"
    fixed = replace(task, fixed=1000)
    assert total(memory([fixed], stages=2))[0] - first == 4000, "nothing trains what is fixed"
    copied = replace(task, copies=2)
    more = total(memory([copied], stages=2))[0] - first
    assert more == 8 * elements(task) / 2, (
        "a frozen copy for reference has values and gradients, but no moments"
    )


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
    methods: list[dict[str, Any]] = [{}, {"tensor": 2, "sequence_parallel": True}]
    for method in methods:
        model = memory(tasks, stages=2, device="cuda", **method)
        mixes = [[64.0, 0.0], [0.0, 100.0], [64.0, 100.0]]
        together = model.passes(rows(*mixes))
        for i, mix in enumerate(mixes):
            alone = model.passes(rows(mix))
            assert alone.kept[0] == pytest.approx(together.kept[i])
            assert alone.workspace[0] == pytest.approx(together.workspace[i])
