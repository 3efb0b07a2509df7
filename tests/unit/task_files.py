"""Task files as dictionaries, and what loading them gives or says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, load_task_file


def with_data(folder: Path) -> Path:
    (folder / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (folder / "data" / name).write_text('{"text": "x"}\n')
    return folder


def task(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "movie",
        "adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]},
        "data": {"path": "data/a.jsonl", "max_length": 16},
        "training": {"max_steps": 3},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            base.setdefault(section, {})
            base[section] = {**base[section], field: value}
        else:
            base[section] = value
    return base


def problems_of(folder: Path, *tasks: Any, text: str | None = None) -> list[str]:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": list(tasks)}) if text is None else text)
    with pytest.raises(UserError) as caught:
        load_task_file(path)
    return [p.removeprefix(f"{path}: ").removeprefix("task 'movie' (#1): ") for p in caught.value.problems]


def load(folder: Path, *tasks: Any) -> list[TaskSpec]:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump({"tasks": list(tasks)}))
    return load_task_file(path)
