"""Ranks on GPUs that are not there: stages of many layers from few, and what divisions change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_mux.fusion.plan import plan_for
from megatron_mux.memory.stream.events import Category, StreamError
from megatron_mux.memory.trace.process import TraceError
from megatron_mux.rehearsal.depth import deepened, shallow
from megatron_mux.rehearsal.predict import RankPeak, predict, worst
from megatron_mux.rehearsal.process import rehearsals
from megatron_mux.rehearsal.recording import Recording
from megatron_mux.rehearsal.setting import Cast, Setting
from tests.unit.memory.traced import LLAMA

TRAINING = {"per_device_train_batch_size": 2, "max_steps": 8}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
    "scales": {
        "peft_type": "IA3",
        "target_modules": ["k_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "bottle": {"peft_type": "BOTTLENECK", "bottleneck_size": 4, "target_modules": ["down_proj"]},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3},
}


def _setting(
    layers: int, kinds: tuple[str, ...] = ("lora",), stages: int = 1, data: int = 1, **more: Any
) -> Setting:
    casts = [
        Cast(
            {
                "name": name,
                "adapter": KINDS[name],
                "data": {"path": "none", "max_length": 64},
                "training": TRAINING,
            },
            [32, 32],
            [8, 8],
        )
        for name in kinds
    ]
    plan = replace(plan_for("temporal", dict.fromkeys(kinds, 1), stages), data=data)
    return Setting({**LLAMA, "num_hidden_layers": layers}, casts, plan, **more)


UNLIKE = "attention of the first layer needs no gradient"
DEEP = {
    "two kinds": (_setting(5, ("lora", "scales")), 0),
    "recomputed": (_setting(5, recompute="full"), 0),
    "last of two stages": (_setting(10, stages=2), 1),
    "sequence parallel": (_setting(5, tensor=2, sequence_parallel=True), 1),
    UNLIKE: (_setting(5, ("bottle",)), 0),
    "sharded": (_setting(5, data=2, residence="sharded"), 1),
    "offloaded": (_setting(5, residence="offloaded"), 0),
    "all kinds": (_setting(5, tuple(KINDS)), 0),
}
WHOLE = ("sharded", "offloaded", "all kinds")


def _recordings() -> dict[str, list[Recording]]:
    """Of each, with all layers, with two and with three to a stage."""
    asked = {name: [setting, *shallow(setting)] for name, (setting, _) in DEEP.items()}
    made = iter(
        rehearsals([(one, DEEP[name][1]) for name, settings in asked.items() for one in settings], whole=True)
    )
    return {name: [next(made) for _ in settings] for name, settings in asked.items()}


def test_a_deep_stage_is_what_few_layers_tell_event_for_event() -> None:
    recordings = _recordings()  # a minute's work: one test has all of it
    assert [name for name, found in recordings.items() if len(found) == 1] == list(WHOLE)
    for name, (all_layers, *few) in recordings.items():
        if name == UNLIKE:
            with pytest.raises(StreamError):
                deepened(*DEEP[name], *few)
            assert rehearsals([DEEP[name]]) == [all_layers], "all layers are rehearsed then"
        else:
            assert name in WHOLE or deepened(*DEEP[name], *few) == all_layers, name
    _recomputation_and_sharding_need_less({name: found[0] for name, found in recordings.items()})


def _recomputation_and_sharding_need_less(whole: dict[str, Recording]) -> None:
    def activations(name: str) -> int:
        return whole[name].stream.peak().breakdown[Category.ACTIVATIONS]

    assert activations("recomputed") < activations("sharded")
    assert whole["sharded"].held < 0.6 * whole["recomputed"].held
    assert whole["offloaded"].held < 0.2 * whole["recomputed"].held


def test_layers_that_differ_are_all_rehearsed() -> None:
    one = _setting(8)
    upper = {**KINDS["lora"], "target_modules": r".*layers\.[4-7]\.self_attn\.q_proj"}
    casts = [replace(one.tasks[0], task={**one.tasks[0].task, "adapter": upper})]
    assert shallow(one) and not shallow(replace(one, tasks=casts))
    assert not shallow(replace(one, plan=replace(one.plan, stages=2, virtual=2)))
    assert not shallow(_setting(4))


def test_each_stage_of_each_pipeline_is_predicted() -> None:
    found = predict(_setting(4, stages=2, data=2, tensor=2))
    assert [one.rank for one in found] == [0, 2, 4, 6]
    assert worst(found).peak.size == max(one.peak.size for one in found)
    assert {Category.PARAMETERS, Category.ADAPTERS, Category.OPTIMIZER} <= set(found[0].peak.breakdown)
    assert isinstance(found[0], RankPeak) and found[0].peak.moment is not None


def test_what_cannot_be_divided_is_said() -> None:
    with pytest.raises(TraceError, match="cannot be divided"):
        predict(_setting(2, tensor=3))
