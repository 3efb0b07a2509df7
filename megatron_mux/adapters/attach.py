"""The adapters of all tasks on one stage of the backbone, which can be added and removed at any time.

MuxTune section 3.2, figure 7(b): the live side of `register_tasks()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.peft_format import check_tensors
from megatron_mux.base_ops import BaseOpInfo
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape


class AdapterSet:
    """Adapters of any mixture of kinds, ranks and targets on a backbone's stage.

    While a task has an adapter on a BaseOp, the module's `forward` is replaced on the instance; parameters, names and
    the class stay. When the last one leaves, the module is as it was.

    Args:
        base_ops: The stage's BaseOps.
        parallel: Where this rank stands.
        dtype: Of the backbone's computation.
        shape: The backbone's sizes.
    """

    def __init__(
        self, base_ops: Sequence[BaseOpInfo], parallel: Parallel, dtype: torch.dtype, shape: BackboneShape
    ) -> None:
        self.host = Host(base_ops, parallel, dtype, shape)
        self._ops = [AttachedBaseOp(info, parallel) for info in self.host.base_ops]
        self._tasks: dict[str, TaskAdapter] = {}

    def add(self, spec: Any, total_steps: int, initial: Mapping[str, Tensor] | None = None) -> TaskAdapter:
        """Attach a task's adapter, or raise and change nothing.

        Args:
            spec: The task: `name`, `adapter`, `training.seed`.
            total_steps: Optimizer steps that the task runs for.
            initial: Full tensors to start from, by key, of all layers; None makes a fresh adapter.

        Returns:
            The adapter, whose parameters the caller trains.

        Raises:
            UserError: The name is taken, a target is unknown or not for this method, or `initial` does not fit.
        """
        if spec.name in self._tasks:
            raise UserError(f"task {spec.name!r} has an adapter already: give the new task another name")
        if initial is not None:
            problems = check_tensors(initial, spec.adapter, self.host.shape)
            if problems:
                raise UserError(*(f"task {spec.name!r}: the adapter to start from {p}" for p in problems))
        adapter: TaskAdapter = spec.adapter.attach(self.host, spec, total_steps, initial)
        for op, at in adapter.at.items():
            self._ops[op].add(spec.name, at)
        self._tasks[spec.name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Detach a task's adapter.

        Raises:
            KeyError: No task of that name has an adapter.
        """
        adapter = self._tasks.pop(name)
        for op in adapter.at:
            self._ops[op].remove(name)
        adapter.at.clear()  # its parts know the whole: their memory would wait for the garbage collector

    @property
    def tasks(self) -> Mapping[str, TaskAdapter]:
        """Attached adapters by task name."""
        return self._tasks
