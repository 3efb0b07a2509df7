"""Admission: which tasks may train now. The others wait for one to leave, or are refused before they harm anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from megatron_mux.engine import Engine, Task
from megatron_mux.engine.agreement import first_problem
from megatron_mux.errors import UserError
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec


class Admission:
    """Takes tasks in as long as memory is predicted to have room, first come first served.

    Nobody overtakes: a large task that waits would wait for ever behind small ones.

    Args:
        engine: Trains those that are taken in.
        parallel: Where this rank stands; all ranks decide alike.

    Attributes:
        waiting: Tasks that there is no room for yet, in the order in which they came.
    """

    def __init__(self, engine: Engine, parallel: Parallel) -> None:
        self.engine = engine
        self.parallel = parallel
        self.waiting: list[Task] = []
        self._full_with: tuple[str, ...] | None = None

    def offer(self, tasks: Sequence[Task], first: bool = False) -> list[Task]:
        """Tasks come; returns those to train from now on, earlier ones that waited among them.

        Every rank calls it with the same tasks; those that come `first` go before all that wait.
        """
        if first or not self.waiting:
            self._full_with = None  # nobody of these has asked for room yet
        self.waiting = [*tasks, *self.waiting] if first else [*self.waiting, *tasks]
        return self.next()

    def next(self) -> list[Task]:
        """Those for which there is room now. Every rank calls it; nothing is done until tasks have left."""
        taken: list[Task] = []
        if not self.waiting or self.engine.active == self._full_with:
            return taken
        while self.waiting and self._has_room([*taken, self.waiting[0]]):
            taken.append(self.waiting.pop(0))
        self._full_with = (*self.engine.active, *(task.spec.name for task in taken))
        return taken

    def withdraw(self, name: str) -> Task | None:
        """Take a task out before its turn has come; returns it, None if it was not waiting."""
        found = next((task for task in self.waiting if task.spec.name == name), None)
        self.waiting = [task for task in self.waiting if task.spec.name != name]
        self._full_with = None  # whoever is behind it may need less
        return found

    def prepare(self, specs: Sequence[TaskSpec]) -> Future[None] | None:
        """Predict in the background what memory tasks will take that are going to be offered. Every rank calls it.

        Returns:
            See `Planner.prepare`.
        """
        planner = self.engine.planning.planner
        if planner is None:
            return None
        return planner.prepare(self.engine.loads(), [*(task.spec for task in self.waiting), *specs])

    def _has_room(self, tasks: Sequence[Task]) -> bool:
        if len(tasks) == 1 and not self.engine.active:
            return True  # one that could not train alone was refused
        problem = "" if self.engine.has_room(tasks) else "there is no room"
        return not first_problem(problem, self.parallel)


def first_tasks(planner: Planner, loads: Mapping[str, TaskLoad]) -> dict[str, TaskLoad]:
    """Of tasks that come before any trains, those that will be taken in.

    Raises:
        UserError: Some could not train even alone; says which, and what would make them fit.
    """

    def problems(those: Mapping[str, TaskLoad]) -> list[str]:
        try:
            planner.check(those)
        except UserError as error:
            return list(error.problems)
        return []

    alone = [problem for name, load in loads.items() for problem in problems({name: load})]
    if alone:
        raise UserError(*dict.fromkeys(alone))
    taken: dict[str, TaskLoad] = {}
    for name, load in loads.items():
        if taken and problems({**taken, name: load}):
            break
        taken[name] = load
    return taken
