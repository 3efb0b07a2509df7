"""The engine: one `step()` is one optimizer step of every active task; tasks join and leave between steps.

MuxTune section 3.2: adapters are registered on a live backbone; each task keeps its own optimizer, schedule,
clipping, accumulation, data order and fate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.backbone.model import Backbone
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.data.sampler import Sampler
from megatron_mux.engine.batches import lengths_of, micro_batches, read_together, weighted
from megatron_mux.engine.compute import TrainingCompute
from megatron_mux.engine.evaluate import EvalResult, evaluate
from megatron_mux.engine.optimize import TaskOptimizer, reduce_gradients, squared_norm
from megatron_mux.engine.planning import Planning
from megatron_mux.engine.snapshot import Snapshot, take
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import padded_lengths
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.step import Lengths, most_in_flight, step_grid, step_template
from megatron_mux.layout import PackedSequence
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec

Status = Literal["running", "finished", "failed"]


@dataclass
class Task:
    """What the engine needs to train one task.

    Attributes:
        spec: The validated task.
        data: Its training records.
        evaluation: Its held-out records, if any.
        initial: Full adapter tensors to start from, by key; None starts a fresh adapter.
        resume: State to continue from; takes precedence over `initial`.
    """

    spec: TaskSpec
    data: TaskDataset
    evaluation: TaskDataset | None = None
    initial: dict[str, Tensor] | None = None
    resume: Snapshot | None = None


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step of one task gave.

    Attributes:
        step: Optimizer steps done, this one included (a failed step is not counted).
        total_steps: Steps the task runs for.
        loss: Mean over the labelled tokens of the whole batch.
        grad_norm: Norm of the adapter's gradient before clipping, over all ranks.
        learning_rate: The rate this step used.
        tokens: Tokens of the batch, none of them padding.
        status: `failed` if the loss or the gradient was not finite, or data unreadable: the adapter is as before.
        reason: Why it failed, else empty.
        diverged: Whether it failed for its loss or gradient, not for data that could not be read.
    """

    step: int
    total_steps: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    status: Status
    reason: str = ""
    diverged: bool = False


@dataclass
class _Running:
    """A registered task."""

    task: Task
    adapter: TaskAdapter
    optimizer: TaskOptimizer
    sampler: Sampler
    load: TaskLoad
    total_steps: int
    step: int = 0
    status: Status = "running"

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot, whose adapter is in place already.

        Raises:
            UserError: The snapshot lacks something or holds it in another shape.
        """
        try:
            self.optimizer.load_state(snapshot.moments, snapshot.step)
            self.adapter.load_state(snapshot.extra)
        except (KeyError, ValueError) as error:
            raise UserError(
                f"task {self.task.spec.name!r}: its training state does not fit: {error}"
            ) from error
        self.step = snapshot.step
        if self.step >= self.total_steps:
            self.status = "finished"

    @property
    def position_offset(self) -> int:
        """Virtual tokens in front of every sequence (prefix tuning)."""
        return int(getattr(self.task.spec.adapter, "num_virtual_tokens", 0))


class Engine:
    """Trains the registered tasks on one backbone.

    Args:
        backbone: This rank's part of the frozen backbone.
        parallel: Where this rank stands.
        planning: How tasks share a step; by default all in one hybrid task.
    """

    def __init__(
        self,
        backbone: Backbone,
        parallel: Parallel,
        planning: Planning | None = None,
    ) -> None:
        self.backbone = backbone
        self.parallel = parallel
        self.planning = planning or Planning("spatial", parallel.pp_size)
        self.adapters = AdapterSet(backbone.base_ops(), parallel, backbone.dtype, backbone.shape)
        self.communicator = Communicator.between_stages(parallel)
        self.last_plan: Plan | None = None
        self._running: dict[str, _Running] = {}

    # -- tasks come and go

    def register_tasks(self, tasks: Sequence[Task]) -> None:
        """Attach the adapters of `tasks` (MuxTune section 3.2); they take part from the next step on.

        Every rank calls it with the same tasks in the same order.

        Raises:
            UserError: A name is taken, or an initial adapter does not match the task or the backbone. Nothing of
                `tasks` is registered then.
        """
        done: list[str] = []
        try:
            for task in tasks:
                self._register(task)
                done.append(task.spec.name)
        except BaseException:
            for name in done:
                self.remove_task(name)
            raise

    def _register(self, task: Task) -> None:
        spec = task.spec
        if spec.name in self._running:
            raise UserError(f"task {spec.name!r} is registered already: give the new task another name")
        sampler = Sampler(len(task.data), spec.sequences_per_step, spec.training.seed, spec.data.shuffle)
        total = spec.total_steps(len(task.data))
        initial = task.resume.adapter if task.resume is not None else task.initial
        adapter = self.adapters.add(spec, total, initial)
        try:
            load = TaskLoad.of(spec, task.data.lengths, task.data.label_counts, self.backbone.info)
            optimizer = TaskOptimizer(adapter.parameters, spec.training, total)
            running = _Running(task, adapter, optimizer, sampler, load, total)
            if task.resume is not None:
                running.resume(task.resume)
        except BaseException:
            self.adapters.remove(spec.name)
            raise
        self._running[spec.name] = running

    def remove_task(self, name: str) -> None:
        """Detach a task's adapter; the others and the backbone are untouched.

        Raises:
            KeyError: No task of that name is registered.
        """
        del self._running[name]
        self.adapters.remove(name)

    @property
    def tasks(self) -> tuple[str, ...]:
        """Registered tasks, finished and failed ones included until they are removed."""
        return tuple(self._running)

    @property
    def active(self) -> tuple[str, ...]:
        """Tasks that still have steps to do."""
        return tuple(name for name, running in self._running.items() if running.status == "running")

    def task(self, name: str) -> Task:
        """A registered task."""
        return self._running[name].task

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

    def check_fits(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks that the memory limit has no room for beside those that run.

        Raises:
            UserError: Says which, and what would make it fit.
        """
        if self.planning.planner is not None:
            info = self.backbone.info
            new = [TaskLoad.of(t.spec, t.data.lengths, t.data.label_counts, info) for t in tasks]
            self.planning.planner.check({**self._loads(), **{load.name: load for load in new}})

    def _loads(self) -> dict[str, TaskLoad]:
        return {name: self._running[name].load for name in self.active}

    # -- one step

    def step(self, timer: Callable[[TimedAction], None] | None = None) -> dict[str, StepResult]:
        """One optimizer step of every task of the plan.

        Args:
            timer: Called with each action of this stage as it is done, for pictures of the schedule.

        Returns:
            A result per task; empty when no task is active.
        """
        plan = self._for_this_mesh(self.planning.begin(self._loads()))
        pad_to = padded_lengths(
            plan.alignment, {name: self._running[name].task.spec.data.max_length for name in plan.tasks}
        )
        sequences, failed = self._fetch(plan.tasks, pad_to)
        plan = plan.only(sequences)  # without those that failed
        names = plan.tasks
        self.last_plan = plan if names else self.last_plan
        if not names:
            return failed  # nothing left; or a serial run's next task, whose turn is the next step
        steps = {name: self._running[name].step for name in names}
        offsets = {name: self._running[name].position_offset for name in names}
        lengths = {name: self._lengths(name, pad_to.get(name, 0)) for name in names}
        grid = step_grid(plan, lengths, self.parallel.dp_rank)
        template = step_template(plan, grid.sizes)
        fetched = {name: sequences[name] for name in names}
        batches = micro_batches(grid, fetched, steps, offsets, self.parallel)
        compute = TrainingCompute(self.backbone, batches, len(names), self.parallel.is_last_stage)
        self.communicator.expect(most_in_flight(template))
        execute(template[self.parallel.pp_rank], compute, self.communicator, self.backbone.dtype, timer)
        losses, norms = self._statistics(names, compute.losses)
        done = {
            name: self._finish(name, losses[i], norms[i], sum(lengths[name].tokens))
            for i, name in enumerate(names)
        }
        return {**failed, **done}

    def _for_this_mesh(self, plan: Plan) -> Plan:
        """A policy's plan knows nothing of data parallelism: as many pipelines as there are."""
        return plan if plan.data == self.parallel.dp_size else replace(plan, data=self.parallel.dp_size)

    def _lengths(self, name: str, pad_to: int) -> Lengths:
        running = self._running[name]
        return lengths_of(running.task.data, running.sampler.batch(running.step), pad_to)

    def _fetch(
        self, names: Sequence[str], pad_to: Mapping[str, int]
    ) -> tuple[dict[str, list[PackedSequence]], dict[str, StepResult]]:
        """Read the next batch of each task; a task whose data cannot be read on some rank fails on all of them."""

        def read(name: str) -> list[PackedSequence]:
            running = self._running[name]
            records = running.sampler.batch(running.step)
            return weighted(name, running.task.data, records, pad_to.get(name, 0))

        sequences, problems = read_together(names, read, self.parallel)
        failed: dict[str, StepResult] = {}
        nothing = float("nan")
        for name, reason in problems.items():
            running = self._running[name]
            running.status = "failed"
            failed[name] = StepResult(
                running.step, running.total_steps, nothing, nothing, 0.0, 0, "failed", reason
            )
        return sequences, failed

    def _finish(self, name: str, loss: float, norm: float, tokens: int) -> StepResult:
        """Let one task's optimizer step, or stop the task."""
        running = self._running[name]
        rate = running.optimizer.learning_rate(running.step)
        reason = ""
        if not math.isfinite(loss):
            reason = f"its loss was {loss} at step {running.step + 1}"
        elif not math.isfinite(norm):
            reason = f"its gradient norm was {norm} at step {running.step + 1}"
        if reason:
            running.status = "failed"
            running.optimizer.zero()
        else:
            running.optimizer.clip(norm)
            running.optimizer.step(running.step)
            running.step += 1
            running.adapter.after_step(running.step)
            if running.step >= running.total_steps:
                running.status = "finished"
        return StepResult(
            running.step, running.total_steps, loss, norm, rate, tokens, running.status, reason, bool(reason)
        )

    def _statistics(self, names: Sequence[str], losses: Tensor) -> tuple[list[float], list[float]]:
        """Each task's loss and gradient norm over all ranks; gradients are whole afterwards. One host sync."""
        parameters = {name: self._running[name].adapter.parameters for name in names}
        reduce_gradients([p for name in names for p in parameters[name]], self.parallel)
        for name in names:
            self._running[name].adapter.penalty(self._running[name].step)
        squares = [squared_norm(parameters[name], self.parallel.device) for name in names]
        if not (self.parallel.is_last_stage and self.parallel.tp_rank == 0):
            losses = torch.zeros_like(losses)
        table = torch.stack([losses.double(), torch.stack(squares)])
        if self.parallel.dp_size > 1:
            dist.all_reduce(table[0], group=self.parallel.dp_group)
        if self.parallel.tp_size * self.parallel.pp_size > 1:
            dist.all_reduce(table, group=self.parallel.model_group)
        table[1].sqrt_()
        loss_list, norm_list = table.tolist()
        return loss_list, norm_list

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
            self.backbone,
            self.parallel,
            self.communicator,
            name,
            running.task.evaluation,
            running.position_offset,
            running.step,
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
        return self._running[name].adapter.config_dict()
