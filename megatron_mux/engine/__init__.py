"""Tasks come and go while the backbone trains: `Engine.register_tasks`, `Engine.step`, `Engine.remove_task`."""

from megatron_mux.engine.engine import Engine
from megatron_mux.engine.evaluate import EvalResult
from megatron_mux.engine.health import Health
from megatron_mux.engine.planning import Planning
from megatron_mux.engine.running import StepResult, Task
from megatron_mux.engine.snapshot import Snapshot

__all__ = ["Engine", "EvalResult", "Health", "Planning", "Snapshot", "StepResult", "Task"]
