"""Peaks of methods by closed forms: by hand where few numbers tell, and laws that hold for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.choice.engine_step import step_memory
from megatron_mux.memory.forms.architecture import ParamCounts
from megatron_mux.memory.forms.method import ParallelConfig, impossible, methods
from megatron_mux.memory.forms.phases import PARTS
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.optimizers import OPTIMIZERS
from tests.unit.choice.tables_by_hand import TablesByHand
from tests.unit.memory.architectures import at_stage, gpt2, llama, lora
from tests.unit.memory.profiles import KEPT, by_hand

FULL = Recipe(128)
FROZEN = Recipe(128, adapters=(lora(llama(8)), lora(llama(8), 16, "other")))
TABLES = TablesByHand(llama(8), FROZEN)
EXPERTS = replace(
    llama(8, experts=8, experts_per_token=2), layers=(ParamCounts(200_000, 512, 8 * 3 * 256 * 704),) * 8
)


def of(method: ParallelConfig, recipe: Recipe = FULL, layers: int = 8, **more: Any) -> Mapping[str, int]:
    model = llama(layers)
    return step_memory(model, recipe, method, by_hand(model), device="cpu", **more).worst(512).breakdown


BACKWARD = "the last layer's backward pass"


def at(method: ParallelConfig, recipe: Recipe, name: str, rows: int = 512) -> Mapping[str, int]:
    """A phase of eight layers' last stage."""
    memory = step_memory(llama(8), recipe, method, by_hand(llama(8)), device="cpu")
    return [phase for phase in memory.phases(rows) if phase.name == name][-1].breakdown


def test_states_of_full_fine_tuning_by_hand() -> None:
    values = llama(8).total
    plain = of(ParallelConfig())
    assert plain["parameters"] == 2 * values and plain["optimizer"] == 12 * values
    assert plain["gradients"] == 4 * values, "fp32, and there all the time"
    one = of(ParallelConfig(data=4, zero=1))
    assert one["optimizer"] == pytest.approx(3 * values, rel=1e-4) and one["gradients"] == 4 * values
    three = of(ParallelConfig(data=4, zero=3))
    assert three["parameters"] == pytest.approx(values / 2, rel=1e-4)
    assert three["gradients"] == pytest.approx(values, rel=1e-4)
    layer = llama().layers[0].total
    one_gradient = 4 * layer
    assert at(ParallelConfig(data=4, zero=3), FULL, BACKWARD)["communication"] == 2 * 2 * layer + one_gradient
    head = llama().head + llama().final
    assert (
        at(ParallelConfig(data=4, zero=3), FULL, "the loss")["communication"] == 2 * head.total + one_gradient
    )
    bare = Recipe(128, "bf16", "adamw_torch", master=False)
    peak = step_memory(llama(8), bare, ParallelConfig(), by_hand(llama(8)), device="cpu")
    step = next(i for i in peak.phases(512) if i.name == "the optimizer's step").breakdown
    assert [step[p] for p in ("parameters", "gradients", "optimizer", "workspace")] == [
        2 * values, 2 * values, 4 * values, 2 * values,
    ]  # fmt: skip
    assert of(ParallelConfig(), Recipe(128, "fp32", "sgd"))["optimizer"] == 0
    assert of(ParallelConfig(offload=True))["optimizer"] == 0


def test_micro_batches_in_flight() -> None:
    method = ParallelConfig(pipeline=4)
    parts = step_memory(llama(8), FULL, method, by_hand(llama(8)), device="cpu")
    kept = [at_stage(parts, stage, 512)["activations"] for stage in range(4)]
    assert kept[0] > kept[1] > kept[2]
    sent = 2 * 256 * 512  # hidden states that a stage has sent on, of each micro-batch
    for stage in (0, 1):  # so many micro-batches, of two layers each
        assert kept[stage] == (4 - stage) * (2 * KEPT + 1) * sent
    assert parts.worst(512).stage in (0, 3)


SIZES = st.sampled_from([1, 2, 4, 8])
HOW = st.builds(
    ParallelConfig,
    data=SIZES,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=SIZES,
    sequence_parallel=st.booleans(),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.booleans(),
)
FULLS = st.builds(
    Recipe,
    st.sampled_from([16, 128, 1024]),
    st.sampled_from(["bf16", "fp16", "fp32"]),
    st.sampled_from([*OPTIMIZERS]),
    st.booleans(),
    st.sampled_from(["flash", "eager"]),
)
RECIPES = st.one_of(st.just(FROZEN), FULLS)


@given(HOW, RECIPES, st.integers(1, 64))
@settings(max_examples=60, deadline=None)
def test_parts_are_the_peak_and_batches_add_to_it(method: ParallelConfig, recipe: Recipe, batch: int) -> None:
    parts = step_memory(llama(8), recipe, method, by_hand(llama(8)), TABLES)
    found = parts.worst(batch).breakdown
    assert tuple(found) == PARTS and min(found.values()) >= 0
    assert (
        parts.peak(batch)
        == sum(found.values())
        >= max(sum(at_stage(parts, stage, batch).values()) for stage in range(method.pipeline))
    )
    assert parts.peak(batch) <= parts.peak(batch + 1)


@given(HOW, FULLS, st.sampled_from(["data", "tensor", "expert", "zero", "sequence_parallel"]))
@settings(max_examples=60, deadline=None)
def test_dividing_more_never_takes_more(method: ParallelConfig, recipe: Recipe, what: str) -> None:
    """Pipeline stages are left out: those in the middle keep more micro-batches, and each step has more of them."""
    architecture = EXPERTS if what == "expert" else llama(8)
    if what == "data" and (method.data == 1 or not method.zero):
        return  # plain replicas divide nothing, and gradients that are summed over them stay
    if what == "zero":
        # A few layers' weights in use are more than a share saves of a model as small as a stage of these.
        if method.zero > 0 or method.data == 1:
            return
        more = replace(method, zero=1)
    elif what == "sequence_parallel":
        method, more = replace(method, sequence_parallel=False), replace(method, sequence_parallel=True)
    elif what == "expert":
        method = replace(method, data=8, expert=1)
        more = replace(method, expert=4)
    else:
        more = replace(method, **{what: 2 * getattr(method, what)})
        if what == "tensor" and more.tensor > 4:
            return
    less, found = (
        step_memory(architecture, recipe, one, by_hand(architecture), device="cpu").peak(512)
        for one in (method, more)
    )
    assert found <= less + 64  # values are not cut


def test_every_method_of_some_gpus() -> None:
    found = methods(8, llama(8), FULL)
    assert len(found) == len(set(found)) and all(method.gpus == 8 for method in found)
    assert found[0] == ParallelConfig(data=8) and {m.zero for m in found} == {0, 1, 2, 3}
    assert not any(m.zero == 2 and m.pipeline > 1 for m in found)
    assert {m.name for m in found} == {
        "8DP", "4DP+2TP", "2DP+4TP", "8TP", "4DP+2PP", "2DP+4PP", "8PP", "2DP+2TP+2PP", "4TP+2PP", "2TP+4PP",
    }  # fmt: skip
    assert {m.expert for m in methods(8, EXPERTS, FULL)} == {1, 2, 4, 8}
    assert {m.zero for m in methods(8, llama(8), FROZEN)} == {0, 3}
    assert [m.name for m in methods(1, gpt2(), FULL)] == ["1DP"] * 4
    why = impossible(6, llama(2))
    assert why["6TP"] == "8 attention heads cannot be divided among 6 GPUs"
    assert why["2DP+3PP"] == "2 layers cannot fill 3 pipeline stages"
    assert not any(name in why for name in ("6DP", "3DP+2TP", "3DP+2PP"))
