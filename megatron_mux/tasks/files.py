"""Reads `tasks.yaml` and reports all mistakes in it at once, before anything heavy is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from glob import has_magic, iglob
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_mux.errors import UserError
from megatron_mux.section import BASE_DIRECTORY, plain, shown
from megatron_mux.tasks.sampler import first_trials
from megatron_mux.tasks.scheduler import SchedulerSpec
from megatron_mux.tasks.spec import LONGEST_NAME, TaskSpec, problem_of_name
from megatron_mux.tasks.start import with_stored_config
from megatron_mux.tasks.sweep import SECTIONS, Settings, Sweep, read_sweep
from megatron_mux.tasks.wording import did_you_mean, sentences

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
    value, problems = _read_yaml(path)
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
    """

    base: Path
    defaults: Mapping[str, Any]
    tasks: list[TaskSpec] = field(default_factory=list)
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    of_defaults: dict[str, None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    _first: dict[str, int] = field(default_factory=dict)

    def add(self, item: Any, number: int) -> None:
        """Read an entry: a task, or the configurations of its sweep."""
        self.wrong, self.gone = [], []
        if isinstance(item, dict) and "sweep" in item:
            for configuration in self._configurations(dict(item)):
                self._add(configuration, item, number)
        else:
            self._add(with_defaults(item, self.defaults), item, number)

    def _configurations(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """The entries of a sweep's configurations; where a sampler chooses them, of the first ones."""
        swept, name = item.pop("sweep"), item.get("name")
        task = with_defaults(item, self.defaults)
        if wrong := problem_of_name(name):
            self.wrong.append(f"name: {wrong}")
        elif name in self.sweeps:
            self.wrong.append("name: is that of another sweep: every sweep needs its own")
        sweep, problems = read_sweep(swept, str(name), task, self.base)
        self.wrong += [f"sweep{text}" for text in problems]
        if self.wrong:
            return []
        if sweep is None:
            return []
        if sweep.sampler is not None:
            sweep = first_trials(sweep)
        self.sweeps[sweep.name] = sweep
        return [sweep.entry(name, own) for name, own in sweep.configurations.items()]

    def _add(self, entry: Any, item: Any, number: int) -> None:
        task, wrong, gone = _task(entry, self.base)
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str):
            if name in self._first:
                wrong.append(f"name: is taken by task #{self._first[name]} already: every task needs its own")
            self._first.setdefault(name, number)
        for text in wrong:
            if _is_of(text, self.defaults) and not _is_of(text, item):
                self.of_defaults[text] = None
            elif text not in self.wrong:
                self.wrong.append(text)
        self.gone += [text for text in gone if text not in self.gone]
        if task is not None:
            self.tasks.append(task)


def _is_of(text: str, item: Any) -> bool:
    """Whether a problem, which begins with a field, is of one that an entry gives."""
    section, _, name = text.partition(":")[0].partition(".")
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


def with_defaults(item: Any, defaults: Mapping[str, Any]) -> Any:
    """An entry with the fields of the defaults that it does not give.

    Of another kind of adapter than the defaults' nothing is merged into `adapter`; a section that is given as nothing
    stays so.
    """
    if not isinstance(item, dict):
        return item
    merged = dict(item)
    for section, fields in defaults.items():
        own = item.get(section, {})
        kinds = [given.get("peft_type") for given in (own, fields) if isinstance(given, dict)]
        if not isinstance(own, dict) or (
            section == "adapter" and None not in kinds and kinds[0] != kinds[-1]
        ):
            continue
        merged[section] = {**fields, **own}
    return merged


def _scheduler(value: Any, path: Path, reading: _Reading, problems: list[str]) -> SchedulerSpec | None:
    """The scheduler of a file."""
    given = value.get("scheduler") if isinstance(value, dict) else None
    try:
        scheduler = SchedulerSpec.model_validate({"type": "none"} if given is None else given)
    except ValidationError as error:
        problems += [f"{path}: scheduler: {text}" for text in sentences(error, {}, SchedulerSpec)]
        return None
    if given is not None and not reading.sweeps:
        problems.append(f"{path}: scheduler: compares the configurations of a sweep: add sweep to a task")
    for name, sweep in reading.sweeps.items():
        if given is None and sweep.sampler is None:
            continue
        specs = [spec for spec in reading.tasks if spec.name in sweep.configurations]
        texts = dict.fromkeys(filter(None, map(scheduler.problem_with, specs)))
        problems += [f"{path}: task {name!r}: {text}" for text in texts]
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
        return None, [f"must be a mapping of {', '.join(TaskSpec.model_fields)}, got {shown(item)}"], []
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


def _read_yaml(path: Path) -> tuple[Any, list[str]]:
    """Read a YAML file: its value (None if it cannot be read) and its problems."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return None, [f"{path}: no such file"]
    except IsADirectoryError:
        return None, [f"{path}: is a directory, not a task file"]
    except UnicodeDecodeError as error:
        return None, [f"{path}: is not UTF-8 text (byte {error.start})"]
    except OSError as error:
        return None, [f"{path}: cannot be read: {error.strerror}"]
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, [f"{path}: is empty: it must hold {_OUTLINE}"]
        twice = _duplicate_keys(node)
        value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        said = ", ".join(s for s in (error.context, error.problem) if s)
        return None, [f"{path}: {line}not valid YAML: {said}"]
    except (yaml.YAMLError, ValueError) as error:
        return None, [f"{path}: not valid YAML: {' '.join(str(error).split())}"]
    except RecursionError:
        return None, [f"{path}: not valid YAML: nested too deeply"]
    return value, [f"{path}: {text}" for text in twice]


def _duplicate_keys(root: yaml.Node) -> list[str]:
    """Find keys that are given twice in one mapping; YAML would silently keep the last."""
    repeated: list[str] = []
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += reversed(node.value)
        elif isinstance(node, yaml.MappingNode):
            pending += [value for _, value in reversed(node.value)]
            lines: dict[str, int] = {}
            for key in [
                key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"
            ]:
                line = key.start_mark.line + 1
                if key.value in lines:
                    repeated.append(
                        f"line {line}: {plain(key.value)} is given twice (first on line {lines[key.value]})"
                    )
                lines.setdefault(key.value, line)
    return repeated
