"""Reads `tasks.yaml` and reports all mistakes in it at once, before anything heavy is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from glob import has_magic, iglob
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_mux.errors import UserError
from megatron_mux.section import BASE_DIRECTORY, plain, shown
from megatron_mux.tasks.scheduler import SchedulerSpec, read_scheduler, without_eval
from megatron_mux.tasks.spec import LONGEST_NAME, TaskSpec, problem_of_name
from megatron_mux.tasks.start import with_stored_config
from megatron_mux.tasks.sweep import SECTIONS, Dimension, Range, Settings, Sweep, with_defaults, with_settings
from megatron_mux.tasks.sweep_reading import read_sweep, swept_keys
from megatron_mux.tasks.wording import TASK_KEYS, did_you_mean, sentences
from megatron_mux.tasks.yaml_file import read_yaml

_TOP_LEVEL = ("tasks", "defaults", "scheduler")
_OUTLINE = "`tasks:` and below it a list of tasks, each with name, adapter, data and training"


@dataclass(frozen=True)
class TaskFile:
    """The content of a task file.

    Attributes:
        tasks: In the file's order; of a sweep, its configurations.
        sweeps: By the name of the task that has them.
        scheduler: Compares configurations; None: nobody does.
    """

    tasks: list[TaskSpec]
    sweeps: Mapping[str, Sweep] = field(default_factory=dict)
    scheduler: SchedulerSpec | None = None


def load_task_file(path: str | os.PathLike[str], *, data_later: bool = False) -> list[TaskSpec]:
    """The tasks of a task file; see `read_task_file`."""
    return read_task_file(path, data_later=data_later).tasks


def read_task_file(path: str | os.PathLike[str], *, data_later: bool = False) -> TaskFile:
    """Read and check a task file.

    The top level is `tasks:` with a list, or one task by itself (as for `--mux-watch`). Relative paths in it start
    from its directory and come back absolute. Data files and the adapters to start from must exist; what is in the
    data files is checked when they are opened.

    Args:
        path: The file.
        data_later: Let missing data files pass when nothing else is wrong: whoever opens them then names them together
            with what only shows against the backbone.

    Raises:
        UserError: With one problem per mistake in the file, such as
            `tasks.yaml: task 'movie' (#2): training.learning_rate: must be a number greater than 0, got 'fast'`.
    """
    path = Path(path)
    value, problems = read_yaml(path, _OUTLINE)
    if problems and value is None:
        raise UserError(*problems)
    items, alone = _items(value, path, problems)
    reading = _Reading(Path(os.path.abspath(path)).parent, {} if alone else _defaults(value, path, problems))
    for number, item in enumerate(items, 1):
        where = _where(path, item, None if alone else number)
        reading.add(item, number)
        problems += [f"{where}: {text}" for text in reading.wrong]
        reading.missing += [f"{where}: {text}" for text in reading.gone]
    problems += [f"{path}: defaults: {text}" for text in reading.of_defaults]
    scheduler = None if alone else _scheduler(value, path, reading, problems)
    if problems or (reading.missing and not data_later):
        raise UserError(*dict.fromkeys(problems), *dict.fromkeys(reading.missing))
    return TaskFile(reading.tasks, reading.sweeps, scheduler)


@dataclass
class _Reading:
    """Reads the entries of a task file, one after the other.

    Attributes:
        base: Where relative paths start.
        defaults: Sections that are merged into every entry.
        wrong, gone: Problems of the last entry, and its data files that are missing.
        of_defaults: Problems of the defaults, each once.
        missing: Data files that are missing.
        swept: The sweeps, also wrong ones, and what the file says of each.
    """

    base: Path
    defaults: Mapping[str, Any]
    tasks: list[TaskSpec] = field(default_factory=list)
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    of_defaults: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    swept: list[tuple[Sweep, Any]] = field(default_factory=list)
    _owners: dict[str, str] = field(default_factory=dict)

    def add(self, item: Any, number: int) -> None:
        """Read an entry: a task, or the configurations of its sweep."""
        self.wrong, self.gone = [], []
        if isinstance(item, dict) and "sweep" in item:
            self._add_sweep({key: own for key, own in item.items() if key != "sweep"}, item["sweep"], number)
        else:
            self._add(with_defaults(item, self.defaults), item, f"task #{number}")

    def _add_sweep(self, item: dict[str, Any], swept: Any, number: int) -> None:
        """Read the configurations of a sweep; where a sampler chooses them, the first ones."""
        name = item.get("name")
        if wrong := problem_of_name(name):
            self.wrong.append(f"name: {wrong}")
        elif name in self.sweeps:
            self.wrong.append("name: is that of another sweep: every sweep needs its own")
        sweep, problems = read_sweep(swept, Sweep(str(name), item, self.base, defaults=self.defaults))
        self.wrong += [f"sweep{text}" for text in problems]
        self.swept.append((sweep, swept))
        if not self.wrong:
            self.sweeps[sweep.name] = sweep
            for own, settings in sweep.configurations.items():
                given = with_settings(item, settings)
                self._add(
                    sweep.entry(own, settings), given, f"a configuration of task #{number}", sweep.space
                )
            return
        unread = [text.partition(":")[0].lstrip(".") for text in problems]
        for settings in [*sweep.configurations.values()] or [sweep.example]:
            _, texts, gone = _task(sweep.entry("x", settings), self.base)
            # Without a field that could not be read, nothing can be said of its section as a whole.
            known = [t for t in texts if not any(f"{own}.".startswith(f"{_field(t)}.") for own in unread)]
            self._tell(known, gone, with_settings(item, settings), sweep.space)

    def _add(self, entry: Any, given: Any, owner: str, space: Mapping[str, Dimension] | None = None) -> None:
        """Read a task: its entry, what it gives besides defaults, who it is, and the values of swept fields."""
        task, wrong, gone = _task(entry, self.base)
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str):
            if name in self._owners:
                own = "name:" if space is None else f"name: {name!r}, of a configuration,"
                wrong.append(f"{own} is taken by {self._owners[name]} already: every task needs its own")
            self._owners.setdefault(name, owner)
        self._tell(wrong, gone, given, space or {})
        if task is not None:
            self.tasks.append(task)

    def _tell(
        self, wrong: Iterable[str], gone: Iterable[str], given: Any, space: Mapping[str, Dimension]
    ) -> None:
        """Keep problems of an entry, each once; one with a range once, and not for each value drawn from it."""
        ranges = {key: own.kind for key, own in space.items() if isinstance(own, Range)}
        for text in wrong:
            kind = ranges.get(_field(text), "int_uniform")
            if kind != "int_uniform" and "a whole number" in text:
                text += f" ({kind} draws fractions: use int_uniform)"
            if _is_of(text, self.defaults) and not _is_of(text, given):
                self.of_defaults[text] = None
            elif not any(own == text or (ranges and _cause(own) == _cause(text)) for own in self.wrong):
                self.wrong.append(text)
        self.gone += [text for text in gone if text not in self.gone]


def _field(text: str) -> str:
    """The field that a problem begins with."""
    return text.partition(":")[0]


def _cause(text: str) -> str:
    """A problem without the value that shows it."""
    return text.partition(", got ")[0]


def _is_of(text: str, item: Any) -> bool:
    """Whether a problem, which begins with a field, is of one that an entry gives."""
    section, _, name = _field(text).partition(".")
    own = item.get(section) if isinstance(item, dict) else None
    return isinstance(own, dict) and name.partition("[")[0] in own


def read_task(value: Mapping[str, Any], base: Path) -> TaskSpec:
    """Check a task that is given as plain data, as a task file holds it.

    Args:
        value: The task.
        base: Directory that relative paths start from.

    Raises:
        UserError: With one problem per mistake; missing data files are found when they are opened.
    """
    task, problems, _ = _task(dict(value), base)
    if task is None or problems:
        raise UserError(*(f"task: {text}" for text in problems))
    return task


def configuration(sweep: Sweep, name: str, settings: Settings) -> TaskSpec:
    """The task of a configuration that a sampler has chosen.

    Raises:
        UserError: It is wrong.
    """
    return read_task(sweep.entry(name, settings), sweep.directory)


def _items(value: Any, path: Path, problems: list[str]) -> tuple[list[Any], bool]:
    """Return the tasks in a file's value, and whether it is one task by itself."""
    if isinstance(value, dict) and "tasks" not in value and value.keys() & TaskSpec.model_fields.keys():
        return [value], True
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds {shown(value)}"
        problems.append(f"{path}: {what}: it must hold {_OUTLINE}")
        return [], False
    for key in value:
        if key not in _TOP_LEVEL and not str(key).startswith("x-"):
            near = did_you_mean(str(key), _TOP_LEVEL)
            known = f": {', '.join(_TOP_LEVEL)} belong there, and what begins with x-"
            known = ": it belongs in a task" if key == "sweep" else known
            problems.append(f"{path}: unknown key {str(key)!r} at the top level{near or known}")
    items = value.get("tasks")
    if not isinstance(items, list) or not items:
        if "tasks" in value or not problems:
            problems.append(f"{path}: tasks: must be a list with at least one task, got {shown(items)}")
        return [], False
    return items, False


def _defaults(value: Any, path: Path, problems: list[str]) -> Mapping[str, Any]:
    """The sections that a file has for all of its tasks."""
    defaults = value.get("defaults", {}) if isinstance(value, dict) else {}
    if not isinstance(defaults, dict):
        problems.append(
            f"{path}: defaults: must be a mapping of {', '.join(SECTIONS)}, got {shown(defaults)}"
        )
        return {}
    for key, own in defaults.items():
        if key not in SECTIONS:
            near, known = did_you_mean(str(key), SECTIONS), f": the keys here are {', '.join(SECTIONS)}"
            problems.append(f"{path}: defaults: unknown key {str(key)!r}{near or known}")
        elif not isinstance(own, dict):
            problems.append(f"{path}: defaults: {key}: must be a mapping, got {shown(own)}")
    return {key: own for key, own in defaults.items() if key in SECTIONS and isinstance(own, dict)}


def _scheduler(value: Any, path: Path, reading: _Reading, problems: list[str]) -> SchedulerSpec | None:
    """The scheduler of a file."""
    given = value.get("scheduler") if isinstance(value, dict) else None
    scheduler, wrong = read_scheduler({"type": "none"} if given is None else given)
    problems += [f"{path}: scheduler: {text}" for text in wrong]
    if given is not None and not reading.swept:
        problems.append(f"{path}: scheduler: compares the configurations of a sweep: add sweep to a task")
    metric = given.get("metric", "eval_loss") if isinstance(given, dict) else "eval_loss"
    for sweep, swept in reading.swept:
        is_sampled = isinstance(swept, dict) and swept.get("sampler") is not None
        if given is None and not is_sampled:
            continue
        specs = [spec for spec in reading.tasks if spec.name in sweep.configurations]
        texts: dict[str, None] = {}
        if scheduler is not None:
            texts |= dict.fromkeys(scheduler.problems_of(sweep))
            texts |= dict.fromkeys(text for spec in specs for text in scheduler.problems_with(spec))
        evaluates = any(str(key).startswith("eval.") for key in swept_keys(swept))
        if not specs and not evaluates and sweep.entry("", {}).get("eval") is None:
            texts[without_eval(metric)] = None
        problems += [f"{_where(path, sweep.task, None)}: {text}" for text in texts]
    return None if given is None else scheduler


def _where(path: Path, item: Any, number: int | None) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    label = "task"
    if isinstance(name, str):
        label = f"task {name!r}" if len(name) <= LONGEST_NAME else f"task {shown(name)}"
    return f"{path}: {label}" if number is None else f"{path}: {label} (#{number})"


def _task(item: Any, base: Path) -> tuple[TaskSpec | None, list[str], list[str]]:
    """Return a validated task, its problems, and its data files that are missing."""
    if not isinstance(item, dict):
        return None, [f"must be a mapping of {', '.join(TASK_KEYS)}, got {shown(item)}"], []
    odd = [shown(key) for key in item if not isinstance(key, str)]
    if odd:
        return None, [f"unknown key {key}: put quotes around it if it is meant as text" for key in odd], []
    wrong: list[str] = []
    if isinstance(item.get("adapter"), dict):
        adapter, problems = with_stored_config(item["adapter"], base)
        item = {**item, "adapter": adapter}
        wrong += [f"adapter.{text}" for text in problems]
    task = None
    try:
        task = TaskSpec.model_validate(item, context={BASE_DIRECTORY: base})
    except ValidationError as error:
        wrong += sentences(error, item)
    return task, wrong, _missing_files(_data_paths(item, base))


def _data_paths(item: Mapping[str, Any], base: Path) -> list[tuple[str, Path]]:
    """Return a task's data files. The task may be invalid, so only what looks like a path counts."""
    given: list[tuple[str, Any]] = []
    for section in ("data", "eval"):
        value = item.get(section)
        if isinstance(value, dict):
            given.append((section, value.get("path")))
            mixture = value.get("mixture")
            parts = enumerate(mixture if isinstance(mixture, list) else [])
            given += [
                (f"{section}.mixture[{i}]", part.get("path")) for i, part in parts if isinstance(part, dict)
            ]
    return [
        (f"{section}.path", base / os.path.expanduser(path))
        for section, paths in given
        for path in (paths if isinstance(paths, list) else [paths])
        if isinstance(path, str) and path.strip() and "\0" not in path
    ]


def _missing_files(paths: Iterable[tuple[str, Path]]) -> list[str]:
    missing = []
    for where, path in paths:
        if not os.path.exists(path):
            if not has_magic(str(path)):
                missing.append(f"{where}: no such file: {plain(str(path))}")
            elif next(iglob(str(path), recursive=True), None) is None:
                missing.append(f"{where}: no file matches {plain(str(path))}")
        elif not os.access(path, os.R_OK):
            missing.append(f"{where}: may not be read: {plain(str(path))}")
    return missing
