"""The choice: fastest of what fits, with flags that our parser or Megatron's scripts know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.arguments import parse_args
from megatron_mux.arguments.megatron_flags import MEGATRON_FLAGS
from megatron_mux.choice.engine_step import step_memory
from megatron_mux.choice.fit import SEQUENCES, Fit
from megatron_mux.choice.flags import flags, megatron_flags, not_by_this_engine
from megatron_mux.choice.ranking import rank
from megatron_mux.choice.speed import _Passes, step_seconds
from megatron_mux.fusion.device import Device, device_of
from megatron_mux.memory.forms.architecture import ParamCounts
from megatron_mux.memory.forms.method import ParallelConfig, methods
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage, on_rank, stages
from megatron_mux.memory.sizes import MIB
from tests.unit.choice.tables_by_hand import TablesByHand
from tests.unit.memory.architectures import llama, lora, quantised
from tests.unit.memory.profiles import by_hand

ARCHITECTURE = llama(8)
FULL = Recipe(128)
FROZEN = Recipe(128, adapters=(replace(lora(ARCHITECTURE), sequences=8),))
LARGE = llama(16, 4096, 11008)
ON_LARGE = Recipe(1024, adapters=(replace(lora(LARGE), length=1024),))
A100 = device_of("cuda", "A100", 0)
PROFILES = by_hand(ARCHITECTURE)
TABLES = TablesByHand(ARCHITECTURE, FROZEN)


@given(
    st.sampled_from([FULL, FROZEN]),
    st.sampled_from([1, 2, 4, 6]),
    st.integers(700, 1200),
    st.sampled_from([None, 3]),
)
@settings(max_examples=10, deadline=None)
def test_the_fastest_that_fits(recipe: Recipe, gpus: int, mib: int, batch: int | None) -> None:
    found = rank(ARCHITECTURE, recipe, gpus, mib * MIB, A100, batch, profiles=PROFILES, tables=TABLES)
    fitting = [entry for entry in found.entries if entry.fits]
    assert found.chosen == (max(fitting, key=lambda e: e.throughput) if fitting else None)
    for entry in found.entries:
        assert entry.fits == (entry.peak_process <= mib * MIB) == (0 < entry.largest >= entry.sequences)
        assert entry.peak_process == sum(entry.breakdown.values())
        assert entry.peak_allocated < entry.peak_reserved < entry.peak_process
        parts = step_memory(ARCHITECTURE, recipe, entry.method, PROFILES, TABLES)
        assert parts.peak((entry.largest + 1) * recipe.length) > mib * MIB
        assert entry.to_json()["worst_rank"]["rank"] % (entry.method.tensor * entry.method.data) == 0


def test_the_best_so_far_is_told_while_methods_are_predicted() -> None:
    told: list[tuple[int, int, Fit | None]] = []
    found = rank(ARCHITECTURE, FROZEN, 4, 4000 * MIB, A100, tables=TABLES, told=lambda *now: told.append(now))
    count = len(found.entries)
    assert [(done, total) for done, total, _ in told] == [(n + 1, count) for n in range(count)]
    speeds = [0.0 if best is None else best.throughput for *_, best in told]
    assert speeds == sorted(speeds) and len(set(speeds)) > 1
    # Of equals, the plainest is chosen, whichever was known first.
    assert found.chosen is not None and speeds[-1] == found.chosen.throughput
    plainest = [method.title for method in methods(4, ARCHITECTURE, FROZEN)]
    equals = [one.method.title for one in found.entries if one.fits and one.throughput == speeds[-1]]
    assert len(equals) > 1 and equals == sorted(equals, key=plainest.index)


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_batch_that_is_given_is_not_accumulated(gpus: int) -> None:
    """One micro-batch a step, four for each stage of a pipeline; where nobody gave one, up to 64 sequences a step."""
    given = rank(ARCHITECTURE, FULL, gpus, 1 << 40, A100, 3, profiles=PROFILES).entries
    for entry in given:
        method = entry.method
        assert method.micro_batches == (4 * method.pipeline if method.pipeline > 1 else 1)
        assert entry.sequences == 3 and entry.tokens == 3 * 128 * method.data * method.micro_batches
    bare = Recipe(128, master=False)  # no gradients between steps, unless they are accumulated
    (one, *_), (most, *_) = (
        rank(ARCHITECTURE, bare, 1, 1200 * MIB, A100, batch, profiles=PROFILES).entries for batch in (3, None)
    )
    assert one.phases["the loss"]["gradients"] == 0
    assert most.method.micro_batches * most.sequences >= SEQUENCES


def test_host_memory_helps_where_nothing_else_does() -> None:
    least = min(
        step_memory(ARCHITECTURE, FULL, m, PROFILES).peak(128)
        for m in methods(1, ARCHITECTURE, FULL)
        if not m.offload
    )
    found = rank(ARCHITECTURE, FULL, 1, least - 1, A100, profiles=PROFILES)
    assert found.selected == "offload" and found.chosen is not None and found.chosen.method.offload
    none = rank(ARCHITECTURE, FULL, 1, 500 * MIB, A100, profiles=PROFILES)  # less than the context alone
    assert none.selected is None and none.entries[0].peak_process == min(e.peak_process for e in none.entries)


def seconds(recipe: Recipe, batch: int, device: Device = A100, **degrees: Any) -> float:
    """Of a step of 64 sequences of 1024 tokens, so many in a micro-batch."""
    method = ParallelConfig(**degrees)
    memory = step_memory(LARGE, recipe, method, by_hand(LARGE), TablesByHand(LARGE, ON_LARGE))
    return step_seconds(memory, batch * 1024, 64 // batch // method.data, device)


@pytest.mark.parametrize("recipe", [Recipe(1024), ON_LARGE], ids=["full", "frozen"])
def test_speed_follows_from_what_a_method_does(recipe: Recipe) -> None:
    def of(batch: int = 4, **degrees: Any) -> float:
        return seconds(recipe, batch, **degrees)

    assert of() < of(recompute="full")
    assert of(1) < of(1, offload=True), "copies take longer than a small batch"
    assert of() <= 4 * of(data=4)
    assert of() < 4 * of(tensor=4)
    assert of() / 2 < of(pipeline=2) < of()
    slow, fast = (seconds(recipe, 4, device_of("cuda", name, 0)) for name in ("V100", "H100"))
    assert fast < slow
    flops = (
        2 * 64 * 1024 * LARGE.total
    )  # of a forward pass; backward as much, or twice if weights are trained
    times = 2 if recipe.frozen else 3
    assert times * flops / 312e12 < of() < 1.25 * times * flops / 312e12


@pytest.mark.parametrize("degrees", [{"offload": True}, {"data": 4, "zero": 3}])
def test_quantised_weights_are_brought_as_they_are_held(degrees: dict[str, Any]) -> None:
    """Of a step that waits for its weights most of the time: a quarter of the bytes."""
    held = quantised(LARGE)
    method, pcie = ParallelConfig(**degrees), device_of("cuda", "L40S", 0)
    tables = TablesByHand(LARGE, ON_LARGE)
    whole, quarter = (
        step_seconds(step_memory(own, ON_LARGE, method, tables=tables), 16, 1, pcie) for own in (LARGE, held)
    )
    assert 0.2 < quarter / whole < 0.5


def test_weights_gathered_for_a_small_batch_cost_time() -> None:
    """Over PCIe or a network; NVLink brings the next layer's weights while a layer is computed."""
    pcie = device_of("cuda", "L40S", 0)
    assert seconds(ON_LARGE, 1, pcie, data=4) < seconds(ON_LARGE, 1, pcie, data=4, zero=3)
    assert seconds(ON_LARGE, 1, A100, data=4) == seconds(ON_LARGE, 1, A100, data=4, zero=3)
    assert seconds(ON_LARGE, 1, A100, data=16) < seconds(ON_LARGE, 1, A100, data=16, zero=3)


def test_experts_are_shared_by_those_that_have_them_by_hand() -> None:
    """Eight GPUs, four of which share out eight experts: each is on two, which alone exchange it."""
    dense, experts = ParamCounts(1000, 24), 16_000
    part = replace(dense, experts=experts)
    model = replace(LARGE, experts=8, experts_per_token=2, layers=(part,))
    link = Device("slow link", {2: 1e18, 4: 1e18}, 1e18, 0.0, 1.0, 0.0)

    def passes(**degrees: Any) -> tuple[_Passes, Stage]:
        method = ParallelConfig(data=8, expert=4, **degrees)
        return _Passes(model, Recipe(1), method, 1.0, link), stages(model, method)[0]

    plain, stage = passes()
    ends = model.embedding + model.head + model.final
    # Sums of fp32 gradients around rings of eight, and of two for 4,000 values of a rank's two experts.
    wanted = 2 * 4 * ((1024 + ends.total) * 7 / 8 + 4000 / 2)
    assert plain.gradients(stage) == pytest.approx(wanted)
    assert plain.transfer() == 4096 * 2
    three, stage = passes(zero=3)
    own = on_rank(part, ParallelConfig(data=8, expert=4), 1 / 4)
    brought = 2 * (1024 * 7 / 8 + 4000 / 2)
    assert three._brought(own) == pytest.approx(brought) and three._reduced(own) == pytest.approx(2 * brought)
    assert three.gradients(stage) == 0
    # Two of a row's two copies, of eight thousand bytes, each go to another rank three times in four; and come back.
    assert plain._exchange() == pytest.approx(2 * 2 * 4096 * 2 * 3 / 4)
    assert stage.divided(ParallelConfig(data=8, expert=4, zero=3)) == 128 + 2000 + -(
        -model.embedding.total // 8
    ) + -(-(model.head + model.final).total // 8)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_flags_of_ours_parse(tmp_path: Path, precision: str) -> None:
    recipe = Recipe(128, precision, adapters=FROZEN.adapters)  # type: ignore[arg-type]
    tasks = tmp_path / "tasks.yaml"
    tasks.touch()
    for method in methods(8, ARCHITECTURE, recipe):
        assert not_by_this_engine(method, recipe, "llama") is None
        words = flags(method, recipe)
        parsed = parse_args(["--backbone", str(tmp_path), "--mux-tasks", str(tasks), *words])
        assert parsed.tensor_model_parallel_size == method.tensor
        assert parsed.pipeline_model_parallel_size == method.pipeline
        assert parsed.sequence_parallel == method.sequence_parallel and parsed.bf16 == (precision == "bf16")
        assert (parsed.recompute_granularity or "none") == method.recompute
        assert ("sharded" in parsed.mux_backbone_weights) == (method.zero == 3)
        assert ("offloaded" in parsed.mux_backbone_weights) == method.offload


@pytest.mark.parametrize(
    ("method", "recipe", "model_type", "why"),
    [
        (ParallelConfig(), FULL, "llama", "full fine-tuning"),
        (ParallelConfig(data=2, expert=2), FROZEN, "llama", "expert"),
        (ParallelConfig(data=2, zero=1), FROZEN, "llama", "ZeRO-1"),
        (ParallelConfig(), FROZEN, "bloom", "'bloom' is none of its families"),
        (ParallelConfig(), Recipe(128, "fp16", adapters=FROZEN.adapters), "llama", "fp16"),
        (ParallelConfig(), Recipe(128, attention="eager", adapters=FROZEN.adapters), "llama", "scores"),
    ],
)
def test_what_our_engine_does_not_do(
    method: ParallelConfig, recipe: Recipe, model_type: str, why: str
) -> None:
    assert why in str(not_by_this_engine(method, recipe, model_type))


def test_flags_of_megatron_are_its_own() -> None:
    known = {*MEGATRON_FLAGS}
    for method in methods(8, ARCHITECTURE, FULL):
        words = [word for word in megatron_flags(method, FULL, 1) if word.startswith("--")]
        assert known.issuperset(words), words
