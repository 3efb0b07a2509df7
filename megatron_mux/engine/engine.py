"""The engine: one `step()` is one optimizer step of every active task; tasks join and leave between steps.

MuxTune section 3.2: adapters are registered on a live backbone; each task keeps its own optimizer, schedule,
clipping, accumulation, data order and fate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.backbone.communication import GroupExchange
from megatron_mux.backbone.exchange import Exchange
from megatron_mux.backbone.model import Backbone
from megatron_mux.engine.agreement import first_problem
from megatron_mux.engine.evaluation.evaluator import EvalResult
from megatron_mux.engine.evaluation.held_out import Records
from megatron_mux.engine.expert_managers import ask_for_lowest_adapter
from megatron_mux.engine.forward_passes import ForwardPasses
from megatron_mux.engine.generation.completions import OpenCompletions
from megatron_mux.engine.generation.passes import Attached, Completion, Prompt
from megatron_mux.engine.optimize import TaskOptimizer, gradient_buffer_size
from megatron_mux.engine.planning import Planning
from megatron_mux.engine.registration import attach, detach
from megatron_mux.engine.snapshot import HostMemory, LocalState, Snapshot, copy_states
from megatron_mux.engine.step_runner import Results, StepRunner
from megatron_mux.engine.task_state import StepResult, Task, TaskState
from megatron_mux.engine.trial import Trials
from megatron_mux.engine.updates import MakeUpdate
from megatron_mux.errors import UserError, failed_allocation
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.kernels.own_rows import Place, VocabularyPart
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import Timer
from megatron_mux.process_groups import connect
from megatron_mux.runtime import Parallel
from megatron_mux.tasks.life import State, Status


class Engine:
    """Trains the registered tasks on one backbone.

    Args:
        backbone: This rank's part of the frozen backbone: a stage, or several in the order of the model.
        parallel: Where this rank stands.
        planning: How tasks share a step; by default all in one hybrid task.
        tries_plans: Whether a plan is tried on each rank before its steps count (see `trial`); by default on a GPU.
        exchange: Carries messages of tensor ranks that computation hides (see `make_exchange`); by default collectives
            of their group.
        make_update: Makes what ends the optimizer steps of a bucket's tasks; by default `updates.update_of`.
    """

    def __init__(
        self,
        backbone: Backbone | Sequence[Backbone],
        parallel: Parallel,
        planning: Planning | None = None,
        tries_plans: bool | None = None,
        exchange: Exchange | None = None,
        make_update: MakeUpdate | None = None,
    ) -> None:
        stages = [backbone] if isinstance(backbone, Backbone) else list(backbone)
        self.backbone = stages[0]
        self.stages = {parallel.pp_rank + i * parallel.pp_size: stage for i, stage in enumerate(stages)}
        self.parallel = parallel
        self.planning = planning or Planning("spatial", parallel.pp_size * len(stages), virtual=len(stages))
        base_ops = [op for stage in stages for op in stage.base_ops()]
        shape, weights, vocabulary = self.backbone.shape, self.backbone.module_weight, _vocabulary_of(stages)
        self.adapters = AdapterSet(Host(base_ops, parallel, self.backbone.dtype, shape, vocabulary, weights))
        self.adapters.use(self.planning.kernels)
        connect(parallel)
        self.communicator = Communicator(parallel, closes_ring=len(stages) > 1)
        if tries_plans is None:
            tries_plans = runtime.is_gpu(parallel.device)
        self._trials = Trials(self.stages, parallel, self.communicator) if tries_plans else None
        exchange = exchange or GroupExchange(parallel.tp_group)
        self._runner = StepRunner(
            self.stages, parallel, self.planning, self.communicator, exchange, self._trials, make_update
        )
        self._forward = ForwardPasses(self.stages, parallel, self.communicator, self._trials)
        self._tasks: dict[str, TaskState] = {}
        ask_for_lowest_adapter(stages, parallel, self._lowest_adapter)

    def _lowest_adapter(self, _: Backbone) -> int:
        """The lowest layer in which some task has an adapter."""
        return min((own.lowest_layer for own in self._tasks.values()), default=self.backbone.shape.layers)

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
        for name in done:
            self._tasks[name].begin()

    def _register(self, task: Task) -> str:
        """Returns what is wrong on this rank alone, if anything: then the task is not registered."""
        name = task.spec.name
        if name in self._tasks:
            raise UserError(f"task {name!r} is registered already: give the new task another name")
        try:
            state = self._tasks[name] = attach(self.adapters, task, self._load_of(task))
            self.reserve_gradient_buffer()
        except UserError as error:  # its checkpoint, which other ranks may have read
            return str(error)
        except torch.OutOfMemoryError as error:
            self._tasks.pop(name, None)
            detach(self.adapters, name)
            return f"task {name!r}: there is no memory for its adapter and optimizer ({failed_allocation(error)})"
        if 0 in self.stages and (noise := state.embedding_noise) is not None:
            self.stages[0].vocabulary.noise[name] = noise
        return ""

    def remove_task(self, name: str) -> None:
        """Detach a task's adapter; the others and the backbone are untouched.

        Raises:
            KeyError: No task of that name is registered.
        """
        self._runner.read_ahead.forget()  # it knows the task, whose memory is to be free
        del self._tasks[name]
        detach(self.adapters, name)
        if 0 in self.stages:
            self.stages[0].vocabulary.noise.pop(name, None)
        self.reserve_gradient_buffer()
        self._end_parking()

    def pause(self, name: str, state: State = "paused", reason: str = "") -> None:
        """Let a task take no part in steps; it keeps all that it has. Every rank calls it, between steps.

        It becomes `paused`, or `pruned` for a reason.

        Raises:
            ValueError: The task is over.
        """
        self._tasks[name].life.to(state, reason)
        self._end_parking()

    def resume(self, name: str) -> None:
        """Let a task that was paused take part again, from the step on at which it was. Every rank calls it."""
        self._tasks[name].life.to("running")

    def _end_parking(self) -> None:
        """Let parked tasks go on: one beside which they ran out of memory takes part no longer."""
        for task in self._tasks.values():
            if task.life.state == "parked":
                task.life.to("running")

    def finish_early(self, name: str) -> None:
        """Let a task have done its last step, though steps are left. Every rank calls it, between steps."""
        self._runner.read_ahead.forget()  # it has prepared more steps
        self._tasks[name].life.end("finished")

    def reserve_gradient_buffer(self) -> Tensor:
        """Have a buffer to sum the gradients of all tasks in, so that no rank runs out of memory while others wait.

        Raises:
            torch.OutOfMemoryError: There is no memory for it; then it is as it was.
        """
        self._runner.updates.clear()  # they keep storage of tasks that have left
        params = [task.adapter.flat_params for task in self._tasks.values()]
        size = gradient_buffer_size(params, self.parallel)
        if size != self._runner.buffer.numel():
            self._runner.buffer = torch.empty(size, dtype=torch.uint8, device=self.parallel.device)
        self.forget_trials()
        return self._runner.buffer

    def forget_trials(self) -> None:
        """Try plans again before their steps: there may be less memory."""
        if self._trials is not None:
            self._trials.forget()

    def quiesce(self) -> None:
        """Have nothing prepared or copied of what tasks hold: it is about to move. Every rank calls it."""
        self._runner.read_ahead.forget()
        if self._runner.copied is not None:
            self._runner.copied.wait()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Registered tasks, finished and failed ones included until they are removed."""
        return tuple(self._tasks)

    @property
    def active(self) -> tuple[str, ...]:
        """Tasks that still have steps to do and take part; parked ones one by one, once nobody else is left."""
        going = [name for name, task in self._tasks.items() if task.life.trains]
        return tuple(name for name in going if self._tasks[name].life.state == "running") or tuple(going[:1])

    @property
    def slots(self) -> dict[str, int]:
        """The slot of each registered task: see `RowGroups`."""
        return {name: task.slot for name, task in self._tasks.items()}

    @property
    def states(self) -> Mapping[str, TaskState]:
        """What this rank holds of each registered task."""
        return self._tasks

    def task(self, name: str) -> Task:
        """A registered task."""
        return self._tasks[name].task

    def optimizer(self, name: str) -> TaskOptimizer:
        """A registered task's optimizer on this rank."""
        return self._tasks[name].optimizer

    def progress(self, name: str) -> tuple[int, int, Status]:
        """Steps done, steps in total, status."""
        return (task := self._tasks[name]).step, task.total_steps, task.life.status

    @property
    def plan(self) -> Plan:
        """How the next step is computed; follows from the active tasks and the policy.

        Tasks that share a step are ordered by name, so that the order in which they joined (it differs after a
        resume) does not change a single rounding.
        """
        return self.planning.next(self.loads())

    def check_alone(self, task: Task) -> None:
        """Refuse a task that the memory limit has no room for even if no other trains.

        Raises:
            UserError: Says what would make it fit.
        """
        if self.planning.planner is not None:
            self.planning.planner.check({task.spec.name: self._load_of(task)})

    def has_room(self, tasks: Sequence[Task]) -> bool:
        """Whether the memory limit has room for these tasks beside those that are registered and not over."""
        loads = {name: own.load for name, own in self._tasks.items() if not own.life.is_over}
        loads |= {task.spec.name: self._load_of(task) for task in tasks}
        try:
            if self.planning.planner is not None:
                self.planning.planner.check(loads)
        except UserError:
            return False
        return True

    def _load_of(self, task: Task) -> TaskLoad:
        return TaskLoad.of(task.spec, task.data.lengths, task.data.label_counts, self.backbone.shape)

    def loads(self) -> dict[str, TaskLoad]:
        """The active tasks as the planner sees them."""
        return {name: self._tasks[name].load for name in self.active}

    # -- steps

    def step(self, timer: Timer | None = None) -> dict[str, StepResult]:
        """One optimizer step of every task of the plan.

        Args:
            timer: Called with each action of this stage as it is done, for pictures of the schedule.

        Returns:
            A result per task; empty when no task is active.
        """
        return self.steps(1, timer)[0]

    def steps(self, max_steps: int, timer: Timer | None = None, next_steps: int | None = None) -> Results:
        """Several optimizer steps of every task of the plan, rolling: a task's next begins while others drain.

        Every rank calls it with the same number. A task's steps come out as if they were taken one at a time.

        Args:
            max_steps: Steps to take at the most; fewer if a task finishes or the plan changes.
            timer: See `step`.
            next_steps: The `max_steps` that will follow, for what is prepared ahead; None: as many as are taken now.

        Returns:
            A result per task for each step, at least one; a task that fails is in those up to its failure. A task
            that ran out of memory in a step is in those before it: it takes the step again the next time.

        Raises:
            torch.OutOfMemoryError: This rank ran out of memory where others wait for it: the run cannot go on.
        """
        if not self.active:
            return [{}]
        self.adapters.prepare()
        new = {name: self._tasks[name] for name in self.active if not self._tasks[name].ready}
        if new and (problems := self._forward.compute_references(new)):
            return [{name: self._tasks[name].fail(problem) for name, problem in problems.items()}]
        while True:
            plan = self.planning.begin(self.loads())
            if results := self._runner.run(plan, self._tasks, max_steps, timer, next_steps):
                return results

    def close(self) -> None:
        """End the engine's thread. The engine takes no further steps."""
        self._runner.read_ahead.close()

    @property
    def last_plan(self) -> Plan | None:
        """The plan of the last steps."""
        return self._runner.last_plan

    # -- reading it out

    def evaluate(self, name: str, records: Records | None = None) -> EvalResult | None:
        """Held-out figures of one task, as of `evaluate_together`; None when it has no evaluation data.

        Raises:
            UserError: It could not be evaluated; on every rank, so none waits for another.
        """
        given = {} if records is None else {name: records}
        if isinstance(result := self.evaluate_together([name], given).get(name), UserError):
            raise result
        return result

    def evaluate_together(
        self, names: Sequence[str], records: Mapping[str, Records] | None = None
    ) -> dict[str, EvalResult | UserError]:
        """Held-out figures of tasks whose records share passes. Every rank calls it with the same names.

        Args:
            names: The tasks; those without evaluation data are left out of the result.
            records: Records to evaluate instead of a task's evaluation data.

        Returns:
            By task, its figures; or why it could not be evaluated, which leaves the others alone.
        """
        self.adapters.prepare()
        return self._forward.evaluate({name: self._tasks[name] for name in names}, records or {})

    def generate(self, prompts: Sequence[Prompt], stop: Collection[int]) -> list[Completion]:
        """Continue prompts of registered tasks; see `Generator.generate`. Tokens in `stop` end a sequence."""
        self.adapters.prepare()
        return self._forward.generator(self._tasks, stop).generate(prompts)

    def completions(self, members: Mapping[str, Attached], stop: Collection[int]) -> OpenCompletions:
        """What continues sequences that come and go, with adapters in `adapters`; see `OpenCompletions`."""
        return self._forward.completions(members, stop)

    def copy_states(self, names: Sequence[str], memory: HostMemory) -> dict[str, LocalState]:
        """What this rank holds of tasks' states, copied to host memory as it is now; empty beside the first pipeline.

        On a GPU nobody waits: optimizers do not step before the copies are made.
        """
        copies = self.local_states(names, memory)
        self._runner.copied = memory.copied
        return copies

    def local_states(
        self, names: Sequence[str], memory: HostMemory, owned: bool = True
    ) -> dict[str, LocalState]:
        """As `copy_states`, but optimizers do not wait; with `owned=False`, also what another rank owns."""
        if self.parallel.dp_rank != 0:  # the first pipeline has all of it
            return {}
        tasks = ((name, self._tasks[name]) for name in names)
        states = {name: (task.adapter, task.optimizer, task.step) for name, task in tasks}
        return copy_states(states, memory, owned)

    def snapshot(self, name: str) -> Snapshot | None:
        """A task's whole state on rank 0, None elsewhere. Every rank calls it."""
        state = self.local_states([name], HostMemory(self.parallel.device)).get(name)
        return None if state is None else state.gather(self.parallel, self.parallel.model_group)

    def adapter_tensors(self, name: str) -> dict[str, Tensor] | None:
        """A task's adapter as full tensors by key on rank 0, None elsewhere. Every rank calls it."""
        return None if (state := self.snapshot(name)) is None else state.adapter

    def adapter_config(self, name: str) -> dict[str, Any]:
        """The content of a task's `adapter_config.json`."""
        return (own := self._tasks[name].adapter).spec.config(own.host.shape)  # type: ignore[no-any-return]


def _vocabulary_of(stages: Sequence[Backbone]) -> dict[Place, VocabularyPart] | None:
    """The parts of the embedding and of the output layer in a rank's stages."""
    parts: dict[Place, VocabularyPart] = {}
    for stage in stages:
        if stage.vocabulary_parts is None:
            return None
        parts |= stage.vocabulary_parts
    return parts
