"""Chooses the plan of the next step; new plans are made in a thread while steps run, and take over between two steps.

When tasks join or leave, nobody waits: the remaining tasks keep their plan, and newcomers train in a hybrid task of
their own until the planner is done. The new plan takes over after a number of steps that is fixed when planning begins,
so that every rank changes at the same step, and a resumed run at the same step as an uninterrupted one. One rank plans
for all, since rounding could make plans differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from megatron_mux.backbone.split import Split
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Mode
from megatron_mux.fusion.plan import Plan, Policy, add_tasks, keep_tasks, plan_for
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.schedules import Schedule
from megatron_mux.kernels.low_rank.choice import KernelChoice
from megatron_mux.kernels.pointwise.choice import PointwiseName
from megatron_mux.memory.forms.method import Recompute

_LEAST_SECONDS = 0.5
_SECONDS_A_TASK_AND_STAGE = 0.004
"""Time that planning may take while steps run: twice what it usually does, and more for few tasks."""

_MOST_STEPS = 50
"""Most steps before a new plan takes over, however short they are."""


_FOREVER = 1 << 30
"""More steps than any run takes."""


@dataclass(eq=False)
class Planning:
    """Chooses an engine's plans.

    Args:
        policy: `serial`, `temporal`, `spatial` or `auto`.
        stages: Of the pipeline, virtual ones included.
        planner: Makes plans for the policy `auto`; None: `given` is for all tasks that will come.
        micro_batches, chunk, alignment: For the other policies, see `plan_for`.
        given: A plan to begin with, for `auto`: from a file, or of the run that is continued.
        leads: Whether this rank makes the plans for all ranks.
        virtual: Stages of each rank.
        split: Layers of each stage; empty: as even as possible.
        schedule: See `Plan`.
        kernels, pointwise: See `Plan`; the same in all plans of a run.
        share: Broadcasts from the rank that leads; every rank calls it between the same two steps.

    Attributes:
        log_lines: Changes of the plan to report; whoever reports them empties it.
    """

    policy: Policy
    stages: int
    planner: Planner | None = None
    micro_batches: int | None = None
    chunk: int | None = None
    alignment: Mode = "dense"
    given: InitVar[Plan | None] = None
    leads: bool = True
    share: Callable[[Any], Any] = lambda what: what
    virtual: int = 1
    split: Split = ()
    schedule: Schedule = "planned"
    kernels: KernelChoice = ()
    pointwise: PointwiseName | None = None
    log_lines: list[str] = field(default_factory=list, init=False)
    _left: int = field(default=0, init=False)  # steps to the first of the coming plan, that one included
    _plan: Plan | None = field(default=None, init=False)
    _relieved: Plan | None = field(default=None, init=False)
    _thread: ThreadPoolExecutor | None = field(default=None, init=False)
    _making: Future[Plan] | None = field(default=None, init=False)

    def __post_init__(self, given: Plan | None) -> None:
        if self.policy == "auto" and self.planner is None and given is None:
            raise ValueError("the policy auto needs a planner or a plan")
        if given is not None:
            self._plan, self._left = given, given.replan_in

    @property
    def recompute(self) -> Recompute:
        """What plans assume to be recomputed in the backward pass."""
        return "none" if self.planner is None else self.planner.context.recompute

    def next(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """The plan that the next step would follow: a continued run goes on with it. Changes nothing.

        Args:
            loads: The tasks that take part, in the order of `serial`.
        """
        if self.policy != "auto":
            names = list(loads) if self.policy == "serial" else sorted(loads)
            accumulation = {name: loads[name].accumulation for name in names}
            plan = plan_for(
                self.policy, accumulation, self.stages, self.micro_batches, self.chunk, self.alignment
            )
            if self._relieved is not None and set(self._relieved.tasks) == set(plan.tasks):
                return self._relieved
            return replace(
                plan,
                virtual=self.virtual,
                split=self.split,
                schedule=self.schedule,
                kernels=self.kernels,
                pointwise=self.pointwise,
            )
        if self._plan is None or not loads:
            assert self.planner is not None
            return self.planner.plan(loads)
        plan, left = self._interim(self._plan, loads)
        return replace(plan, replan_in=left)

    def begin(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """The plan of the step that begins now; starts the planner if tasks have changed. Every rank calls it."""
        if self.policy != "auto" or not loads:
            return self.next(loads)
        if self._plan is None:
            assert self.planner is not None
            self._plan = self.share(self.planner.plan(loads))
        elif frozenset(loads) != frozenset(self._plan.tasks):
            self._plan, self._left = self.share(self._interim(self._plan, loads))
            if self._making is not None:
                self._making.cancel()  # it was for tasks of the past
                self._making = None
        if self._left and self._making is None and self.leads:
            self._making = self._start(loads)
        if self._left == 1:
            self._left = 0
            self._take_over()
        return self._plan

    @property
    def steps_left(self) -> int:
        """Number of steps for which the plan that `begin` returned stays valid unless a task joins or leaves."""
        return self._left - 1 if self._left else _FOREVER

    def count(self, steps: int) -> None:
        """Count steps that were taken of the plan that `begin` returned; at most `steps_left`."""
        if self._left:
            self._left -= steps

    def fall_back_to(self, plan: Plan) -> None:
        """Follow this plan, while its tasks take part, instead of one that ran out of memory; every rank calls it."""
        if self.policy == "auto":
            self._plan = plan
        else:
            self._relieved = plan

    def _interim(self, plan: Plan, loads: Mapping[str, TaskLoad]) -> tuple[Plan, int]:
        """The plan until the planner is done, and for how many steps, the coming one included.

        Raises:
            UserError: None keeps to the limit of memory.
        """
        if frozenset(loads) == frozenset(plan.tasks):
            return plan, self._left
        assert self.planner is not None
        new = [load for name, load in loads.items() if name not in plan.tasks]
        for buckets in self._ways_to_take_in(keep_tasks(plan, loads), new, loads):
            plan = self.planner.priced(buckets, loads)
            if self.planner.fits(plan):
                break
        else:
            self.planner.refuse(plan, loads)
        planning = _LEAST_SECONDS + len(loads) * self.stages * _SECONDS_A_TASK_AND_STAGE
        steps = math.ceil(planning / plan.predicted_latency_s) if plan.predicted_latency_s else _MOST_STEPS
        return replace(plan, replan_in=0), 1 + min(max(steps, 1), _MOST_STEPS)

    def _ways_to_take_in(
        self, plan: Plan, new: Sequence[TaskLoad], loads: Mapping[str, TaskLoad]
    ) -> Iterator[Plan]:
        """Plans with newcomers, each taking less memory than the one before: accumulation as asked for, newcomers one
        record at a time, all tasks one record at a time.
        """
        yield add_tasks(plan, list(loads), max((n.accumulation for n in new), default=1))
        yield add_tasks(plan, list(loads), max((n.records for n in new), default=1))
        most = {name: load.records for name, load in loads.items()}
        alone = plan_for("temporal", most, self.stages, max(most.values()), None, plan.alignment)
        yield replace(plan, buckets=alone.buckets)

    def _take_over(self) -> None:
        """Switch every rank to the new plan; keep the old one if planning failed."""
        made: tuple[Plan | None, str] = (None, "")
        if self._making is not None:
            try:
                made = self._making.result(), ""
            except UserError as error:
                made = None, str(error)
            self._making = None
        plan, problem = self.share(made)
        if plan is not None:
            self._plan = plan
            self.log_lines.append(f"new {plan}")
        else:
            self.log_lines.append(f"planning failed, keeping the old plan: {problem}")

    def _start(self, loads: Mapping[str, TaskLoad]) -> Future[Plan]:
        assert self.planner is not None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "planner")
        return self._thread.submit(self.planner.plan, dict(loads))
