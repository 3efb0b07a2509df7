"""A process that checks tasks and their files for the server: a JSON object a line in, one a line out.

Its standard output is for answers alone; what libraries print goes to standard error, which the server keeps in a file.
It runs nothing of what it reads, but it may take long or die of it, which is why the server does not do this itself.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import traceback
from collections.abc import Mapping
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info
from megatron_mux.data.dataset import DataFiles, TaskDataset
from megatron_mux.data.sources.json_lines import JsonLines
from megatron_mux.data.sources.locate import open_file
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.errors import UserError
from megatron_mux.serve.jobs.fields import ADAPTER, SECTIONS, Fault
from megatron_mux.tasks import read_task
from megatron_mux.training.task_setup import open_tasks

_LONGEST_LINE = 16 * 2**20
_SHARE_OF_MEMORY = 0.5
"""Of the machine's, that a check may take: a hostile file may ask for more than there is."""
_MOST_FAULTS, _LONGEST_MESSAGE = 50, 2000

_NICENESS = 10
_FIELD = re.compile(r"(?:(adapter|data|training|eval)\.)?(\w+)(?:[.\[][\w.\[\]]*)?(?:, [\w.]+)*: ")
_FILES = {"data": "training_file", "eval": "validation_file"}


def check_fields(backbone: Path, task: Mapping[str, Any]) -> list[Fault]:
    """What is wrong with a task, its files aside.

    Args:
        backbone: Directory of the backbone.
        task: As `tasks.yaml` would say it.
    """
    try:
        spec = read_task(task, Path("/"))
        open_tasks([spec], _info(str(backbone)), _OpenedLater(None, lambda line: None), lambda line: None)
    except UserError as error:
        return _faults(error, _Words(backbone, task, None))
    return []


def check_files(backbone: Path, task: dict[str, Any], cache: Path | None = None) -> dict[str, Any]:
    """Tokenise a task's files, and say what is wrong with them or what they amount to.

    Args:
        backbone: Directory of the backbone.
        task: As `tasks.yaml` would say it; `check_fields` has found nothing.
        cache: Where tokens are kept; None: the user's cache.

    Returns:
        The fields of a `Checked`.
    """
    words = _Words(backbone, task, cache)
    notes: list[str] = []
    try:
        _refuse_long_lines(task)
        info = _info(str(backbone))
        files = DataFiles(_tokenizer(str(info.tokenizer)), lambda line: None, cache)
        (opened,) = open_tasks([read_task(task, Path("/"))], info, files, notes.append)
    except UserError as error:
        return {"faults": _faults(error, words)}
    return {
        "total_steps": opened.spec.total_steps(len(opened.data)),
        "records": len(opened.data) // opened.spec.training.sequences_per_record,
        "tokens": int(opened.data.lengths.sum()),
        "notes": [words.of_client(note.removeprefix(f"{opened.spec.name}: ")) for note in notes],
    }


class _OpenedLater(DataFiles):
    """Files that are not looked at: `open_tasks` then checks everything else."""

    def open(self, *arguments: Any, **options: Any) -> TaskDataset:
        """Say that there is nothing, and nothing wrong."""
        raise UserError


class _Words:
    """Puts what the engine says into words of the client, who knows files by their ids and no directory.

    Attributes:
        files: By the fields that name them.
    """

    def __init__(self, backbone: Path, task: Mapping[str, Any], cache: Path | None) -> None:
        self._task = f"task {task.get('name')!r}: "
        self.files = {_FILES[section]: path for section, path in _paths(task).items()}
        self._places = {f"{path.parent}/": "" for path in self.files.values()}
        self._places |= {str(backbone): "the backbone", str(cache or "\0"): "the cache of tokens"}

    def of_client(self, text: str) -> str:
        """The text without the task's name and without paths."""
        text = text.removeprefix("task: ").removeprefix(self._task)
        for place, name in self._places.items():
            text = text.replace(place, name)
        return text[:_LONGEST_MESSAGE]


def _faults(error: UserError, words: _Words) -> list[Fault]:
    return [_fault(words.of_client(problem), words) for problem in error.problems[:_MOST_FAULTS]]


def _fault(text: str, words: _Words) -> Fault:
    for param, path in words.files.items():
        if text.startswith(path.name):
            return Fault(text, param, f"invalid_{param}")
    found = _FIELD.match(text)
    if found is None:
        return Fault(text, None, "invalid_value")
    if found[1] is not None:
        return Fault(text, f"{found[1]}.{found[2]}", "invalid_value")
    if found[2] in ADAPTER:  # what the adapter says of a backbone begins with its own field
        return Fault(f"adapter.{text}", f"adapter.{found[2]}", "invalid_value")
    return Fault(text, found[2] if found[2] in SECTIONS else None, "invalid_value")


def _refuse_long_lines(task: Mapping[str, Any]) -> None:
    """Refuse files of which a line alone would take much memory."""
    problems = []
    for path in _paths(task).values():
        source = open_file(path)
        source.close()
        if not isinstance(source, JsonLines):
            continue
        with open(path, "rb") as file:
            number = 1
            while line := file.readline(_LONGEST_LINE + 1):
                if len(line) > _LONGEST_LINE:
                    problems.append(f"{path}: line {number}: has more than {_LONGEST_LINE >> 20} MiB")
                    break
                number += 1
    if problems:
        raise UserError(*problems)


def _paths(task: Mapping[str, Any]) -> dict[str, Path]:
    return {section: Path(task[section]["path"]) for section in _FILES if section in task}


@lru_cache(maxsize=8)
def _info(backbone: str) -> BackboneInfo:
    return read_backbone_info(backbone)


@lru_cache(maxsize=8)
def _tokenizer(directory: str) -> Any:
    return load_tokenizer(directory)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Do what the server asks for.

    Args:
        request: `do` is `fields` or `files`; with `backbone`, `task` and `cache`.

    Returns:
        The answer; `failed` if the check itself failed.
    """
    backbone, task = Path(request["backbone"]), request["task"]
    try:
        if request["do"] == "fields":
            found: dict[str, Any] = {"faults": check_fields(backbone, task)}
        else:
            found = check_files(backbone, task, Path(request["cache"]) if request["cache"] else None)
    except MemoryError:
        found = {
            "faults": [Fault("the check needs more memory than a check may take", None, "invalid_value")]
        }
    except Exception:
        traceback.print_exc()
        return {"failed": True}
    return {**found, "faults": [astuple(fault) for fault in found.get("faults", ())]}


def main() -> None:
    """Answer requests until there are no more; with the argument `files` the process gives way to others."""
    if "files" in sys.argv[1:]:
        os.nice(_NICENESS)
    memory = int(_SHARE_OF_MEMORY * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or hard > memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, hard))
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        reply: dict[str, Any] = {"ready": True}
        while True:
            answers.write(json.dumps(reply).encode() + b"\n")
            answers.flush()
            line = sys.stdin.buffer.readline()
            if not line:
                return
            reply = answer(json.loads(line))


if __name__ == "__main__":
    main()
