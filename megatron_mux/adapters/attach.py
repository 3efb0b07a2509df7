"""The adapters of all tasks on a stage of the backbone, which come and go at any time.

MuxTune section 3.2, figure 7(b): the live side of `register_tasks()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.adapters.expert_op import AttachedExperts
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.peft_format import check_tensors
from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.errors import UserError
from megatron_mux.kernels.low_rank.choice import KernelChoice


class AdapterSet:
    """Adapters of any mixture of kinds, ranks and targets on a backbone's stage.

    While a task has an adapter on a BaseOp, the module's `forward` is replaced on the instance; parameters, names and
    the class stay. When the last one leaves, the module is as it was.

    Attributes:
        ops: Its BaseOps with their adapters.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.ops = [
            (AttachedExperts if info.name in EXPERT_OPS else AttachedBaseOp)(info, host)
            for info in host.base_ops
        ]
        self._tasks: dict[str, TaskAdapter] = {}
        self._prepared = True

    def add(
        self,
        spec: Any,
        total_steps: int,
        initial: Mapping[str, Tensor] | None = None,
        layers: range | None = None,
    ) -> TaskAdapter:
        """Attach a task's adapter, or raise and change nothing.

        Args:
            spec: The task: `name`, `adapter`, `training.seed`.
            initial: Full tensors to start from, by key, of all layers; None makes a fresh adapter.
            layers: Global indices of the layers that it attaches to; None: all of the stage.

        Returns:
            The adapter, whose parameters the caller trains.

        Raises:
            UserError: The name is taken, a target is unknown or not for this method, or `initial` does not fit.
        """
        if spec.name in self._tasks:
            raise UserError(f"task {spec.name!r} has an adapter already: give the new task another name")
        if initial is not None:
            initial = spec.adapter.from_files(initial, self.host.shape)
            problems = check_tensors(initial, spec.adapter, self.host.shape)
            if problems:
                raise UserError(*(f"task {spec.name!r}: the adapter to start from {p}" for p in problems))
        host = self.host if layers is None else self.host.within(layers)
        self._prepared = False
        adapter: TaskAdapter = spec.adapter.attach(host, spec, total_steps, initial)
        taken = {other.slot for other in self._tasks.values()}
        adapter.slot = next(slot for slot in count() if slot not in taken)
        for op, at in adapter.at.items():
            self.ops[op].add(spec.name, at, adapter.slot)
            self.ops[op].attach()
        adapter.rows.enter()
        self._tasks[spec.name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Detach a task's adapter.

        Raises:
            KeyError: No task of that name has an adapter.
        """
        adapter = self._tasks.pop(name)
        self._prepared = False
        adapter.rows.leave()
        for op in adapter.at:
            self.ops[op].remove(name)
        adapter.at.clear()  # its parts know the whole: their memory would wait for the garbage collector

    def renew_experts(self) -> None:
        """Compute with the experts that this rank holds by now, after some have moved."""
        self._prepared = False
        for op in self.ops:
            if isinstance(op, AttachedExperts):
                op.renew()

    def use(self, kernels: KernelChoice) -> None:
        """Have these kernels compute the low-rank terms."""
        chosen = dict(kernels)
        for op in self.ops:
            op.kernels = chosen.get(op.info.name)

    def prepare(self) -> None:
        """Bring to a GPU what its kernels need of tasks that have come or gone, before any message is outstanding."""
        if self._prepared:
            return
        if self.host.device.type == "cuda":
            for op in self.ops:
                op.prepare()
        self._prepared = True

    @property
    def tasks(self) -> Mapping[str, TaskAdapter]:
        """Attached adapters by task name."""
        return self._tasks
