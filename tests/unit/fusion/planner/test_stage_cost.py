"""Equations 3 and 5: what adds up, what is bounded, what depends on what."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Slice
from megatron_mux.fusion.graphs.launch_order import Interleave
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.cost import HybridCost
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.stage_cost import StageCosts
from megatron_mux.fusion.planner.step_memory import StepMemory
from megatron_mux.fusion.profiler.profile import Curve
from megatron_mux.fusion.profiler.updates import UpdateSeconds
from megatron_mux.memory.forms.method import ParallelConfig, Recompute
from megatron_mux.optimizers import lion
from megatron_mux.optimizers.adafactor import Adafactor
from megatron_mux.optimizers.optimizer import Options, ParamGroup, ParamLayout, ParamSlice
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.tasks import TaskSpec
from tests.unit.fusion import backbone
from tests.unit.task_files import task

LAYERS = 8


def costs(loads: list[TaskLoad], stages: int = 1, **changes: object) -> StageCosts:
    profile = changes.pop("profile", None) or backbone.profile(LAYERS)
    divided = stage_layers(even_split(LAYERS, stages))
    changes["memory"] = step_memory(loads, stages)
    return StageCosts(profile, backbone.shape(LAYERS), loads, divided, **changes)  # type: ignore[arg-type]


def step_memory(loads: list[TaskLoad], stages: int = 1) -> StepMemory:
    signatures = sorted({load.signature(backbone.shape(LAYERS)) for load in loads})
    return StepMemory(
        backbone.MadeUpTables(LAYERS).memory(Mesh(pipeline=stages), "none", signatures),
        loads,
        backbone.shape(LAYERS),
        "cpu",
    )


def whole(chunk_of: list[TaskLoad]) -> tuple[Slice, ...]:
    return tuple(Slice(load.name, i, 0, n) for load in chunk_of for i, n in enumerate(load.tokens))


def test_without_tasks_only_the_backbone_is_there() -> None:
    model = costs([], stages=4, method=ParallelConfig(pipeline=2))
    assert model.step_overhead(()) == model.profile.step_seconds
    assert (step_memory([], 4).persistent > 0).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_quick_way_and_the_exact_way_agree_on_whole_steps(seed: int) -> None:
    loads = [dataclasses.replace(load, longest=0) for load in backbone.random_loads(seed).values()]
    model = costs(loads, stages=2)
    quick, exact = model.hybrid(tuple(range(len(loads))), 1), model.chunks([whole(loads)])[0]
    assert quick.forward == pytest.approx(exact.forward)
    assert quick.backward == pytest.approx(exact.backward)
    taken = step_memory(loads, 2).of_chunks([whole(loads)])
    assert quick.memory == pytest.approx(taken.kept[0]) and quick.working == pytest.approx(taken.working[0])


def test_equation_3_written_out() -> None:
    """Two tasks, one layer's worth of each operator; utilisation one half."""
    profile = backbone.profile(LAYERS)
    half = Curve((1,), (0.5,), (0.5,))
    profile = dataclasses.replace(profile, curves={**profile.curves, "utilisation:LORA": half})
    loads = [backbone.load("a", [64] * 4), backbone.load("b", [64] * 2)]
    model = costs(loads, profile=profile)
    curves = profile.curves
    both = model.hybrid((0, 1), 1)
    alone = [curves["LORA:linear_qkv:8"].at(n)[0] for n in (256, 128)]
    assert curves["LORA:linear_qkv:64"].at(256)[0] >= alone[0]

    def adapter(rows: int) -> float:
        low, high = curves["LORA:linear_qkv:8"].at(rows)[0], curves["LORA:linear_qkv:64"].at(rows)[0]
        return low + (16 - 8) / 56 * (high - low)

    bare = [backbone.load(load.name, list(load.tokens), sites=()) for load in loads]
    frozen = costs(bare, profile=profile).hybrid((0, 1), 1)
    expected = LAYERS * max(0.5 * adapter(256) + 0.5 * adapter(128), adapter(256))
    assert both.forward[0] - frozen.forward[0] == pytest.approx(expected)


def test_attention_is_priced_by_the_windows_of_each_stage() -> None:
    """As in Gemma 3, layers with a window and layers without are mixed, and not on each stage alike."""
    profile, length = backbone.profile(LAYERS), 8192
    windows = (1024, 1024, 1024, 1024, None, 1024, 1024, None)
    loads = [backbone.load("a", [length], sites=())]

    def forward(windows: tuple[int | None, ...]) -> tuple[float, ...]:
        shape = dataclasses.replace(backbone.shape(LAYERS), windows=windows)
        divided = stage_layers(even_split(LAYERS, 2))
        return StageCosts(profile, shape, loads, divided).hybrid((0,), 1).forward

    one = profile.curves[f"attention:{length}"].at(0)[0]
    narrow = one * 1024 / (length / 2)
    everywhere, mixed = forward((None,) * LAYERS), forward(windows)
    less = [a - b for a, b in zip(everywhere, mixed, strict=True)]
    assert less == pytest.approx([4 * (one - narrow), 2 * (one - narrow)])
    assert forward((1024,) * LAYERS) == pytest.approx(everywhere), "measured as it is, up to the last length"


def test_nothing_below_the_lowest_adapter_goes_backward() -> None:
    def with_sites(*layers: int) -> TaskLoad:
        sites = tuple(backbone.site(layer) for layer in layers)
        return backbone.load("a", [64] * 4, sites=sites)

    upper = costs([with_sites(6)], stages=2).hybrid((0,), 1)
    lower = costs([with_sites(1)], stages=2).hybrid((0,), 1)
    assert upper.backward[0] == 0.0 < lower.backward[0]
    assert upper.backward[1] < lower.backward[1]
    assert upper.forward[1] == pytest.approx(lower.forward[1] + upper.forward[1] - lower.forward[1])


def test_tensor_ranks_leave_communication_to_hide() -> None:
    loads = [backbone.load("a", [64] * 4)]
    profile = backbone.profile(LAYERS, tensor_parallel=2)
    two = ParallelConfig(tensor=2)
    overlapped = costs(loads, profile=profile, method=two, interleave="kahn").hybrid((0,), 1)
    one = profile.curves["all_reduce"].at(256)[0]
    assert overlapped.communication_forward == pytest.approx((2 * LAYERS * one,))
    # What enters the first layer needs no gradient.
    assert overlapped.communication_backward == pytest.approx(((2 * LAYERS - 1) * one,))
    assert not costs(loads, interleave="kahn").hybrid((0,), 1).communicates
    plain = costs(loads, profile=profile, method=two).hybrid((0,), 1)
    assert not plain.communicates, "by default nothing is hidden"
    assert plain.alone() == pytest.approx(overlapped.alone())


def test_rows_of_the_embedding_need_the_gradient_of_all_layers() -> None:
    plain = backbone.load("a", [64] * 4)
    embeds = dataclasses.replace(plain, adapter=dataclasses.replace(plain.adapter, embeds=True))
    profile = backbone.profile(LAYERS, tensor_parallel=2)
    without, found = (
        costs([load], 2, profile=profile, method=ParallelConfig(tensor=2), interleave="kahn").hybrid((0,), 1)
        for load in (plain, embeds)
    )
    one = profile.curves["all_reduce"].at(256)[0]
    assert found.communication_backward == pytest.approx((LAYERS * one, LAYERS * one))
    assert found.backward[0] > without.backward[0] and found.backward[1] == without.backward[1]


def test_nothing_hides_the_messages_of_a_kl_term() -> None:
    loads = [backbone.load("a", [64] * 4, opening_passes=2)]
    profile = backbone.profile(LAYERS, tensor_parallel=2)
    hidden, plain = (
        costs(loads, profile=profile, method=ParallelConfig(tensor=2), interleave=interleave)
        for interleave in ("kahn", "off")
    )
    assert hidden.step_overhead([(0,)]) == pytest.approx(plain.step_overhead([(0,)]))


@pytest.mark.parametrize("interleave", ["off", "kahn"])
@pytest.mark.parametrize(("lowest", "again"), [(0, (4, 4)), (2, (2, 4)), (6, (0, 2))])
def test_layers_with_a_backward_pass_are_recomputed(
    lowest: int, again: tuple[int, int], interleave: Interleave
) -> None:
    """Neither the embedding nor the loss head, nor anything below the lowest adapter."""
    sites = tuple(backbone.site(layer, size=8) for layer in range(lowest, LAYERS))
    loads = [backbone.load("a", [64] * 4, sites=sites)]  # 256 rows, 128 labels
    profile = backbone.profile(LAYERS, tensor_parallel=2)
    seconds = {name: curve.at(256)[0] for name, curve in profile.curves.items()}

    def found(recompute: Recompute) -> HybridCost:
        method = ParallelConfig(tensor=2, recompute=recompute)
        return costs(loads, 2, profile=profile, method=method, interleave=interleave).hybrid((0,), 1)

    layer = seconds["attention_half"] + seconds["mlp_half"] + 2 * seconds["all_reduce"]
    layer += 4 * profile.curves["attention:64"].at(0)[0]
    unlabelled = seconds["mlp_half"] - profile.curves["mlp_half"].at(128)[0]  # of the last layer
    adapters = [len({*range(*layers)} & {*range(lowest, LAYERS)}) for layers in ((0, 4), (4, 8))]
    expected = [
        count * layer + own * seconds["LORA:linear_qkv:8"] - without
        for count, own, without in zip(again, adapters, (0.0, unlabelled), strict=True)
    ]
    kept, recomputed = found("none"), found("full")
    more = [b - a for a, b in zip(kept.alone(), recomputed.alone(), strict=True)]
    assert more == pytest.approx(expected)
    assert recomputed.forward == kept.forward


@pytest.mark.parametrize(
    ("op", "first"), [("linear_qkv", 3), ("linear_proj", 3), ("linear_fc1", 2), ("linear_fc2", 2)]
)
@pytest.mark.parametrize("stage", [0, 1])
def test_only_gradients_that_something_needs_are_reduced(op: BaseOpName, first: int, stage: int) -> None:
    """A stage's upper two of four layers have a backward pass, the lower of them above the adapter alone."""
    sites = (dataclasses.replace(backbone.site(2 + 4 * stage), op=op),)
    profile = backbone.profile(LAYERS, tensor_parallel=2)
    found = costs(
        [backbone.load("a", [64] * 4, sites=sites)],
        2,
        profile=profile,
        method=ParallelConfig(tensor=2),
        interleave="kahn",
    ).hybrid((0,), 1)
    one = profile.curves["all_reduce"].at(256)[0]
    assert found.communication_forward == pytest.approx((8 * one, 8 * one))
    reduced = (first * one, 8 * one) if stage == 0 else (0.0, first * one)
    assert found.communication_backward == pytest.approx(reduced)


def test_an_adapter_of_unknown_cost_is_an_error() -> None:
    profile = backbone.profile(LAYERS)
    known = {name: curve for name, curve in profile.curves.items() if not name.startswith("IA3:")}
    sites = (backbone.site(0, "IA3"),)
    with pytest.raises(UserError, match="has no cost of IA3 adapters at linear_qkv"):
        costs(
            [backbone.load("a", [64], sites=sites)], profile=dataclasses.replace(profile, curves=known)
        ).hybrid((0,), 1)


def test_chunks_of_a_long_sequence_cost_more_the_later_they_come() -> None:
    model = costs([backbone.load("a", [512])])
    parts = [c.forward[0] for c in model.chunks([(Slice("a", 0, at, at + 64),) for at in range(0, 256, 64)])]
    assert parts == sorted(parts) and parts[0] < parts[-1]


@given(st.integers(1, 4), st.integers(1, 16))
def test_micro_batches_divide_the_rows(data: int, micro_batches: int) -> None:
    load = backbone.load("a", [64] * 16)
    model = costs([load], method=ParallelConfig(data=data))
    parts = min(16, data * micro_batches)
    expected = costs([dataclasses.replace(load, tokens=(64,) * 16)]).hybrid((0,), parts)
    found = model.hybrid((0,), micro_batches)
    assert dataclasses.replace(found, micro_batches=expected.micro_batches) == expected
    assert found.micro_batches * data >= parts and found.micro_batches <= micro_batches


def test_weights_are_what_the_profile_says() -> None:
    weights = costs([backbone.load("a", [64] * 4)]).weights()
    assert weights.token > 0 and weights.pair > 0 and weights.label > 0


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor"])
def test_every_rank_runs_its_own_groups(optim: str) -> None:
    """On two stages each rank has the groups that the engine has with half of the layers."""
    section = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}
    spec = TaskSpec.model_validate(
        task(adapter=section, training={"optim": optim, "loraplus_lr_ratio": 16.0})
    )
    load = TaskLoad.of(spec, np.array([64], np.int32), np.array([8], np.int32), backbone.shape(LAYERS))
    price = UpdateSeconds(task=0.0, run=1.0, tensor=0.0, value=0.0)
    profile = dataclasses.replace(
        backbone.profile(LAYERS, updates={optim: price}), step_seconds=0.0, sequence_seconds=0.0
    )
    model = costs([load], stages=2, profile=profile, method=ParallelConfig(pipeline=2))
    slices, at = [], 0
    for one in load.stepped:
        if one.tensor.share(range(LAYERS // 2), LAYERS):
            shape = one.tensor.shape
            slices.append(
                ParamSlice(
                    AdapterParameter(str(at), torch.nn.Parameter(torch.empty(0)), shape),
                    shape,
                    ParamGroup(at, at + math.prod(shape), *one.kind),
                )
            )
            at += math.prod(shape)
    layout = ParamLayout(torch.zeros(at), torch.zeros(at), [param.group for param in slices], slices)
    kind = OPTIMIZERS[optim](layout, Options())
    groups = len(kind._stacks) if isinstance(kind, Adafactor) else len(layout.groups)
    assert model.step_overhead([(0,)]) == groups


def test_groups_are_divided_where_an_optimizer_steps_no_more_values_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lion, "_AT_ONCE", 100)
    monkeypatch.setattr(lion.Lion, "at_once", 100)
    spec = TaskSpec.model_validate(task(training={"optim": "lion_32bit"}))
    load = TaskLoad.of(spec, np.array([64], np.int32), np.array([8], np.int32), backbone.shape(LAYERS))
    _, groups = load.updates(range(LAYERS), 1)
    count = sum(math.prod(one.tensor.shape) for one in load.stepped)
    layout = ParamLayout(
        torch.zeros(count), torch.zeros(count), [ParamGroup(0, count, *load.stepped[0].kind)], []
    )
    calls: list[object] = []
    monkeypatch.setattr(lion.Lion, "_update", lambda *arguments: calls.append(arguments))
    lion.Lion(layout, Options()).update(0, 1.0, torch.zeros(()))
    assert groups == len(calls) > 10


def test_kernels_step_a_bucket_at_once_and_each_rank_its_own_values() -> None:
    loads = [backbone.load(name, [64]) for name in "ab"]
    price = UpdateSeconds(task=8.0, run=0.0, tensor=0.0, value=1e-3, together=True)
    device = backbone.profile(LAYERS, updates={"adamw_torch_fused": price})
    profile = dataclasses.replace(device, step_seconds=0.0, sequence_seconds=0.0)
    values = 2 * loads[0].adapter.values(range(LAYERS), 1) * 1e-3
    model = costs(loads, stages=2, profile=profile, method=ParallelConfig(pipeline=2))
    assert model.step_overhead([(0, 1)]) == pytest.approx(8 + values / 2)
    assert model.step_overhead([(0,), (1,)]) == pytest.approx(16 + values / 2)
    one_by_one = dataclasses.replace(
        profile, updates={"adamw_torch_fused": dataclasses.replace(price, together=False)}
    )
    assert costs(loads, profile=one_by_one).step_overhead([(0, 1)]) == pytest.approx(16 + values)
