"""The planner: from what is known to a plan (MuxTune sections 3.3 to 3.5).

Hybrid tasks, buckets, their order and the number of micro-batches come from `search.py`, on costs by equations 3 and 5.
Its answer, cut into chunks and uncut, and the plain policies are then evaluated on the chunks of a step of typical
lengths, and the best is taken: a plan is never predicted to be slower than one task after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import padding_shares, paper_chunk
from megatron_mux.fusion.graphs.launch_order import LaunchOrder
from megatron_mux.fusion.plan import InterleavingCosts, Plan
from megatron_mux.fusion.planner.arrangement import Arrangement
from megatron_mux.fusion.planner.load import TaskLoad, signature_of
from megatron_mux.fusion.planner.plan_evaluator import Evaluation, PlanEvaluator
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.planner.search import search
from megatron_mux.fusion.planner.step_memory import are_short, is_short
from megatron_mux.fusion.step import step_chunks
from megatron_mux.memory.sizes import show_size
from megatron_mux.tasks import TaskSpec

_MAX_FORWARDS = 1_000
"""Forward passes of a step on all stages, added up while numbers of micro-batches and chunk sizes are compared: a fifth
of a second."""

_MAX_COUNTS = 6
"""Numbers of micro-batches to try."""

_MANY = 32
"""Micro-batches of all tasks per stage: more of them hardly reduce the pipeline's bubble."""

_PLAIN: tuple[Literal["spatial", "temporal"], ...] = ("spatial", "temporal")


@dataclass(frozen=True)
class Comparison:
    """What a plan is compared with.

    Attributes:
        alternatives: Predicted seconds of a step of every task by `serial`, `temporal`, `spatial` and `padded`
            (spatial, all sequences padded to the longest `max_length`); None: does not fit into memory. Where tensor
            ranks may hide messages also `interleave_off`: the plan that would be made if none were hidden.
        padding: Shares of computed tokens that carry no information: `plan`, `within_tasks`, `zero_padded`.
    """

    alternatives: dict[str, float | None]
    padding: dict[str, float]


class Planner:
    """Makes plans.

    Args:
        context: What is known, except the tasks: each method takes those.
    """

    def __init__(self, context: PlanningContext) -> None:
        self.context = context
        self._last: PlanEvaluator | None = None

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a rank may use."""
        return self.context.memory_limit

    def plan(self, tasks: Mapping[str, TaskLoad]) -> Plan:
        """The best plan found for these tasks; it depends on nothing else.

        Raises:
            UserError: Some task does not fit into memory; says which, and what would make it fit.
        """
        if not tasks:
            mesh = self.context.mesh
            return self._described(Plan("auto", mesh.stages, (), mesh.virtual, mesh.split))
        evaluator = self._evaluator(tasks)
        return self._with_predictions(evaluator, self._best(evaluator))

    def check(self, tasks: Mapping[str, TaskLoad]) -> None:
        """Refuse tasks of which some cannot fit into memory in any plan; quick.

        Raises:
            UserError: Says which, and what would make it fit.
        """
        if self.memory_limit is not None and tasks:
            _refuse_too_large(self._evaluator(tasks))

    def prepare(self, tasks: Mapping[str, TaskLoad], coming: Sequence[TaskSpec]) -> Future[None] | None:
        """Predict in the background what memory tasks will take that are going to join others.

        Every rank calls it.

        Args:
            tasks: That may train then.
            coming: Whose data are not known yet.

        Returns:
            See `MemorySource.prepare`.
        """
        context = self.context
        if context.memory_limit is None or context.tables is None:
            return None
        shape, loads = context.info.shape, tasks.values()
        signatures = {load.signature(shape) for load in loads} | {signature_of(s, shape) for s in coming}
        short = are_short(loads) and all(
            is_short(s.data.max_length, s.adapter.virtual_tokens) for s in coming
        )
        return context.tables.prepare(context.mesh, context.recompute, sorted(signatures), short)

    def fits(self, plan: Plan) -> bool:
        """Whether a plan of this planner is predicted to keep to its limit."""
        limit = self.memory_limit
        return limit is None or max(plan.memory_bytes, default=0.0) <= limit * (1 + 1e-9)

    def refuse(self, plan: Plan, tasks: Mapping[str, TaskLoad]) -> NoReturn:
        """Refuse these tasks, because even this plan, which takes the least memory, takes too much.

        Raises:
            UserError: Says which task is too large, if one is.
        """
        _refuse_too_large(self._evaluator(tasks))
        raise UserError(
            f"the memory limit of {show_size(self.memory_limit or 0)} is less than the "
            f"{show_size(max(plan.memory_bytes))} that a rank needs for a record at a time with the schedule "
            f"{self.context.schedule!r}: give more memory, or plan another schedule"
        )

    def priced(self, plan: Plan, tasks: Mapping[str, TaskLoad]) -> Plan:
        """A plan with predictions for these tasks, its buckets in the best entry order tried."""
        context = replace(self.context, alignment=plan.alignment)
        evaluator = PlanEvaluator(context.with_tasks({name: tasks[name] for name in plan.tasks}))
        return self._with_predictions(evaluator, evaluator.best_order(plan))

    def fixed(self, policy: Literal["temporal", "spatial"], tasks: Mapping[str, TaskLoad]) -> Plan:
        """The plan of a plain policy for these tasks, with predictions."""
        evaluator = self._evaluator(tasks)
        return self._with_predictions(evaluator, evaluator.best_order(evaluator.of_policy(policy)))

    def compare(self, tasks: Mapping[str, TaskLoad]) -> Comparison:
        """What the plan for these tasks is compared with."""
        evaluator = self._evaluator(tasks)
        latencies: dict[str, float | None] = {}
        alone = evaluator.alone()
        latencies["serial"] = sum(a.latency for a in alone) if all(a.fits for a in alone) else None
        padded = PlanEvaluator(replace(self.context, alignment="longest").with_tasks(tasks))
        for name, by, policy in (*((p, evaluator, p) for p in _PLAIN), ("padded", padded, "spatial")):
            known = by.best_order(by.of_policy(policy))
            latencies[name] = known.latency if known.fits else None
        if self.context.hides_messages:
            latencies["interleave_off"] = self._not_interleaved(evaluator).predicted_latency_s
        padding = padding_shares({load.name: load.tokens for load in tasks.values()}, evaluator.pad_to)
        return Comparison(latencies, padding)

    def _evaluator(self, tasks: Mapping[str, TaskLoad]) -> PlanEvaluator:
        """The evaluator for these tasks; the last one is kept, with all that it has evaluated.

        Another thread may check other tasks meanwhile, and keep their evaluator: what is made here is returned, never
        read back.
        """
        last = self._last
        if last is None or last.raw != tasks:
            self._last = last = PlanEvaluator(self.context.with_tasks(tasks))
        return last

    def _not_interleaved(self, evaluator: PlanEvaluator) -> Plan:
        """The plan of an evaluator's tasks that would be made if no messages were hidden."""
        if evaluator.not_interleaved is None:
            evaluator.not_interleaved = Planner(replace(self.context, interleave="off")).plan(evaluator.raw)
        return evaluator.not_interleaved

    def _best(self, evaluator: PlanEvaluator) -> Evaluation:
        """The fastest of the search's layouts and the plain policies that fit; else one record at a time."""
        _refuse_too_large(evaluator)
        counts, ranks = self._counts(evaluator), self.context.mesh.pipeline
        plans = [evaluator.of_policy(policy) for policy in _PLAIN]
        if self.memory_limit is not None or not self._is_full(counts[0], evaluator):
            # As `serial` fills a pipeline with each task, but without a flush between them.
            plans.append(evaluator.of_policy("temporal", micro_batches=max(2 * ranks, counts[0])))
        halves = [halved for plan in plans if (halved := self._in_halves(plan))]
        others = []
        if self.context.hides_messages and self.context.interleave == "auto":
            # Of many tasks this search finds more hybrid tasks: it need not look for buckets of several.
            off = self._not_interleaved(evaluator)
            others = [evaluator.evaluate(layout) for layout in (off, self._in_halves(off)) if layout]
        arrangement = search(
            evaluator.costs,
            evaluator.tokens,
            counts,
            evaluator.stage_limit,
            self.context.mesh.virtual,
            self.context.steps_per_flush,
        )
        if arrangement is not None:
            others += self._variants(evaluator, arrangement)
        least = min((e.latency for e in others if e.fits), default=math.inf) * (1 + 1e-9)
        plain = [evaluator.best_order(plan) for plan in (*plans, *halves) if evaluator.least(plan) <= least]
        if fitting := [e for e in (*plain, *others) if e.fits]:
            return min(fitting, key=lambda e: e.latency)  # of equally fast ones a plain one
        smallest = evaluator.evaluate(evaluator.smallest())
        if not smallest.fits:
            self.refuse(self._with_predictions(evaluator, smallest), evaluator.raw)
        return smallest

    def _counts(self, evaluator: PlanEvaluator) -> list[int]:
        """Numbers of micro-batches to try: the smallest that users count on, doubled while that divides anything."""
        if self.context.micro_batches is not None:
            return [self.context.micro_batches]
        mesh, loads = self.context.mesh, evaluator.loads
        least = max(load.accumulation for load in loads)
        most = max(least, sum(load.records for load in loads) // mesh.data)
        counts = [least]
        while counts[-1] < most and len(counts) < _MAX_COUNTS:
            full = self._is_full(counts[-1], evaluator)
            if full and self.memory_limit is None:
                break
            counts.append(counts[-1] * (4 if full else 2))  # of a full pipeline only memory asks for more
        return counts

    def _is_full(self, micro_batches: int, evaluator: PlanEvaluator) -> bool:
        """Whether so many micro-batches of each task fill the pipeline."""
        return micro_batches * len(evaluator.loads) >= _MANY * self.context.mesh.pipeline

    def _variants(self, evaluator: PlanEvaluator, given: Arrangement) -> Iterator[Evaluation]:
        """The arrangement with other numbers of micro-batches and with chunks: pipelines like many short passes."""
        spent, best = 0, math.inf
        counts = [given.micro_batches, *(c for c in self._counts(evaluator) if c != given.micro_batches)]
        for count in counts if self.context.mesh.pipeline > 1 else counts[:1]:
            for chunk in self._chunks(evaluator):
                if spent > _MAX_FORWARDS:
                    return
                plan = evaluator.of_arrangement(given, count, chunk)
                for layout in filter(None, (plan, self._in_halves(plan))):
                    spent += evaluator.forwards(layout)
                    if evaluator.least(layout) < best:
                        evaluation = evaluator.evaluate(layout)
                        best = min(best, evaluation.latency if evaluation.fits else math.inf)
                        yield evaluation

    def _in_halves(self, plan: Plan) -> Plan | None:
        """The plan with the hybrid tasks of each bucket in two halves; None if tensor ranks would not gain by it."""
        alone = all(len(bucket.hybrid_tasks) == 1 and bucket.chunk is None for bucket in plan.buckets)
        if self.context.interleave not in ("halves", "auto") or not self.context.hides_messages or not alone:
            return None
        return replace(plan, buckets=tuple(replace(bucket, halves=True) for bucket in plan.buckets))

    def _chunks(self, evaluator: PlanEvaluator) -> list[int | None]:
        if self.context.chunk != "auto":
            return [self.context.chunk]
        if self.context.mesh.pipeline == 1:
            return [None]  # no stage waits for a shorter pass
        longest = max(max(load.tokens, default=1) for load in evaluator.loads)
        sizes = {paper_chunk([load.max_length for load in evaluator.loads]), 64, 128, 256, 512, 1024}
        return [None, *sorted(size for size in sizes if size < longest)]

    def _with_predictions(self, evaluator: PlanEvaluator, evaluation: Evaluation) -> Plan:
        evaluation = evaluator.with_longest(evaluation)
        memory = evaluation.memory if self.context.mesh.predicts_memory else ()
        plan = replace(evaluation.plan, predicted_latency_s=evaluation.latency, memory_bytes=memory)
        return self._described(_with_launch_orders(plan, evaluator))

    def _described(self, plan: Plan) -> Plan:
        """Add mesh, backbone, profile and memory limit to a plan."""
        mesh = self.context.mesh
        return replace(
            plan,
            tensor=mesh.tensor,
            data=mesh.data,
            expert=mesh.expert,
            expert_tensor=mesh.expert_tensor,
            managers=mesh.managers,
            backbone=self.context.info.fingerprint,
            costs=self.context.profile.description,
            kernels=self.context.profile.kernels,
            pointwise=self.context.pointwise,
            memory_limit_bytes=self.memory_limit,
        )


def choose_recompute(
    context: PlanningContext,
    device: str,
    asked: str | None,
    divide: Callable[[PlanningContext], PlanningContext],
    say: Callable[[str], None],
) -> PlanningContext:
    """Divide the layers; on a GPU, recompute them if some task does not fit into memory otherwise.

    Attention alone is never chosen: it keeps no scores, so at most its output is saved.

    Args:
        context: With the recomputation that the flag asks for.
        device: `cpu`, `cuda` or the name of a GPU.
        asked: The value of `--recompute-granularity`; None: it was not given, and more may be chosen.
        divide: Divides the context's layers into stages.
        say: Told of the choice.

    Returns:
        The divided context.

    Raises:
        UserError: There is a limit of memory, and memory cannot be predicted.
    """
    divided = divide(context)
    if divided.memory_limit is not None and divided.tasks:
        divided.step_memory()  # what cannot be predicted is no reason to recompute anything
    if asked is not None or device == "cpu":
        return divided
    try:
        Planner(divided).check(divided.tasks)
    except UserError:
        say(
            "some task does not fit into memory otherwise: layers are recomputed (--recompute-granularity full)"
        )
        return divide(replace(context, recompute="full"))
    return divided


def _with_launch_orders(plan: Plan, evaluator: PlanEvaluator) -> Plan:
    """The plan with predictions and launch orders for buckets that compute several batches side by side."""
    overlap = evaluator.costs.interleaving
    if overlap is None or all(bucket.batches == 1 for bucket in plan.buckets):
        return plan
    chunks = step_chunks(plan, evaluator.lengths).chunks
    buckets = []
    for b, bucket in enumerate(plan.buckets):
        turns, launch = [], []
        most = max((row for chunk_id, row in chunks.items() if chunk_id.bucket == b), key=len, default=())
        if len(most) == bucket.batches > 1:
            costs = evaluator.costs.chunks(most)
            for s, layers in enumerate(overlap.stages):
                ways = [tuple(cost.pass_cost(s, backward) for cost in costs) for backward in (False, True)]
                turns.append(InterleavingCosts(ways[0], ways[1], layers, overlap.share))
                launch.append(LaunchOrder(*(overlap.order(ways[way], s, bool(way)) for way in (0, 1))))
        buckets.append(replace(bucket, launch=tuple(launch), turns=tuple(turns)))
    return replace(plan, buckets=tuple(buckets))


def _refuse_too_large(evaluator: PlanEvaluator) -> None:
    """Refuse tasks of which some do not fit into memory in any plan.

    Raises:
        UserError: Says which, and what would make them fit.
    """
    if not evaluator.too_large:
        return
    context, resident = evaluator.context, evaluator.resident
    held_at_least = [r + u for r, u in zip(resident, evaluator.updating, strict=True)]
    assert context.memory_limit is not None
    if max(held_at_least) > context.memory_limit:
        rank = max(range(len(resident)), key=held_at_least.__getitem__)
        held = f"{show_size(held_at_least[rank])} that stage {rank} holds of the backbone and the adapters"
        more = "give more memory, more stages or tensor ranks, or bf16"
        raise UserError(
            f"the memory limit of {show_size(context.memory_limit)} is less than the {held}: {more}"
        )
    problems = []
    for task in evaluator.too_large:
        load, ranks = evaluator.loads[task], context.mesh.pipeline
        kept = evaluator.largest[task].reshape(-1, ranks).sum(axis=0).tolist()
        needed = max(r + k for r, k in zip(resident, kept, strict=True))
        length = evaluator.longest_that_fits(task)
        advice = f"lower its data.max_length to {length}, " if length >= 2 else ""
        if context.alignment == "longest":
            advice = "do not pad to the longest of all tasks (--mux-align dense), "
        if context.recompute != "full":
            advice += "recompute layers (--recompute-granularity full), "
        problems.append(
            f"task {load.name!r}: one sequence of {load.longest_sequence} tokens needs {show_size(needed)} on a rank, "
            f"the limit is {show_size(context.memory_limit)}: {advice}or give more memory, stages or tensor ranks"
        )
    raise UserError(*problems)
