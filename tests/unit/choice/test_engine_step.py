"""A step of tasks from tables: by hand where few numbers tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron_mux.choice.engine_step import EngineStep, step_memory
from megatron_mux.footprint.content import ATTENTION
from megatron_mux.kernels.attention.short import LONGEST, pairs_and_padding
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.phases import StepMemory
from megatron_mux.memory.forms.recipe import Recipe
from tests.unit.choice.tables_by_hand import BACKWARD, CHUNK, KEPT, SUMS, TAKEN, TablesByHand
from tests.unit.memory.architectures import at_stage, llama, lora, quantised

MODEL = llama(8)
RECIPE = Recipe(128, adapters=(lora(MODEL), lora(MODEL, 16, "other")))
VALUES = 8 * (8 + 16) * (2 * 256 + 256 + 128)
"""Of both adapters."""


def of(method: ParallelConfig, recipe: Recipe = RECIPE) -> StepMemory:
    return step_memory(MODEL, recipe, method, tables=TablesByHand(MODEL, recipe), device="cpu")


def at(memory: StepMemory, name: str, rows: int = 512) -> Mapping[str, int]:
    """A phase of the last stage."""
    return [phase for phase in memory.phases(rows) if phase.name == name][-1].breakdown


def test_parts_by_hand() -> None:
    found = of(ParallelConfig())
    for name in ("the loss", BACKWARD, "the optimizer's step"):
        parts = at(found, name)
        assert parts["parameters"] == 2 * MODEL.total
        # Of 18 bytes for each value four are gradients and eight moments. A trial has gradients from its start.
        assert [parts[part] for part in ("adapters", "gradients", "optimizer")] == [
            6 * VALUES,
            4 * VALUES,
            8 * VALUES,
        ]
    kept = 512 * 8 * KEPT * 256 * 2 + 256 * (1 + 2)
    assert at(found, "the loss")["activations"] == kept == at(found, BACKWARD)["activations"]
    assert at(found, "the loss")["logits"] == 512 * 1024 * 2 and at(found, "the loss")["workspace"] == 0
    assert at(found, BACKWARD)["logits"] == 0 and at(found, BACKWARD)["workspace"] == 512 * TAKEN * 256 * 2
    step = at(found, "the optimizer's step")
    assert step["activations"] == 0 and step["workspace"] == 8 * 16 * (2 * 256 + 256 + 128), (
        "the larger one's"
    )
    assert at(of(ParallelConfig(data=2)), BACKWARD)["communication"] == SUMS


def test_logits_come_in_chunks() -> None:
    found = of(ParallelConfig())
    assert (
        at(found, "the loss", CHUNK)["logits"]
        == at(found, "the loss", 2 * CHUNK)["logits"]
        == CHUNK * 1024 * 2
    )


def test_micro_batches_in_flight_and_on_their_way() -> None:
    memory, rows = of(ParallelConfig(pipeline=4)), 512
    hidden = 256 * 2 * rows
    each = [at_stage(memory, stage, rows) for stage in range(4)]
    layers = 2 * KEPT * hidden + rows // 2 * 3
    # A stage keeps what it has received and sent of each micro-batch in flight.
    kept = [(4 - stage) * (layers + hidden * ((stage > 0) + (stage < 3))) for stage in range(4)]
    assert [parts["activations"] for parts in each] == kept
    assert all(parts["communication"] > 0 for parts in each)
    assert memory.worst(rows).stage == 0


def test_a_task_alone_is_priced_by_its_own_table() -> None:
    alone = [
        at(of(ParallelConfig(), replace(RECIPE, mix=mix)), BACKWARD)["activations"]
        for mix in ((1.0, 0.0), (0.0, 1.0))
    ]
    assert alone[1] - alone[0] == 512


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_nothing_but_tensors_counts_on_a_cpu(device: str) -> None:
    found = step_memory(
        MODEL, RECIPE, ParallelConfig(), tables=TablesByHand(MODEL, RECIPE), device=device
    ).worst(512)
    assert (found.breakdown["context"] > 0) == (found.breakdown["fragmentation"] > 0) == (device == "cuda")


@pytest.mark.parametrize(("lengths", "calls"), [((64, 100), 1), ((64, 1000), 2), ((1000, 2000), 2)])
def test_a_cpus_attention_has_all_sequences_of_a_micro_batch(lengths: tuple[int, int], calls: int) -> None:
    """Short ones are one call, whatever their task; long ones are by task, and outputs of several calls are joined."""
    adapters = tuple(
        replace(task, length=length) for task, length in zip(RECIPE.adapters, lengths, strict=True)
    )
    recipe = replace(RECIPE, adapters=adapters, mix=(0.5, 0.5))
    memory = EngineStep(
        TablesByHand(MODEL, recipe)(ParallelConfig()),
        MODEL,
        recipe,
        ParallelConfig(),
        device="cpu",
    )
    rows = 4 * lengths[0] * lengths[1]
    found = dict(zip(ATTENTION, memory._contents(rows).attention[0].tolist(), strict=True))
    short = [length for length in lengths for _ in range(rows // 2 // length) if length <= LONGEST]
    assert (found["pairs"], found["padding"], found["block"]) == pairs_and_padding(short)
    assert found["long"] == sum(rows / 2 for length in lengths if length > LONGEST)
    assert (found["joined"], found["masked"]) == (rows * (calls > 1), 0)


def test_offloaded_weights_are_in_host_memory() -> None:
    assert of(ParallelConfig()).host == 0
    assert of(ParallelConfig(offload=True)).host == 2 * MODEL.total
    assert of(ParallelConfig(data=4, zero=3, offload=True)).host == pytest.approx(
        2 * MODEL.total / 4, rel=1e-3
    )
    saved = 2 * sum(part.divided for part in MODEL.layers) * 3 / 4
    for method in (ParallelConfig(offload=True), ParallelConfig(data=4, zero=3, offload=True)):
        memory = step_memory(quantised(MODEL), RECIPE, method, tables=TablesByHand(MODEL, RECIPE))
        assert memory.host == pytest.approx((2 * MODEL.total - saved) / method.data, rel=1e-3)
