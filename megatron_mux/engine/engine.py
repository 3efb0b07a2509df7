"""The engine: one `step()` is one optimizer step of every active task; tasks join and leave between steps.

MuxTune section 3.2: adapters are registered on a live backbone; each task keeps its own optimizer, schedule,
clipping, accumulation, data order and fate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.backbone.model import Backbone
from megatron_mux.data.sampler import Sampler
from megatron_mux.engine.agreement import first_problem
from megatron_mux.engine.batches import Batches, lengths_of, read_together, weighted
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.engine.compute import TrainingCompute
from megatron_mux.engine.evaluate import EvalResult, evaluate
from megatron_mux.engine.messages import Messages, largest_message
from megatron_mux.engine.optimize import TaskOptimizer, summed_at_once
from megatron_mux.engine.out_of_memory import Shortage, first_sentence
from megatron_mux.engine.planning import Planning
from megatron_mux.engine.room import Room
from megatron_mux.engine.snapshot import Snapshot, take
from megatron_mux.engine.task_state import Status, StepResult, Task, TaskState
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import padded_lengths
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import ROLLING, Plan
from megatron_mux.fusion.plan_edits import keep_tasks, shrink_bucket
from megatron_mux.fusion.step import Lengths, StepGrid, lockstep, must_keep_step, step_grid, step_template
from megatron_mux.layout import PackedSequence
from megatron_mux.pipeline.check import check
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import Timer, execute
from megatron_mux.pipeline.template import Template, most_in_flight
from megatron_mux.runtime import Parallel


class Engine:
    """Trains the registered tasks on one backbone.

    Args:
        backbone: This rank's part of the frozen backbone: a stage, or several in the order of the model.
        parallel: Where this rank stands.
        planning: How tasks share a step; by default all in one hybrid task.
    """

    def __init__(
        self,
        backbone: Backbone | Sequence[Backbone],
        parallel: Parallel,
        planning: Planning | None = None,
    ) -> None:
        own = [backbone] if isinstance(backbone, Backbone) else list(backbone)
        self.backbone = own[0]
        self.stages = {parallel.pp_rank + i * parallel.pp_size: stage for i, stage in enumerate(own)}
        self.parallel = parallel
        self.planning = planning or Planning("spatial", parallel.pp_size * len(own), virtual=len(own))
        base_ops = [op for stage in own for op in stage.base_ops()]
        self.adapters = AdapterSet(base_ops, parallel, self.backbone.dtype, self.backbone.shape)
        self.communicator = Communicator.between_stages(parallel)
        self.last_plan: Plan | None = None
        self._checked: deque[Plan] = deque(maxlen=8)
        self._running: dict[str, TaskState] = {}
        self.room = Room(parallel.device)

    # -- tasks come and go

    def register_tasks(self, tasks: Sequence[Task]) -> None:
        """Attach the adapters of `tasks` (MuxTune section 3.2); they take part from the next step on.

        Every rank calls it with the same tasks in the same order.

        Raises:
            UserError: A name is taken, an initial adapter does not match the task or the backbone, or some rank has no
                memory for an adapter and its optimizer. Nothing of `tasks` is registered then.
        """
        done: list[str] = []
        problem = ""
        try:
            for task in tasks:
                problem = problem or self._register(task)
                done += [task.spec.name] * (not problem)
            if tasks and (problem := first_problem(problem, self.parallel)):
                raise UserError(problem)
        except BaseException:
            for name in done:
                self.remove_task(name)
            raise

    def _register(self, task: Task) -> str:
        """Returns what is wrong on this rank alone, if anything: then the task is not registered."""
        spec = task.spec
        if spec.name in self._running:
            raise UserError(f"task {spec.name!r} is registered already: give the new task another name")
        sampler = Sampler(len(task.data), spec.sequences_per_step, spec.training.seed, spec.data.shuffle)
        total = spec.total_steps(len(task.data))
        initial = task.resume.adapter if task.resume is not None else task.initial
        try:
            adapter = self.adapters.add(spec, total, initial)
        except torch.OutOfMemoryError as error:
            return f"task {spec.name!r}: there is no memory for its adapter ({first_sentence(error)})"
        try:
            load = self._load_of(task)
            optimizer = TaskOptimizer(adapter.parameters, spec.training, total)
            running = TaskState(task, adapter, optimizer, sampler, load, total)
            if task.resume is not None:
                running.resume(task.resume)
            self._make_room()
        except torch.OutOfMemoryError as error:
            self.adapters.remove(spec.name)
            return f"task {spec.name!r}: there is no memory for its optimizer ({first_sentence(error)})"
        except BaseException:
            self.adapters.remove(spec.name)
            raise
        self._running[spec.name] = running
        return ""

    def remove_task(self, name: str) -> None:
        """Detach a task's adapter; the others and the backbone are untouched.

        Raises:
            KeyError: No task of that name is registered.
        """
        del self._running[name]
        self.adapters.remove(name)
        for running in self._running.values():
            running.parked = False

    @property
    def tasks(self) -> tuple[str, ...]:
        """Registered tasks, finished and failed ones included until they are removed."""
        return tuple(self._running)

    @property
    def active(self) -> tuple[str, ...]:
        """Tasks that still have steps to do and take part; parked ones one by one, once nobody else is left."""
        going = [name for name, running in self._running.items() if running.status == "running"]
        return tuple(name for name in going if not self._running[name].parked) or tuple(going[:1])

    def task(self, name: str) -> Task:
        """A registered task."""
        return self._running[name].task

    def optimizer(self, name: str) -> TaskOptimizer:
        """A registered task's optimizer on this rank."""
        return self._running[name].optimizer

    def progress(self, name: str) -> tuple[int, int, Status]:
        """Steps done, steps in total, status."""
        running = self._running[name]
        return running.step, running.total_steps, running.status

    @property
    def plan(self) -> Plan:
        """How the next step is computed; follows from the active tasks and the policy.

        Tasks that share a step are ordered by name, so that the order in which they joined (it differs after a
        resume) does not change a single rounding.
        """
        return self.planning.next(self._loads())

    def check_alone(self, task: Task) -> None:
        """Refuse a task that the memory limit has no room for even if no other trains.

        Raises:
            UserError: Says what would make it fit.
        """
        if self.planning.planner is not None:
            self.planning.planner.check({task.spec.name: self._load_of(task)})

    def has_room(self, tasks: Sequence[Task]) -> bool:
        """Whether the memory limit has room for these tasks beside those that train or are parked."""
        loads = {name: running.load for name, running in self._running.items() if running.status == "running"}
        loads |= {task.spec.name: self._load_of(task) for task in tasks}
        try:
            if self.planning.planner is not None:
                self.planning.planner.check(loads)
        except UserError:
            return False
        return True

    def _load_of(self, task: Task) -> TaskLoad:
        return TaskLoad.of(task.spec, task.data.lengths, task.data.label_counts, self.backbone.shape)

    def _loads(self) -> dict[str, TaskLoad]:
        return {name: self._running[name].load for name in self.active}

    # -- steps

    def step(self, timer: Timer | None = None) -> dict[str, StepResult]:
        """One optimizer step of every task of the plan.

        Args:
            timer: Called with each action of this stage as it is done, for pictures of the schedule.

        Returns:
            A result per task; empty when no task is active.
        """
        return self.steps(1, timer)[0]

    def steps(self, most: int, timer: Timer | None = None) -> list[dict[str, StepResult]]:
        """Several optimizer steps of every task of the plan, rolling: a task's next begins while others drain.

        Every rank calls it with the same number. A task's steps come out as if they were taken one at a time.

        Args:
            most: Steps to take at the most; fewer if a task finishes, the plan changes, or data cannot be read.
            timer: See `step`.

        Returns:
            A result per task for each step, at least one; a task that fails is in those up to its failure. A task
            that found no memory for a step is in those before it: it takes the step again the next time.
        """
        plan = self._for_this_mesh(self.planning.begin(self._loads()))
        most = most if plan.schedule in ROLLING else 1
        count = min([most, self.planning.lasts, *(self._running[name].left for name in plan.tasks)])
        pad_to = padded_lengths(
            plan.alignment, {name: self._running[name].task.spec.data.max_length for name in plan.tasks}
        )
        sequences, failed = self._fetch(plan.tasks, pad_to, count)
        self.planning.follow(len(sequences) - 1)
        plan = keep_tasks(plan, sequences[0])  # without those that failed
        self.last_plan = plan if plan.tasks else self.last_plan
        if not plan.tasks:
            return [failed]  # nothing left; or a serial run's next task, whose turn is the next step
        results = self._run(plan, pad_to, sequences, timer)
        results[0] = {**failed, **results[0]}
        return results

    def _run(
        self,
        plan: Plan,
        pad_to: Mapping[str, int],
        sequences: Sequence[Mapping[str, list[PackedSequence]]],
        timer: Timer | None,
    ) -> list[dict[str, StepResult]]:
        """Compute steps whose data are there."""
        running = {name: self._running[name] for name in plan.tasks}
        lengths = [
            {name: self._lengths(name, k, pad_to.get(name, 0)) for name in running}
            for k in range(len(sequences))
        ]
        grids = [self._grid(plan, own) for own in lengths]
        sizes = [bucket for grid in grids for bucket in grid.sizes]
        template = step_template(plan, sizes)
        if plan not in self._checked:  # once a plan: later templates are made by the same rules
            check(template, sizes, plan.stages, len(plan.buckets), plan.virtual)
            self._checked.append(plan)
        batches = Batches(
            grids,
            [{name: own[name] for name in running} for own in sequences],
            {name: task.step for name, task in running.items()},
            {name: task.position_offset for name, task in running.items()},
            self.parallel,
        )
        tokens = [{name: sum(one.tokens) for name, one in own.items()} for own in lengths]
        with suppress(torch.OutOfMemoryError):  # there may be room once a pass has failed and is gone
            self._make_room(batches.most_rows)
        shortage = Shortage(len(plan.buckets), self.parallel, self._messages())
        ends = BucketFinalizer(running, plan.buckets, tokens, self.parallel, shortage, self.room)
        compute = TrainingCompute(self.stages, batches, ends)
        self._execute(template, compute, plan, timer)
        results = ends.finish()
        if ends.lacking:
            results[-1] |= self._relieve(plan, ends)
        return results

    def _messages(self) -> Messages:
        return Messages(self.stages.values(), self.parallel, self.room)

    def _make_room(self, rows: int = 0) -> None:
        """Take room for what must not want for memory: to sum gradients, and for messages of passes.

        Args:
            rows: Of the largest pass.

        Raises:
            torch.OutOfMemoryError: There is none; what there was is still there.
        """
        parameters = [p for adapter in self.adapters.tasks.values() for p in adapter.parameters]
        summed = summed_at_once(parameters, self.parallel)
        self.room.take(max(summed, largest_message(self.stages.values(), rows)))

    def _relieve(self, plan: Plan, ends: BucketFinalizer) -> dict[str, StepResult]:
        """Have buckets that lacked memory computed in smaller parts from now on, or their task parked.

        Returns:
            Results of tasks that cannot be trained in the memory there is.
        """
        said = ends.shortage.everywhere()
        failed: dict[str, StepResult] = {}
        sequences = {name: len(self._running[name].load.tokens) for name in plan.tasks}
        relieved = plan
        for index in sorted(ends.lacking, reverse=True):  # from behind: the others keep their places
            names = plan.buckets[index].label
            smaller = shrink_bucket(relieved, index, sequences)
            if smaller is not None:
                relieved = smaller
                then = f"in {smaller.buckets[index].micro_batches} micro-batch(es)"
            elif len(plan.tasks) > 1:
                then = "once another task has left"
                self._running[names].parked = True
            else:
                then = ""
                failed[names] = self._fails(
                    names, f"one sequence of it alone ran out of memory ({said[index]})"
                )
            if then:
                self.planning.news.append(
                    f"{names}: out of memory ({said[index]}): the step is repeated {then}"
                )
        self.planning.relieve(relieved)
        return failed

    def _execute(self, template: Template, compute: TrainingCompute, plan: Plan, timer: Timer | None) -> None:
        """Run this rank's actions."""
        self.communicator.expect(most_in_flight(template) + len(plan.buckets))
        dtype = self.backbone.dtype
        execute(template, self.parallel.pp_rank, compute, self.communicator, dtype, timer, plan.stages)

    def _grid(self, plan: Plan, lengths: Mapping[str, Lengths]) -> StepGrid:
        """What this pipeline computes in a step."""
        rank = self.parallel.dp_rank
        if not (self.backbone.residence.in_step or must_keep_step(plan)):
            return step_grid(plan, lengths, rank)
        return lockstep([step_grid(plan, lengths, other) for other in range(self.parallel.dp_size)])[rank]

    def _for_this_mesh(self, plan: Plan) -> Plan:
        """A policy's plan knows nothing of data parallelism: as many pipelines as there are."""
        return plan if plan.data == self.parallel.dp_size else replace(plan, data=self.parallel.dp_size)

    def _lengths(self, name: str, later: int, pad_to: int) -> Lengths:
        running = self._running[name]
        return lengths_of(running.task.data, running.sampler.batch(running.step + later), pad_to)

    def _fetch(
        self, names: Sequence[str], pad_to: Mapping[str, int], steps: int
    ) -> tuple[list[dict[str, list[PackedSequence]]], dict[str, StepResult]]:
        """Read the next batches of each task; a task whose data cannot be read on some rank fails on all of them.

        One that fails at a later step than the first ends the steps before it: it fails when its turn comes.
        """

        def read(name: str, later: int) -> list[PackedSequence]:
            running = self._running[name]
            records = running.sampler.batch(running.step + later)
            return weighted(name, running.task.data, records, pad_to.get(name, 0))

        sequences, problems = read_together(names, read, steps, self.parallel)
        return sequences, {name: self._fails(name, reason) for name, reason in problems.items()}

    def _fails(self, name: str, reason: str) -> StepResult:
        """A task that cannot go on, its adapter as it was before the step."""
        running, nothing = self._running[name], float("nan")
        running.status = "failed"
        return StepResult(running.step, running.total_steps, nothing, nothing, 0.0, 0, "failed", reason)

    # -- reading it out

    def evaluate(self, name: str) -> EvalResult | None:
        """Held-out loss and accuracy of a task; None when it has no evaluation data. Every rank calls it.

        Raises:
            UserError: The data could not be read; on every rank, so none waits for another.
        """
        running = self._running[name]
        if running.task.evaluation is None:
            return None
        options = running.task.spec.eval
        return evaluate(
            self.stages,
            self.parallel,
            self.communicator,
            name,
            running.task.evaluation,
            running.position_offset,
            running.step,
            self.room,
            None if options is None else options.per_device_eval_batch_size,
        )

    def snapshot(self, name: str) -> Snapshot | None:
        """A task's whole state on rank 0, None elsewhere. Every rank calls it."""
        running = self._running[name]
        return take(running.adapter, running.optimizer, running.step, self.parallel)

    def adapter_tensors(self, name: str) -> dict[str, Tensor] | None:
        """A task's adapter as full tensors by key on rank 0, None elsewhere. Every rank calls it."""
        state = self.snapshot(name)
        return None if state is None else state.adapter

    def adapter_config(self, name: str) -> dict[str, Any]:
        """The content of a task's `adapter_config.json`."""
        adapter = self._running[name].adapter
        return adapter.spec.config(adapter.host.shape)  # type: ignore[no-any-return]
