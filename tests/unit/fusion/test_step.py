"""A step's chunks follow from plan and lengths; its template is complete, in order, and never stuck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.alignment import Weights
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, add_tasks, keep_tasks, plan_for
from megatron_mux.fusion.step import (
    Lengths,
    bucket_costs,
    lockstep,
    step_chunks,
    step_template,
)
from megatron_mux.pipeline.action import Action, ChunkId, Kind
from megatron_mux.pipeline.bucket import forward_order
from megatron_mux.pipeline.check import check
from megatron_mux.pipeline.structured import warmup_microbatches
from megatron_mux.pipeline.template import (
    Template,
    forward_only,
    gpipe,
    most_in_flight,
    one_f_one_b,
    plain,
    with_updates,
)
from tests.unit.fusion.strategies import groupings, one_each

TASKS = "abcdef"

ragged = st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=4)
"""Micro-batches of different numbers of chunks; of a bucket, a pipeline may have none."""


@st.composite
def planned(draw: st.DrawFn) -> Plan:
    """A plan as the planner makes them, for up to six tasks."""
    stages = draw(st.integers(1, 4))
    buckets = draw(groupings(TASKS[: draw(st.integers(1, len(TASKS)))]))
    return Plan(
        policy="auto",
        stages=stages,
        data=draw(st.integers(1, 3)),
        weights=draw(st.sampled_from([Weights(), Weights(1.0, 0.1, 2.0)])),
        buckets=tuple(
            draw(costly(stages, [HybridTask(tuple(tasks)) for tasks in bucket])) for bucket in buckets
        ),
    )


@st.composite
def costly(draw: st.DrawFn, stages: int, hybrids: Sequence[HybridTask] = (HybridTask(("a",)),)) -> Bucket:
    def each(count: int, least: float = 0.1) -> tuple[float, ...]:
        return draw(one_each(st.floats(least, 10.0), count))

    return Bucket(
        tuple(hybrids),
        micro_batches=draw(st.integers(1, 4)),
        chunk=draw(st.none() | st.integers(1, 16)),
        chunks=tuple(draw(st.lists(st.integers(1, 2), max_size=2))),
        forward=each(stages),
        backward=each(stages),
        memory=draw(st.sampled_from([(), each(stages, 0.0)])),
        transfer=draw(st.sampled_from([(), each(stages - 1, 0.0)])),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[Plan, dict[str, Lengths]]:
    plan = draw(planned())
    lengths = {}
    for name in plan.tasks:
        tokens = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)))
        pad_to = draw(st.sampled_from([0, max(tokens), 40]))
        lengths[name] = Lengths(tokens, tuple(n // 2 for n in tokens), pad_to)
    return plan, lengths


@settings(deadline=None)
@given(steps())
def test_every_sequence_is_computed_once_over_all_pipelines(step: tuple[Plan, dict[str, Lengths]]) -> None:
    plan, lengths = step
    computed: Counter[tuple[str, int, int]] = Counter()
    for rank in range(plan.data):
        chunked = step_chunks(plan, lengths, rank)
        assert chunked == step_chunks(plan, lengths, rank), "the same on every rank of a pipeline"
        for chunks in chunked.chunks.values():
            for part in (part for chunk in chunks for part in chunk):
                computed.update((part.task, part.sequence, token) for token in range(part.start, part.stop))
    assert computed == {
        (name, i, token): 1
        for name, own in lengths.items()
        for i, tokens in enumerate(own.tokens)
        for token in range(max(tokens, own.pad_to))
    }


@settings(deadline=None)
@given(steps())
def test_sizes_say_which_units_there_are(step: tuple[Plan, dict[str, Lengths]]) -> None:
    plan, lengths = step
    for rank in range(plan.data):
        chunked = step_chunks(plan, lengths, rank)
        assert list(chunked.chunks) == forward_order(chunked.sizes), "in the order of forward passes"
        assert len(chunked.sizes) == len(plan.buckets)
        for b, (bucket, sizes) in enumerate(zip(plan.buckets, chunked.sizes, strict=True)):
            assert len(sizes) <= bucket.micro_batches
            for m, count in enumerate(sizes):
                whole: Counter[tuple[str, int]] = Counter()
                for chunk in (chunk for c in range(count) for chunk in chunked.chunks[ChunkId(b, m, c)]):
                    whole.update({(part.task, part.sequence): part.tokens for part in chunk})
                assert count == (-(-max(whole.values()) // bucket.chunk) if bucket.chunk else 1)


@settings(deadline=None)
@given(steps())
def test_hybrid_tasks_stay_apart(step: tuple[Plan, dict[str, Lengths]]) -> None:
    plan, lengths = step
    for chunk_id, chunks in step_chunks(plan, lengths).chunks.items():
        hybrids = [hybrid.tasks for hybrid in plan.buckets[chunk_id.bucket].hybrid_tasks]
        assert chunks and all(chunks), "nothing is empty"
        found = []
        for chunk in chunks:
            tasks = {part.task for part in chunk}
            found.append(next(i for i, hybrid in enumerate(hybrids) if tasks <= set(hybrid)))
        assert found == sorted(set(found)), "one batch for each, in the plan's order"


def test_a_pipeline_without_a_sequence_of_a_bucket_has_no_micro_batch_of_it() -> None:
    plan = Plan("spatial", 1, (Bucket((HybridTask(("a",)),), 4),), data=2)
    sizes = [step_chunks(plan, {"a": Lengths((7,), (1,))}, rank).sizes for rank in range(2)]
    assert sizes == [((1,),), ((),)]


@settings(deadline=None)
@given(steps())
def test_in_lockstep_all_pipelines_have_the_same_units(step: tuple[Plan, dict[str, Lengths]]) -> None:
    plan, lengths = step
    all_chunked = [step_chunks(plan, lengths, rank) for rank in range(plan.data)]
    filled = lockstep(all_chunked)
    alike = {
        (chunked.sizes, tuple((chunk_id, len(own)) for chunk_id, own in chunked.chunks.items()))
        for chunked in filled
    }
    assert len(alike) == 1, "the same template, and the same number of batches in each of its units"
    for chunked, before in zip(filled, all_chunked, strict=True):
        assert list(chunked.chunks) == forward_order(chunked.sizes)
        kept = {chunk_id: tuple(filter(None, own)) for chunk_id, own in chunked.chunks.items()}
        assert {chunk_id: own for chunk_id, own in kept.items() if own} == before.chunks, (
            "nothing is lost or moved"
        )
    for chunk_id in filled[0].chunks:
        assert any(any(chunked.chunks[chunk_id]) for chunked in filled), "somebody has something in it"
    assert lockstep(filled) == filled


def run(template: Template, stages: int, random: Random) -> int:
    """Run a template in an order that its rules allow; return how many tensors ever waited for a neighbour.

    A stage takes its neighbour's tensor when it computes; nobody waits to be rid of one.
    """
    kinds: tuple[Kind, ...] = ("F", "B", "N", "U")
    done: dict[tuple[int, Kind], list[ChunkId]] = {(s, kind): [] for s in range(stages) for kind in kinds}
    at = [0] * stages
    most = 0
    while True:
        ready = [
            s
            for s in range(stages)
            if at[s] < len(template[s]) and _input_is_there(template[s][at[s]], stages, done)
        ]
        if not ready:
            break
        stage = random.choice(ready)
        action = template[stage][at[stage]]
        at[stage] += 1
        done[stage, action.kind].append(action.chunk_id)
        # What a neighbour has not taken yet of what travels one way.
        along: tuple[Kind, Kind] = ("F", "U") if action.kind in ("F", "U") else ("B", "N")
        taker = stage + (1 if "F" in along else -1)
        if 0 <= taker < stages:
            most = max(most, sum(len(done[stage, kind]) - len(done[taker, kind]) for kind in along))
    assert at == [len(actions) for actions in template], "stuck"
    return most


def _input_is_there(action: Action, stages: int, done: dict[tuple[int, Kind], list[ChunkId]]) -> bool:
    before = action.before(stages, stages)
    return before is None or before.chunk_id in done[before.stage, before.kind]


@settings(deadline=None)
@given(steps(), st.sampled_from(["spatial", "auto"]), st.integers(1, 3), st.randoms(use_true_random=False))
def test_templates_of_steps_can_be_run(
    step: tuple[Plan, dict[str, Lengths]], policy: str, count: int, random: Random
) -> None:
    plan, lengths = step
    if policy == "spatial":
        plan = plan_for("spatial", dict.fromkeys(plan.tasks, 1), plan.stages, chunk=7)
    for rank in range(plan.data):
        sizes = [*step_chunks(plan, lengths, rank).sizes] * count
        template = step_template(plan, sizes)
        check(template, sizes, plan.stages, len(plan.buckets))
        passes = 2 * plan.stages * len(forward_order(sizes))
        assert sum(len(actions) for actions in template) == passes + 2 * plan.stages * len(sizes)
        assert run(template, plan.stages, random) <= most_in_flight(template) + len(plan.buckets)


@st.composite
def limited(draw: st.DrawFn) -> tuple[Plan, list[list[int]]]:
    """A plan that may keep little, and a step that is cut into more than it counts on."""
    stages = draw(st.integers(1, 4))
    sizes = draw(ragged)
    buckets = tuple(draw(costly(stages)) for _ in sizes)
    room = draw(st.floats(1.0, 3.0))
    costs = [bucket_costs(bucket) for bucket in buckets]
    limit = tuple(room * max(cost.memory[s] * cost.chunks for cost in costs) for s in range(stages))
    return Plan("auto", stages, buckets, activation_limit=limit), sizes


@settings(max_examples=150, deadline=None)
@given(limited(), st.randoms(use_true_random=False))
def test_however_little_may_be_kept_a_step_is_finished(
    case: tuple[Plan, list[list[int]]], random: Random
) -> None:
    plan, sizes = case
    template = step_template(plan, sizes)
    check(template, sizes, plan.stages)
    passes = 2 * plan.stages * len(forward_order(sizes))
    assert sum(len(actions) for actions in template) == passes + 2 * plan.stages * len(sizes)
    assert run(template, plan.stages, random) <= most_in_flight(template) + len(plan.buckets)


@settings(max_examples=150, deadline=None)
@given(limited())
def test_only_a_micro_batch_that_is_alone_exceeds_the_limit(case: tuple[Plan, list[list[int]]]) -> None:
    plan, sizes = case
    for stage, actions in enumerate(step_template(plan, sizes)):
        alive: list[ChunkId] = []
        for action in actions:
            if action.kind == "B":
                alive.remove(action.chunk_id)
            if action.kind != "F":
                continue
            alive.append(action.chunk_id)
            kept = sum(bucket_costs(plan.buckets[chunk_id.bucket]).memory[stage] for chunk_id in alive)
            if kept > plan.activation_limit[stage] * (1 + 1e-6):
                assert len({(chunk_id.bucket, chunk_id.micro_batch) for chunk_id in alive}) == 1


def test_a_micro_batch_that_was_expected_smaller_is_finished() -> None:
    bucket = Bucket((HybridTask(("a",)),), 2, 8, (1,), (1.0, 1.0), (1.0, 1.0), (5.0, 5.0))
    plan = Plan("auto", 2, (bucket,), activation_limit=(5.0, 5.0))
    for actions in step_template(plan, [[3, 2]]):
        text = " ".join(str(action)[1:] for action in actions)
        assert text == "F0.0 F0.0.1 F0.0.2 B0.0.2 B0.0.1 B0.0 F0.1 F0.1.1 B0.1.1 B0.1 N0 U0"


@settings(deadline=None)
@given(planned(), st.data())
def test_tasks_that_come_and_go_leave_a_plan_that_can_be_run(plan: Plan, data: st.DataObject) -> None:
    left = data.draw(st.sets(st.sampled_from(plan.tasks)))
    changed = add_tasks(keep_tasks(plan, left), [*left, "new", "newer"], 3)
    sizes = [
        [data.draw(st.integers(1, 3)) for _ in range(bucket.micro_batches)] for bucket in changed.buckets
    ]
    check(step_template(changed, sizes), sizes, changed.stages)


def turns(stages: int, sizes: list[list[int]]) -> Template:
    return with_updates(one_f_one_b(stages, sizes), sizes, len(sizes))


def has_a_lead_and_no_more(template: Template, stages: int, sizes: list[list[int]]) -> bool:
    """As many micro-batches in flight as `warmup_microbatches` says, but for one that is alone."""
    check(template, sizes, stages)
    longest = max((chunks for own in sizes for chunks in own), default=1)
    return all(
        most_in_flight((actions,)) <= warmup_microbatches(stages - 1 - stage) * longest
        for stage, actions in enumerate(template)
    )


@settings(deadline=None)
@given(planned(), st.data())
def test_without_predictions_buckets_take_turns(plan: Plan, data: st.DataObject) -> None:
    sizes = [data.draw(st.lists(st.integers(1, 3), max_size=3)) for _ in plan.buckets]
    bare = plan_for("temporal", dict.fromkeys(plan.tasks, 1), plan.stages)
    own = [[1]] * len(bare.buckets)
    assert has_a_lead_and_no_more(step_template(bare, own), plan.stages, own)
    unknown = Plan("auto", plan.stages, tuple(Bucket(b.hybrid_tasks, b.micro_batches) for b in plan.buckets))
    assert has_a_lead_and_no_more(step_template(unknown, sizes), plan.stages, sizes)
    assert step_template(replace(unknown, schedule="1f1b"), sizes) == turns(plan.stages, sizes)
    partly = replace(plan, buckets=(*plan.buckets, unknown.buckets[0]))
    assert has_a_lead_and_no_more(step_template(partly, [*sizes, [1]]), plan.stages, [*sizes, [1]])
    other = replace(plan, policy="spatial")
    template = step_template(other, sizes)
    assert has_a_lead_and_no_more(template, plan.stages, sizes), "the planner's plans only know more"


def test_the_pipeline_counts_on_the_most_chunks_of_typical_micro_batches() -> None:
    bucket = Bucket((HybridTask(("a",)),), 3, 64, (2, 4, 3), (1.0,), (2.0,), (5.0,))
    cost = bucket_costs(bucket)
    assert (cost.micro_batches, cost.chunks, cost.memory[0], cost.latency) == (3, 4, 5.0, 4.0)
    assert bucket_costs(Bucket((HybridTask(("a",)),), 3, forward=(1.0,), backward=(2.0,))).chunks == 1


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("chunks", [1, 3])
def test_how_much_known_templates_have_in_flight(stages: int, count: int, chunks: int) -> None:
    sizes = plain([count], chunks)
    assert most_in_flight(gpipe(stages, sizes)) == count * chunks
    # As many forwards ahead as there are stages behind, and those of a whole micro-batch to begin with.
    assert most_in_flight(one_f_one_b(stages, sizes)) == min(stages - 1 + chunks, count * chunks)
    assert most_in_flight(forward_only(stages, count)) == count
    assert most_in_flight(()) == 0
