"""What a task is: the validated content of `tasks.yaml` (one tenant's PEFT job).

Importing this room costs no torch and no transformers, so a file can be checked before anything heavy is loaded.
"""

from megatron_mux.tasks.adapters import (
    AdapterSpec,
    BottleneckSpec,
    DiffPruningSpec,
    IA3Spec,
    LoraSpec,
    PrefixTuningSpec,
)
from megatron_mux.tasks.files import load_task_file
from megatron_mux.tasks.spec import TaskSpec
from megatron_mux.tasks.training import DataSpec, EvalSpec, TrainingSpec

__all__ = [
    "AdapterSpec",
    "BottleneckSpec",
    "DataSpec",
    "DiffPruningSpec",
    "EvalSpec",
    "IA3Spec",
    "LoraSpec",
    "PrefixTuningSpec",
    "TaskSpec",
    "TrainingSpec",
    "load_task_file",
]
