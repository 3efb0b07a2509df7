"""Tasks come and go while the backbone trains: `Engine.register_tasks`, `Engine.step`, `Engine.remove_task`."""

from megatron_mux.engine.best import BestEvaluation
from megatron_mux.engine.engine import Engine
from megatron_mux.engine.evaluation.evaluator import EvalResult
from megatron_mux.engine.loss_health import LossHealth
from megatron_mux.engine.planning import Planning
from megatron_mux.engine.snapshot import Snapshot
from megatron_mux.engine.task_state import StepResult, Task

__all__ = [
    "BestEvaluation",
    "Engine",
    "EvalResult",
    "LossHealth",
    "Planning",
    "Snapshot",
    "StepResult",
    "Task",
]
