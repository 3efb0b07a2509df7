"""The fields of `training` for where a task's figures are reported, with the spellings of `transformers`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megatron_mux.section import FilePath, Section, problem, shown
from megatron_mux.trackers.registry import PLACES, missing_package


def _report_to(value: Any) -> Any:
    if value in (None, "none", ["none"]):
        return []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise problem(f"must be one or a list of {', '.join(PLACES)}, got {shown(value)}")
    for name in names:
        if name not in PLACES:
            raise problem(
                f"{shown(name)} is not supported: use one or a list of {', '.join(PLACES)}, or none"
            )
        if package := missing_package(name):
            raise problem(f"{name} needs the package {package}: pip install {package}, or leave {name} out")
    return list(dict.fromkeys(names))


class ReportFields(Section):
    """Where a task's figures go besides `metrics.jsonl`. No update depends on it."""

    report_to: Annotated[list[str], BeforeValidator(_report_to)] = Field(default=[])
    """`wandb`, `mlflow`, `tensorboard`, `csv`: one or several."""
    run_name: str | None = Field(default=None, min_length=1)
    """Name of the run there; None: the task's."""
    project: str = Field(default="megatron-mux", min_length=1)
    """Project of wandb, experiment of mlflow."""
    logging_dir: FilePath | None = None
    """Directory in which their files have one of the task's name; None: that below --save."""
