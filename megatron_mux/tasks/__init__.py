"""Tasks: the validated content of `tasks.yaml`, one PEFT job each.

A file can be checked before anything heavy is loaded: importing this package loads torch, but neither transformers nor
Megatron-Core.
"""

from megatron_mux.tasks.data import DataSpec
from megatron_mux.tasks.evaluation import EvalSpec
from megatron_mux.tasks.files import TaskFile, load_task_file, read_task, read_task_file
from megatron_mux.tasks.spec import TaskSpec
from megatron_mux.tasks.training import TrainingSpec

__all__ = [
    "DataSpec",
    "EvalSpec",
    "TaskFile",
    "TaskSpec",
    "TrainingSpec",
    "load_task_file",
    "read_task",
    "read_task_file",
]
