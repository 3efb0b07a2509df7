"""Plans under limits of memory, and what they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_mux.fusion.alignment import Chunk
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Bucket, Plan
from megatron_mux.fusion.planner.cost import bucket_cost
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.plan_evaluator import PlanEvaluator
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS, PlanningContext
from megatron_mux.fusion.step import step_chunks, step_template
from megatron_mux.pipeline.action import ChunkId
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import simulate
from tests.unit.fusion import backbone

MESHES = (Mesh(), Mesh(pipeline=2), Mesh(pipeline=4), Mesh(pipeline=2, split=(2, 2, 2, 2)), Mesh(1, 2, 2))


def most_bytes(plan: Plan, context: PlanningContext) -> float:
    """The peak of three steps, on the rank where it comes nearest to the limit, from every chunk's own cost.

    Of steps of typical lengths, and of steps in which each task has its longest record instead of its last one.
    """
    longest = {
        name: replace(
            load,
            tokens=(*load.tokens[:-1], load.longest_sequence),
            labels=(*load.labels[:-1], load.labels[-1] * load.longest_sequence // load.tokens[-1]),
        )
        for name, load in context.tasks.items()
    }
    return max(_most_bytes(plan, context), _most_bytes(plan, replace(context, tasks=longest)))


def _most_bytes(plan: Plan, context: PlanningContext) -> float:
    made = PlanEvaluator(context)
    peaks = []
    for pipeline in range(plan.data):
        chunked = step_chunks(plan, made.lengths, pipeline)
        costs = {chunk_id: _bytes_of(made, chunks) for chunk_id, chunks in chunked.chunks.items()}
        run = simulate(
            step_template(plan, chunked.sizes * 3),
            [_bare(b, plan) for b in plan.buckets],
            sizes=chunked.sizes * 3,
        )
        for rank, actions in enumerate(run.timed):
            kept = most = 0.0
            for action in (timed.action for timed in actions if timed.action.is_pass):
                chunk_id = ChunkId(action.bucket % len(plan.buckets), action.micro_batch, action.chunk)
                own, s = costs[chunk_id], action.stage
                kept += own.memory[s] * (action.kind == "F")
                most = max(most, kept + own.working[s])
                kept -= own.memory[s] * (action.kind == "B")
            peaks.append(made.resident[rank] + most)
    return max(peaks)


def _bytes_of(made: PlanEvaluator, chunks: Sequence[Chunk]) -> BucketCost:
    """What chunks that are computed together keep and take."""
    taken = made.memory.of_chunks(chunks)
    pairs = zip(made.costs.chunks(chunks), taken.kept.tolist(), taken.working.tolist(), strict=True)
    return bucket_cost(
        [replace(cost, memory=tuple(kept), working=tuple(working)) for cost, kept, working in pairs]
    )


def _bare(bucket: Bucket, plan: Plan) -> BucketCost:
    return BucketCost(bucket.micro_batches, bucket.forward, bucket.backward, transfer=bucket.transfer)


def limited_planner(loads: Mapping[str, TaskLoad], mesh: Mesh, share: float) -> Planner:
    """A planner whose limit is this share of the way from what is always there to what all tasks together take."""
    context = PlanningContext(
        backbone.profile(), backbone.info(), mesh, rolling=ROLLING_STEPS, tables=backbone.MadeUpTables()
    ).with_tasks(loads)
    made = PlanEvaluator(context)
    whole = made.with_longest(made.evaluate(made.of_policy("spatial")))
    resident, free = max(made.resident), max(whole.memory)
    return Planner(replace(context, memory_limit=resident + share * (free - resident)))
