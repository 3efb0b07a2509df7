"""Runs the steps of a plan: takes their batches, tries the plan, executes its template, and finishes its buckets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_mux.backbone.exchange import Exchange
from megatron_mux.engine.agreement import raise_on_every_rank
from megatron_mux.engine.batches import Burst, Staging, StepBatches
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.engine.interleaved import launch_problem
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.engine.out_of_memory import FailedBuckets, Stages
from megatron_mux.engine.part_times import PartTimes
from megatron_mux.engine.planning import Planning
from megatron_mux.engine.prepared import PreparedStep, ReadAhead, checked_template, sizes_of
from megatron_mux.engine.task_state import StepResult, TaskState
from megatron_mux.engine.train_step import TrainStep
from megatron_mux.engine.trial import Trials
from megatron_mux.engine.updates import BucketUpdate, MakeUpdate, update_of
from megatron_mux.fusion.plan import Plan, shrink_bucket
from megatron_mux.fusion.schedules import PIPELINE_SCHEDULES
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import Timer, execute
from megatron_mux.pipeline.template import Template
from megatron_mux.runtime import Parallel

Results = list[dict[str, StepResult]]
"""For each step, a result per task."""


@dataclass(eq=False)
class StepRunner:
    """Runs steps on this rank.

    Args:
        stages: This rank's.
        parallel: Where this rank stands.
        planning: Is told which steps were taken, and which plans did not fit.
        communicator: This rank's transfers.
        exchange: Carries messages of tensor ranks that computation hides.
        trials: Tries plans first; None: memory cannot run out, or only where a pass recovers from it.
        make_update: Makes the update of a bucket's tasks; None: `update_of`.

    Attributes:
        last_plan: The plan of the last steps.
        read_ahead: Prepares the steps.
        copied: Optimizers step after this, since their state is being copied; None: at once.
        buffer: `[n]` uint8 in which gradients are summed over ranks.
        updates: The updates of the last steps' buckets.
    """

    stages: Stages
    parallel: Parallel
    planning: Planning
    communicator: Communicator
    exchange: Exchange
    trials: Trials | None
    make_update: MakeUpdate | None = None
    last_plan: Plan | None = None
    copied: torch.cuda.Event | None = None
    buffer: torch.Tensor = field(init=False)
    read_ahead: ReadAhead = field(init=False)
    updates: dict[tuple[TaskOptimizer, ...], BucketUpdate] = field(default_factory=dict, init=False)
    _staging: Staging = field(init=False)

    def __post_init__(self) -> None:
        in_step = any(stage.in_step for stage in self.stages.values())
        self.read_ahead = ReadAhead(self.parallel, in_step)
        self._staging = Staging(self.parallel)
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.parallel.device)

    def run(
        self,
        plan: Plan,
        tasks: Mapping[str, TaskState],
        max_steps: int,
        timer: Timer | None,
        next_steps: int | None = None,
    ) -> Results:
        """Take steps of a plan that begins now.

        Args:
            tasks: All registered tasks.
            max_steps: Steps to take at the most.
            timer: Called with each action of this rank as it is done.
            next_steps: See `Engine.steps`.

        Returns:
            See `Engine.steps`; empty if the plan did not fit: another one is to follow.
        """
        plan = self._for_this_mesh(plan)
        if any(bucket.launch for bucket in plan.buckets):
            # Before anything is exchanged; stages whose pieces fit would wait for those that refuse.
            raise_on_every_rank(launch_problem(plan, self.stages), self.parallel)
        max_steps = max_steps if PIPELINE_SCHEDULES[plan.schedule].rolls else 1
        count = min(
            [max_steps, self.planning.steps_left, *(tasks[name].steps_at_once for name in plan.tasks)]
        )
        running = {name: tasks[name] for name in plan.tasks}
        steps = self.read_ahead.take(plan, running, count)
        self.last_plan = plan
        return self._run(plan, running, steps, timer, next_steps)

    def _run(
        self,
        plan: Plan,
        tasks: Mapping[str, TaskState],
        steps: Sequence[PreparedStep],
        timer: Timer | None,
        next_steps: int | None,
    ) -> Results:
        """Compute steps that are prepared."""
        template = checked_template(plan, sizes_of(steps))
        burst = Burst(tasks, plan.buckets, steps, self.parallel)
        batches = StepBatches(burst, self._staging)

        if self.trials is not None:
            actions = template[self.parallel.pp_rank]
            reasons = self.trials.failures(
                plan,
                actions,
                batches.rows,
                batches.labels,
                lambda failed: self._train_step(burst, batches.anew(), failed),
            )
            if reasons:
                failures = self._make_smaller(plan, tasks, reasons, reasons, "runs")
                return [failures] if failures else []
        rolls = PIPELINE_SCHEDULES[plan.schedule].rolls
        self.read_ahead.prepare_next((next_steps or len(steps)) if rolls else 1)
        failed = FailedBuckets(len(plan.buckets), self.stages.values(), self.parallel)
        work = self._train_step(burst, batches, failed)
        for extension in work.finalizer.extensions:
            extension.before_steps(self.stages, self.communicator)
        self._execute(template, work, plan, timer)
        self.planning.count(len(steps))
        results = work.finalizer.finish()
        if failed_buckets := work.finalizer.out_of_memory:
            results[-1] |= self._make_smaller(plan, tasks, failed_buckets, failed.everywhere(), "is repeated")
        return results

    def _train_step(self, burst: Burst, batches: StepBatches, failed: FailedBuckets) -> TrainStep:
        """What computes a burst of steps; its updates know how many backward passes each bucket has."""
        updates = self._updates_of(burst)
        for index, update in enumerate(updates):
            update.expect([sum(step.chunked.sizes[index]) for step in burst.steps])
        kinds = dict.fromkeys(kind for task in burst.tasks.values() for kind in task.extensions)
        extensions = [kind(burst) for kind in kinds]
        finalizer = BucketFinalizer(burst, failed, self.buffer, updates, extensions)
        return TrainStep(self.stages, batches, finalizer, self.exchange, self.copied)

    def _updates_of(self, burst: Burst) -> list[BucketUpdate]:
        """The update of each bucket, made anew for other tasks than in the steps before."""
        make = self.make_update or update_of
        keys = [tuple(burst.tasks[name].optimizer for name in bucket.tasks) for bucket in burst.buckets]
        self.updates = {key: self.updates.get(key) or make(key) for key in keys}
        return [self.updates[key] for key in keys]

    def _make_smaller(
        self,
        plan: Plan,
        tasks: Mapping[str, TaskState],
        failed: Collection[int],
        reasons: Mapping[int, str],
        verb: str,
    ) -> dict[str, StepResult]:
        """Have buckets that ran out of memory computed in smaller parts from now on, or their task parked.

        Args:
            plan: The plan that did not fit.
            failed: The buckets.
            reasons: Where and why, by bucket.
            verb: What becomes of the step.

        Returns:
            Results of tasks that do not fit by themselves.
        """
        failures: dict[str, StepResult] = {}
        records = {name: task.load.records for name, task in tasks.items()}
        relieved = plan
        for index in sorted(failed, reverse=True):  # from behind: the others keep their places
            names = plan.buckets[index].label
            smaller = shrink_bucket(relieved, index, records)
            if smaller is not None:
                relieved = smaller
                then = f"in {smaller.buckets[index].micro_batches} micro-batch(es)"
            elif len(plan.tasks) > 1:
                then = "once another task has left"
                if tasks[names].life.state == "running":  # one that is parked trains while nobody else does
                    tasks[names].life.to("parked")
            else:
                reason = f"one sequence of it alone ran out of memory ({reasons[index]})"
                failures[names] = tasks[names].fail(reason)
                continue
            line = f"{names}: out of memory ({reasons[index]}): the step {verb} {then}"
            self.planning.log_lines.append(line)
        self.planning.fall_back_to(relieved)
        return failures

    def _execute(self, template: Template, compute: TrainStep, plan: Plan, timer: Timer | None) -> None:
        """Run this rank's actions."""
        dtype = next(iter(self.stages.values())).dtype
        if timer is not None:
            compute.times = PartTimes(self.parallel.device)
            timer = compute.times.added(timer)
        execute(template, self.parallel.pp_rank, compute, self.communicator, dtype, timer, plan.stages)

    def _for_this_mesh(self, plan: Plan) -> Plan:
        """A policy's plan knows nothing of data parallelism: as many pipelines as there are."""
        return plan if plan.data == self.parallel.dp_size else replace(plan, data=self.parallel.dp_size)
