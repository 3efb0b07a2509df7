"""Pipelines meet where a bucket ends, to sum gradients: whatever their sizes, none waits for another for ever."""

from __future__ import annotations

from random import Random

import pytest

from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.fusion.step import StepChunks, lockstep, must_keep_step, step_template
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.pipeline.template import Template

PIPELINES = 2


def get_to_the_end(templates: list[Template], stages: int) -> bool:
    """A dry run of several pipelines, in which every `N` waits for the same one of all others."""
    ranks = range(len(templates[0]))
    at = [[0] * len(ranks) for _ in templates]
    done: list[set[Action]] = [set() for _ in templates]

    def due(pipeline: int, rank: int) -> Action | None:
        """The next action of a rank, if what it needs of its own pipeline is there."""
        actions = templates[pipeline][rank]
        if at[pipeline][rank] == len(actions):
            return None
        action = actions[at[pipeline][rank]]
        needed = action.before(stages, len(ranks))
        return action if needed is None or needed in done[pipeline] else None

    moved = True
    while moved:
        moved = False
        for rank in ranks:
            everyone = [due(pipeline, rank) for pipeline in range(len(templates))]
            for pipeline, action in enumerate(everyone):
                if action is None or (action.kind == "N" and set(everyone) != {action}):
                    continue
                done[pipeline].add(action)
                at[pipeline][rank] += 1
                moved = True
    return all(at[p][rank] == len(templates[p][rank]) for p in range(len(templates)) for rank in ranks)


def plan_of(r: Random, ranks: int, virtual: int) -> Plan:
    stages = ranks * virtual

    def each(count: int, least: float = 0.1) -> tuple[float, ...]:
        return tuple(r.uniform(least, 3.0) for _ in range(count))

    buckets = [
        Bucket(
            (HybridTask((f"t{b}",)),),
            4,
            8,
            (),
            each(stages),
            each(stages),
            each(stages),
            each(stages - 1, 0.0),
        )
        for b in range(r.randint(1, 4))
    ]
    return Plan("auto", stages, tuple(buckets), virtual, data=PIPELINES)


def chunks_of_pipelines(r: Random, plan: Plan) -> list[StepChunks]:
    """A step of each pipeline, with sizes of its own."""
    found = []
    for _ in range(PIPELINES):
        sizes = tuple(tuple(r.randint(1, 3) for _ in range(r.randint(0, 4))) for _ in plan.buckets)
        chunk_ids = {
            ChunkId(b, m, c): () for b, own in enumerate(sizes) for m, n in enumerate(own) for c in range(n)
        }
        found.append(StepChunks(chunk_ids, sizes))
    return found


def templates_of(seed: int, ranks: int, virtual: int, kept: bool) -> tuple[Plan, list[Template]]:
    r = Random(seed)
    plan = plan_of(r, ranks, virtual)
    steps = [chunks_of_pipelines(r, plan) for _ in range(r.randint(1, 3))]
    if kept:
        steps = [lockstep(all_chunked) for all_chunked in steps]
    return plan, [
        step_template(plan, [b for all_chunked in steps for b in all_chunked[p].sizes])
        for p in range(PIPELINES)
    ]


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_pipelines_of_different_sizes_do_not_block_each_other(ranks: int, virtual: int) -> None:
    for seed in range(30):
        plan, templates = templates_of(seed, ranks, virtual, kept=virtual > 1)
        assert must_keep_step(plan) == (virtual > 1)
        assert get_to_the_end(templates, plan.stages), seed


def test_with_several_stages_to_a_rank_they_would_without_keeping_step() -> None:
    stuck = [seed for seed in range(100) if not get_to_the_end(templates_of(seed, 4, 2, kept=False)[1], 8)]
    assert stuck
