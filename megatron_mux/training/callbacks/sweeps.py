"""Runs sweeps: configurations are compared, the worse ones stop, a sampler chooses more, and a leaderboard is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import EvalResult
from megatron_mux.engine.agreement import computed_by_first
from megatron_mux.errors import UserError
from megatron_mux.saved_files import DECISIONS
from megatron_mux.sweep.leaderboard import FAILED
from megatron_mux.sweep.scheduler import Configuration, Scheduler, State, comparable
from megatron_mux.tasks import TaskFile, TaskSpec
from megatron_mux.tasks.files import configuration
from megatron_mux.tasks.life import StateChange
from megatron_mux.tasks.sampler import Trial, ask
from megatron_mux.tasks.scheduler import SchedulerSpec
from megatron_mux.tasks.sweep import Sweep
from megatron_mux.training.callback import Callback
from megatron_mux.training.callbacks.sweep_results import SweepResults
from megatron_mux.training.commands import Add, Command, Prune, Resume
from megatron_mux.training.sweep_setup import make_scheduler
from megatron_mux.training.task_registry import TaskRegistry

_OF_TRIALS: Mapping[State, Literal["running", "complete", "pruned", "failed"]] = {
    "open": "running",
    "pruned": "pruned",
    "over": "complete",
    "failed": "failed",
}
_WORDS = {"prune": "stops", "resume": "goes on", "begin": "begins"}


@dataclass(eq=False)
class Sweeps(Callback):
    """Compares configurations, and tells the run who stops, who goes on and who comes: it is a source of commands, too.

    All that it decides by is in the entries of tasks, which saves hold: a run that is continued decides alike. Every
    rank has the same figures and decides by itself.

    Attributes:
        registry: The tasks of the run.
        file: The task file.
        backbone: For the line of code that loads the best adapter.
        directory: Of the run; None: nothing is saved.
        check: Raises a `UserError` if another run took the directory over.
    """

    registry: TaskRegistry
    file: TaskFile
    backbone: InitVar[str]
    directory: InitVar[Path | None]
    check: InitVar[Callable[[], None]]
    awaited: str = ""
    scheduler: Scheduler | None = field(init=False)
    sweeps: dict[str, Sweep] = field(init=False)
    _spec: SchedulerSpec = field(init=False)
    _sweep_of: dict[str, str] = field(init=False)
    _arrived: set[str] = field(default_factory=set)
    _decided: dict[str, State] = field(default_factory=dict)  # in this poll, before it is followed
    _is_due: bool = True
    _is_first_poll: bool = True
    _results: SweepResults = field(init=False)

    def __post_init__(self, backbone: str, directory: Path | None, check: Callable[[], None]) -> None:
        self.scheduler = make_scheduler(self.file.scheduler)
        self.sweeps = dict(self.file.sweeps)
        self._spec = self.file.scheduler or SchedulerSpec(type="none")
        self._results = SweepResults(self.registry, self.sweeps, self._spec, backbone, directory, check)
        self._sweep_of = {name: own.name for own in self.sweeps.values() for name in own.configurations}
        sampled = any(own.sampler is not None for own in self.sweeps.values())
        self.registry.reporter.sweep_of = self._sweep_of
        for sweep in self.sweeps.values():
            self.registry.reporter.swept.update(sweep.configurations)
        # Decisions depend on who is where: a resume has to have all tasks at one moment.
        self.registry.saves_together = self.scheduler is not None or sampled
        self.registry.held = self._sweep_of if self.scheduler is not None else ()

    # -- as a callback

    def intervals(self, name: str) -> Iterable[int]:
        """Yield the distance of the scheduler's decisions."""
        if self.scheduler is not None and name in self._sweep_of and self.scheduler.interval:
            yield self.scheduler.interval

    def evaluation_steps(self, name: str) -> Collection[int]:
        """After how many steps the scheduler compares a configuration."""
        if self.scheduler is None or name not in self._sweep_of:
            return ()
        return self.scheduler.evaluation_steps(self.registry.engine.progress(name)[1])

    def evaluated(self, name: str, step: int, result: EvalResult) -> None:
        """Keep the deciding figure of a configuration."""
        value = result.values.get(self._spec.figure)
        if step and name in self._sweep_of:
            own = self.registry.entries[name].configuration
            own.evaluations[step] = value if value is not None and math.isfinite(value) else None
            own.figure, own.mode = self._spec.figure, self._spec.mode
            self._arrived.add(name)

    def state_changed(self, change: StateChange) -> None:
        """Have it decided about the others when a configuration ends, also if it never began."""
        if change.name in self._sweep_of and self.registry.lives[change.name].is_over:
            self._is_due = True

    def before_save(self) -> None:
        """Have entries say which sweep they are of, and which of them were refused: samplers choose by these, too."""
        for name, sweep in self._sweep_of.items():
            entry, life = self.registry.entries.get(name), self.registry.lives.get(name)
            if entry is None:
                continue
            own = entry.configuration
            own.sweep, own.settings = sweep, dict(self.sweeps[sweep].configurations[name])
            if life is not None and life.state == "refused":
                entry.status, entry.reason = "refused", life.reason

    def close(self) -> None:
        """Print the leaderboard of a run that has begun."""
        if not self._is_first_poll:
            self._results.finish()

    # -- as a source of commands

    def poll(self) -> Sequence[Command]:
        """Decide about those that have been evaluated since the last call. Every rank calls it.

        Here and not when they are evaluated: a run that stops in between decides once it is continued.
        """
        if self._is_first_poll:
            self._is_first_poll = False
            self._begin()
        if not self.undecided:
            return []
        self._decided.clear()
        commands = [*self._decisions(), *self._chosen()]
        self._results.write()
        return commands

    @property
    def undecided(self) -> bool:  # type: ignore[override]
        """Whether something has happened since the last poll."""
        return bool(self._arrived) or self._is_due

    def _begin(self) -> None:
        """Take up what the run that is continued had not decided yet; give trials that wait their entries."""
        for name, entry in self.registry.entries.items():
            own = entry.configuration
            if entry.status == "refused" and name in self._sweep_of and name not in self.registry.lives:
                self._refuse(name, entry.reason)
            if own.evaluations and own.decided < max(own.evaluations) == entry.step:
                self._arrived.add(name)
        for sweep in self.sweeps.values():
            for spec in self.file.tasks if sweep.sampler is not None else ():
                if spec.name in sweep.configurations:
                    self._enter(spec.name, spec)

    def _enter(self, name: str, spec: TaskSpec | None) -> None:
        """Have saves know a trial before it trains: what a sampler chooses depends on all that it has chosen."""
        entry = SavedTask(name, 0, "running", "", "", {} if spec is None else spec.plain(), "")
        self.registry.entries.setdefault(name, entry)
        self.registry.saved.setdefault(name, entry)

    def _refuse(self, name: str, reason: str) -> None:
        """Count a configuration that cannot be a task as refused."""
        self.registry.lives.begin(name, "joining").end("refused", reason)
        self.registry.reporter.say(f"{name} refused: {reason}")

    def _chosen(self) -> Iterator[Command]:
        """Yield the configurations that samplers choose now."""
        for name, sweep in list(self.sweeps.items()):
            while (sampler := sweep.sampler) is not None:
                trials = self._trials(sweep)
                open_now = sum(trial.state == "running" for trial in trials)
                if len(trials) >= sampler.trials or open_now >= sampler.at_once:
                    break
                choose = partial(ask, sweep, trials, self._spec.is_greater_better)
                settings = computed_by_first(choose, self.registry.parallel)
                taken = {*self._sweep_of, *self.registry.lives, *self.registry.entries}
                task = sweep.name_of(settings, taken)
                sweep = self.sweeps[name] = replace(
                    sweep, configurations={**sweep.configurations, task: settings}
                )
                self._sweep_of[task] = name
                self.registry.reporter.swept[task] = settings
                try:
                    spec = configuration(sweep, task, settings)
                except UserError as error:
                    self._enter(task, None)
                    self._refuse(task, str(error))
                    continue
                self._enter(task, spec)
                self._say(task, "begin", "the sampler chose it")
                yield Add([spec])

    def _trials(self, sweep: Sweep) -> list[Trial]:
        """The configurations of a sweep as its sampler knows them."""
        trials: list[Trial] = []
        for name, settings in sweep.configurations.items():
            entry, state = self.registry.entries.get(name), self._state(name)
            values = {} if entry is None else dict(entry.configuration.evaluations)
            trials.append(Trial(settings, values, _OF_TRIALS[state]))
        return trials

    # -- decisions

    def _decisions(self) -> Iterator[Command]:
        """Yield what the scheduler decides."""
        arrived, self._arrived, self._is_due = self._arrived, set(), False
        if self.scheduler is None:
            return
        reasons: dict[str, str] = {}
        resumed: list[str] = []
        for sweep in self.sweeps.values():
            known = [self._configuration(name) for name in sweep.configurations]
            more = sweep.sampler is not None and len(known) < sweep.sampler.trials
            for name in arrived & sweep.configurations.keys():
                self.registry.entries[name].configuration.decided = max(
                    self.registry.entries[name].configuration.evaluations
                )
            for decision in self.scheduler.decide(known, arrived, more):
                self._say(decision.name, decision.action, decision.reason)
                self._decided[decision.name] = "pruned" if decision.action == "prune" else "open"
                if decision.action == "prune":
                    reasons[decision.name] = decision.reason
                else:
                    resumed.append(decision.name)
        if reasons:
            yield Prune(reasons)
        yield from map(Resume, resumed)

    def _configuration(self, name: str) -> Configuration:
        """A configuration as the scheduler sees it."""
        entry = self.registry.entries.get(name) or SavedTask(name, 0, "running", "", "", {}, "")
        sign = -1.0 if self._spec.is_greater_better else 1.0
        values = {
            step: comparable(None if value is None else sign * value)
            for step, value in entry.configuration.evaluations.items()
        }
        total = (
            self.registry.reporter.history[name].total_steps if name in self.registry.reporter.history else 0
        )
        return Configuration(name, total or 0, values, self._state(name))

    def _state(self, name: str) -> State:
        life = self.registry.lives.get(name)
        if life is not None and life.is_over:
            return "failed" if life.state in FAILED else "over"
        now: State = "pruned" if life is not None and life.state == "pruned" else "open"
        return self._decided.get(name, now)

    def _say(self, name: str, decision: str, reason: str) -> None:
        """Say a decision, and add it to the run's log."""
        reporter, own = self.registry.reporter, self.registry.entries[name].configuration
        own.decisions += 1
        reporter.say(f"{name} {_WORDS[decision]}: {reason}")
        step = max(own.evaluations, default=0)
        line = {"sweep": self._sweep_of[name], "task": name, "number": own.decisions, "decision": decision}
        figure = {f"eval_{self._spec.figure}": own.evaluations.get(step)}
        reporter.append(DECISIONS, line | {"step": step} | figure | {"reason": reason})
