"""Runs sweeps: configurations are compared, the worse ones stop, a sampler chooses more, and a leaderboard is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.engine import EvalResult
from megatron_mux.engine.agreement import computed_by_first
from megatron_mux.errors import UserError
from megatron_mux.files import write_atomically
from megatron_mux.saved_files import CURVES, DECISIONS, RESULTS
from megatron_mux.sweep.halving import Halving
from megatron_mux.sweep.leaderboard import Row, best_lines, ranked, table, to_csv
from megatron_mux.sweep.median import MedianStopping
from megatron_mux.sweep.scheduler import Configuration, Decision, Scheduler, State, comparable
from megatron_mux.tasks import TaskFile, TaskSpec
from megatron_mux.tasks.files import configuration
from megatron_mux.tasks.life import StateChange
from megatron_mux.tasks.sampler import Trial, ask
from megatron_mux.tasks.scheduler import SchedulerSpec
from megatron_mux.tasks.sweep import Settings, Sweep
from megatron_mux.training.callback import Callback
from megatron_mux.training.commands import Add, Command, Prune, Resume
from megatron_mux.training.task_registry import TaskRegistry

_SECONDS_BETWEEN_CURVES = 60.0
_FAILED = ("failed", "refused", "removed")


def make_scheduler(spec: SchedulerSpec | None) -> Scheduler | None:
    """What a task file asks for; None: every configuration trains in full."""
    if spec is None or spec.type == "none":
        return None
    if spec.type == "median":
        return MedianStopping(spec.min_steps or 1)
    assert spec.min_steps is not None
    return Halving(spec.min_steps, spec.factor)


def check_sweeps(file: TaskFile, saves: bool) -> None:
    """Refuse to stop configurations, or to sample them, in a run that saves nothing.

    Raises:
        UserError: Says what needs a directory.
    """
    if saves:
        return
    if make_scheduler(file.scheduler) is not None:
        raise UserError("scheduler: what it stops is kept on disk: use --save DIR")
    sampled = [sweep.name for sweep in file.sweeps.values() if sweep.sampler is not None]
    if sampled:
        raise UserError(f"sweep.sampler of {', '.join(sampled)}: trials are kept on disk: use --save DIR")


def with_saved_trials(file: TaskFile, manifest: Manifest | None) -> TaskFile:
    """A task file with the configurations that samplers have chosen in the run that is continued."""
    sweeps, tasks = dict(file.sweeps), list(file.tasks)
    for entry in manifest.tasks if manifest is not None else ():
        sweep = sweeps.get(entry.sweep)
        if sweep is None or sweep.sampler is None or entry.name in sweep.configurations:
            continue
        configurations = {**sweep.configurations, entry.name: entry.settings}
        sweeps[entry.sweep] = replace(sweep, configurations=configurations)
        tasks.append(TaskSpec.model_validate(entry.spec))
    return replace(file, sweeps=sweeps, tasks=tasks)


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
    backbone: str
    directory: Path | None
    check: Callable[[], None]
    awaited: str = ""
    scheduler: Scheduler | None = field(init=False)
    sweeps: dict[str, Sweep] = field(init=False)
    _spec: SchedulerSpec = field(init=False)
    _sweep_of: dict[str, str] = field(init=False)
    _arrived: set[str] = field(default_factory=set)
    _decided: dict[str, State] = field(default_factory=dict)  # in this poll, before it is followed
    _is_due: bool = True
    _is_first_poll: bool = True
    _drawn: float = -math.inf

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.file.scheduler)
        self.sweeps = dict(self.file.sweeps)
        self._spec = self.file.scheduler or SchedulerSpec(type="none")
        self._sweep_of = {name: own.name for own in self.sweeps.values() for name in own.configurations}
        sampled = any(own.sampler is not None for own in self.sweeps.values())
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
        if step and name in self._sweep_of and value is not None:
            self.registry.entries[name].evaluations[step] = value if math.isfinite(value) else None
            self._arrived.add(name)

    def state_changed(self, change: StateChange) -> None:
        """Have it decided about the others when a configuration ends, also if it never began."""
        if change.name in self._sweep_of and self.registry.lives[change.name].is_over:
            self._is_due = True

    def before_save(self) -> None:
        """Have entries say which sweep they are of."""
        for name, sweep in self._sweep_of.items():
            if name in self.registry.entries:
                entry = self.registry.entries[name]
                entry.sweep, entry.settings = sweep, dict(self.sweeps[sweep].configurations[name])

    def close(self) -> None:
        """Print the leaderboard."""
        if not any(row.steps for rows in self._rows().values() for row in rows):
            return
        self._write_results(is_last=True)
        reporter, metric = self.registry.reporter, self._metric
        for sweep, rows in self._rows().items():
            title = f"{sweep}: {len(rows)} configurations, best first"
            reporter.at_end.append(table(title, rows, metric))
            root = self.directory or Path()
            reporter.at_end += best_lines(rows[0], metric, root, self.backbone)
        if self.directory is not None:
            reporter.at_end.append(f"all of them: {self.directory / RESULTS}, {self.directory / CURVES}")

    # -- as a source of commands

    def poll(self) -> Sequence[Command]:
        """Decide about those that have been evaluated since the last call. Every rank calls it.

        Here and not when they are evaluated: a run that stops in between decides once it is continued.
        """
        if self._is_first_poll:
            self._is_first_poll = False
            entries = self.registry.entries.values()
            self._arrived |= {
                own.name for own in entries if own.evaluations and max(own.evaluations) == own.step
            }
        if not (self._arrived or self._is_due):
            return []
        self._decided.clear()
        commands = [*self._decisions(), *self._chosen()]
        self._write_results()
        return commands

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
                task = sweep.name_of(settings, self._sweep_of)
                sweep = self.sweeps[name] = replace(
                    sweep, configurations={**sweep.configurations, task: settings}
                )
                self._sweep_of[task] = name
                self._say({"task": task, "decision": "begin", "reason": "the sampler chose it"})
                yield Add([configuration(sweep, task, settings)])

    def _trials(self, sweep: Sweep) -> list[Trial]:
        """The configurations of a sweep as its sampler knows them."""
        trials: list[Trial] = []
        for name, settings in sweep.configurations.items():
            entry, state = self.registry.entries.get(name), self._state(name)
            values = {} if entry is None else {k: v for k, v in entry.evaluations.items() if v is not None}
            if state == "over":
                failed = self.registry.lives[name].state in _FAILED
                trials.append(Trial(settings, values, "failed" if failed else "complete"))
            else:
                trials.append(Trial(settings, values, "pruned" if state == "pruned" else "running"))
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
            for decision in self.scheduler.decide(known, arrived, more):
                self._note(decision)
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
            for step, value in entry.evaluations.items()
        }
        total = (
            self.registry.reporter.history[name].total_steps if name in self.registry.reporter.history else 0
        )
        return Configuration(name, total or 0, values, self._state(name))

    def _state(self, name: str) -> State:
        life = self.registry.lives.get(name)
        if life is not None and life.is_over:
            return "over"
        now: State = "pruned" if life is not None and life.state == "pruned" else "open"
        return self._decided.get(name, now)

    def _note(self, decision: Decision) -> None:
        """Say a decision, and add it to the run's log."""
        what = "stops" if decision.action == "prune" else "goes on"
        self._say({"task": decision.name, "decision": decision.action, "reason": decision.reason}, what)

    def _say(self, line: Mapping[str, str], what: str = "begins") -> None:
        name, reporter = line["task"], self.registry.reporter
        entry = self.registry.entries.get(name)
        step = max(entry.evaluations, default=0) if entry is not None else 0
        reporter.say(f"{name} {what}: {line['reason']}")
        reporter.append(DECISIONS, {"steps": {name: step}, **line})

    # -- results

    @property
    def _metric(self) -> str:
        """The deciding figure as files name it; the training loss where nothing is evaluated."""
        evaluated = any(entry.evaluations for entry in self.registry.entries.values())
        return f"eval_{self._spec.figure}" if evaluated else "loss"

    def _rows(self) -> dict[str, list[Row]]:
        """The rows of each sweep, best first; of the training loss where nothing is evaluated."""
        greater = self._spec.is_greater_better and self._metric != "loss"
        return {
            name: ranked([self._row(*own) for own in sweep.configurations.items()], greater)
            for name, sweep in self.sweeps.items()
        }

    def _row(self, name: str, settings: Settings) -> Row:
        entry, history = self.registry.entries.get(name), self.registry.reporter.history.get(name)
        if entry is None or history is None:
            return Row(name, settings, None, 0, 0, history.status if history is not None else "waiting")
        step = max(entry.evaluations, default=0)
        value = entry.evaluations.get(step) if self._metric != "loss" else history.loss
        return Row(
            name, settings, value, step or history.step, history.step, history.status, history.reason, entry.checkpoint
        )  # fmt: skip

    def _write_results(self, is_last: bool = False) -> None:
        """Write `results.csv`, and now and then `curves.svg`."""
        directory = self.registry.reporter.directory
        if directory is None:
            return
        self.check()
        rows = self._rows()
        try:
            write_atomically(directory / RESULTS, to_csv(rows, self._metric))
            if is_last or time.monotonic() - self._drawn >= _SECONDS_BETWEEN_CURVES:
                from megatron_mux.sweep.curves import draw

                write_atomically(directory / CURVES, draw(directory, rows, self._metric))
                self._drawn = time.monotonic()
        except OSError as error:
            self.registry.reporter.note(f"--save {directory}: could not write the results of sweeps", error)
