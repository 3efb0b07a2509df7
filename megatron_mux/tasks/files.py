"""Reads `tasks.yaml` and reports all mistakes in it at once, before anything heavy is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from glob import has_magic, iglob
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_mux.errors import UserError
from megatron_mux.section import BASE_DIRECTORY, plain, shown
from megatron_mux.tasks.spec import LONGEST_NAME, TaskSpec
from megatron_mux.tasks.start import with_stored_config
from megatron_mux.tasks.wording import did_you_mean, sentences

_OUTLINE = "`tasks:` and below it a list of tasks, each with name, adapter, data and training"


def load_task_file(path: str | os.PathLike[str], *, data_later: bool = False) -> list[TaskSpec]:
    """Read and check a task file.

    The top level is `tasks:` with a list, or one task by itself (as for `--mux-watch`). Relative paths in it start
    from its directory and come back absolute. Data files and the adapters to start from must exist; what is in the
    data files is checked when they are opened.

    Args:
        path: The file.
        data_later: Let missing data files pass when nothing else is wrong: whoever opens them then names them together
            with what only shows against the backbone.

    Returns:
        The tasks, in the file's order.

    Raises:
        UserError: With one problem per mistake in the file, such as
            `tasks.yaml: task 'movie' (#2): training.learning_rate: must be a number greater than 0, got 'fast'`.
    """
    path = Path(path)
    value, problems = _read_yaml(path)
    if problems and value is None:
        raise UserError(*problems)
    tasks: list[TaskSpec] = []
    first: dict[str, int] = {}
    missing: list[str] = []
    items, alone = _items(value, path, problems)
    base = Path(os.path.abspath(path)).parent
    for number, item in enumerate(items, 1):
        where = _where(path, item, None if alone else number)
        task, wrong, gone = _task(item, base)
        name = item.get("name") if isinstance(item, dict) else None
        if isinstance(name, str):
            if name in first:
                wrong.append(f"name: is taken by task #{first[name]} already: every task needs its own")
            first.setdefault(name, number)
        problems += [f"{where}: {text}" for text in wrong]
        missing += [f"{where}: {text}" for text in gone]
        if task is not None:
            tasks.append(task)
    if problems or (missing and not data_later):
        raise UserError(*problems, *missing)
    return tasks


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


def _items(value: Any, path: Path, problems: list[str]) -> tuple[list[Any], bool]:
    """Return the tasks in a file's value, and whether it is one task by itself."""
    if isinstance(value, dict) and "tasks" not in value and value.keys() & TaskSpec.model_fields.keys():
        return [value], True
    if not isinstance(value, dict):
        what = "is empty" if value is None else f"holds {shown(value)}"
        problems.append(f"{path}: {what}: it must hold {_OUTLINE}")
        return [], False
    for key in value:
        if key != "tasks":
            near = did_you_mean(str(key), ["tasks"])
            problems.append(
                f"{path}: unknown key {str(key)!r} at the top level{near or ': only tasks belongs there'}"
            )
    items = value.get("tasks")
    if not isinstance(items, list) or not items:
        if "tasks" in value or not problems:
            problems.append(f"{path}: tasks: must be a list with at least one task, got {shown(items)}")
        return [], False
    return items, False


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
