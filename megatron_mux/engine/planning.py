"""Which plan the next step follows; a new one is made beside the running steps and takes over between two of them.

When tasks join or leave, nobody waits: those that are left go on with the plan they have, newcomers in a hybrid task of
their own, while the planner works in a thread. The new plan takes over after a number of steps that is fixed when the
planner sets out, so that every rank changes at the same step without asking the others, and a resumed run at the same
step as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from megatron_mux.fusion.alignment import Mode
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import Plan, Policy, plan_for

_PLANNING_SECONDS = 2.0
"""What planning takes at most, generously: 64 tasks on 8 stages take a second."""

_MOST_STEPS = 50
"""Steps after which a new plan takes over at the latest, however short they are."""


class MakesPlans(Protocol):
    """The planner, as the engine sees it."""

    @property
    def memory_limit(self) -> float | None:
        """Bytes that a rank may use."""

    def plan(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """A plan for these tasks; the same on every rank."""
        ...

    def check(self, loads: Mapping[str, TaskLoad]) -> None:
        """Refuse tasks that cannot fit into memory with a `UserError`."""
        ...

    def seconds(self, plan: Plan, loads: Mapping[str, TaskLoad]) -> float:
        """Predicted seconds of a step by `plan`."""
        ...


class Planning:
    """The plans of an engine.

    Args:
        policy: Which plans to follow.
        stages: Of the pipeline.
        planner: Makes plans for the policy `auto`.
        micro_batches, chunk, alignment: For the other policies, see `plan_for`.
        given: A plan to begin with, for `auto`: from a file, or of the run that is continued.
    """

    def __init__(
        self,
        policy: Policy,
        stages: int,
        planner: MakesPlans | None = None,
        micro_batches: int | None = None,
        chunk: int | None = None,
        alignment: Mode = "dense",
        given: Plan | None = None,
    ) -> None:
        if policy == "auto" and planner is None:
            raise ValueError("the policy auto needs a planner")
        self.policy = policy
        self.stages = stages
        self.planner = planner
        self.micro_batches = micro_batches
        self.chunk = chunk
        self.alignment: Mode = alignment
        self._plan = given
        self._left = 0 if given is None else given.replan_in
        self._thread: ThreadPoolExecutor | None = None
        self._making: tuple[frozenset[str], Future[Plan]] | None = None

    def next(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """The plan of the next step, without a change to anything.

        Args:
            loads: The tasks that take part, in the order of `serial`.
        """
        if self.policy != "auto":
            names = list(loads) if self.policy == "serial" else sorted(loads)
            accumulation = {name: loads[name].accumulation for name in names}
            return plan_for(
                self.policy, accumulation, self.stages, self.micro_batches, self.chunk, self.alignment
            )
        assert self.planner is not None
        if self._plan is None or not loads:
            return self.planner.plan(loads)
        new = [load for name, load in loads.items() if name not in self._plan.tasks]
        # Until there is a plan for them: as the user asked, or where memory is short one sequence at a time.
        parts = [len(n.tokens) if self.planner.memory_limit else n.accumulation for n in new]
        changed = self._plan.only(loads).with_tasks(list(loads), max(parts, default=1))
        return replace(changed, replan_in=self._left)

    def begin(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """The plan of the step that begins now. Sets the planner to work when the tasks have changed."""
        if self.policy != "auto" or not loads:
            return self.next(loads)
        assert self.planner is not None
        if self._plan is None:
            self._plan = self.planner.plan(loads)
            return self._plan
        names = frozenset(loads)
        if names != frozenset(self._plan.tasks):
            self._plan = replace(self.next(loads), replan_in=0)
            self._left = self._steps_to_plan(self._plan, loads)
            self._making = None  # for tasks of the past
        if self._left and self._making is None:
            self._making = names, self._start(loads)
        if self._left:
            self._left -= 1
            if not self._left:
                self._take_over()
        return self._plan

    def _take_over(self) -> None:
        assert self._making is not None
        self._plan = self._making[1].result()
        self._making = None

    def _start(self, loads: Mapping[str, TaskLoad]) -> Future[Plan]:
        assert self.planner is not None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "planner")
        return self._thread.submit(self.planner.plan, dict(loads))

    def _steps_to_plan(self, plan: Plan, loads: Mapping[str, TaskLoad]) -> int:
        """How many steps planning is given: by predicted seconds, which are the same on every rank."""
        assert self.planner is not None
        seconds = self.planner.seconds(plan, loads)
        steps = _MOST_STEPS if seconds <= 0 else math.ceil(_PLANNING_SECONDS / seconds)
        return 1 + min(max(steps, 1), _MOST_STEPS)
