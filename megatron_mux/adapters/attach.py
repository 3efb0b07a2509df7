"""A stage of the backbone as adapters see it, and the adapters of all tasks there, which come and go at any time.

MuxTune section 3.2, figure 7(b): the live side of `register_tasks()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.adapters.expert_op import AttachedExperts
from megatron_mux.adapters.peft_format import check_tensors
from megatron_mux.base_ops import EXPERT_OPS, BaseOpInfo, ModuleColumns
from megatron_mux.errors import UserError
from megatron_mux.kernels.low_rank.choice import KernelChoice
from megatron_mux.kernels.low_rank.columns import Columns
from megatron_mux.kernels.own_rows import Place, VocabularyPart
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape, Module

Weights = Callable[[str], Tensor | None]
"""Returns the whole weight `[out, in]` of the module at a Hugging Face path, as the backbone computes with it, on the
CPU; None where there are no weights, and values do not matter."""


def no_weights(path: str) -> None:
    """Take the place of `Weights` in dry runs and probes."""


@dataclass(frozen=True)
class Site:
    """A module that a task targets, inside a BaseOp of this stage.

    Attributes:
        module: The module.
        info: The BaseOp.
        part: Its place in the BaseOp's output on this rank.
    """

    module: Module
    info: BaseOpInfo
    part: ModuleColumns

    @property
    def path(self) -> str:
        """Full Hugging Face path of the module."""
        return self.module.path

    @property
    def inputs(self) -> Tensor:
        """`[K]` int64 global input features that this rank holds."""
        return torch.arange(self.info.inputs.start, self.info.inputs.stop)


class Host:
    """A stage of the backbone, as adapters see it.

    Args:
        base_ops: The stage's BaseOps.
        parallel: Where this rank stands.
        dtype: The backbone's compute dtype; adapter parameters are fp32, or fp64 on an fp64 backbone.
        shape: The backbone's sizes.
        vocabulary: This rank's parts of the embedding and the output layer; None: tasks cannot train rows of them.
        weights: What fresh adapters that depend on weights start from; None: there can be none.
    """

    def __init__(
        self,
        base_ops: Sequence[BaseOpInfo],
        parallel: Parallel,
        dtype: torch.dtype,
        shape: BackboneShape,
        vocabulary: Mapping[Place, VocabularyPart] | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.weights = weights
        self.base_ops = list(base_ops)
        self.vocabulary = vocabulary
        self.parallel = parallel
        self.dtype = dtype
        self.parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.shape = shape
        self.device = torch.device(parallel.device)
        # Requires a gradient and gets none: products whose input needs none have a backward pass all the same.
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._columns: dict[tuple[str, str], tuple[Tensor | None, Columns]] = {}
        self._within: range | None = None

    def within(self, layers: range) -> Host:
        """The stage as an adapter sees it that attaches to some of its layers only, by their global indices."""
        part = copy(self)
        part._within = layers
        return part

    @property
    def layers(self) -> list[int]:
        """Global indices of the layers of this stage, ascending; none on an expert manager, which has parts of them."""
        return sorted({info.layer for _, info in self._ops if info.name not in EXPERT_OPS})

    @property
    def _ops(self) -> list[tuple[int, BaseOpInfo]]:
        within = self._within
        return [(op, info) for op, info in enumerate(self.base_ops) if within is None or info.layer in within]

    def columns(self, site: Site) -> Tensor | None:
        """`[n]` int32, a module's columns of its BaseOp's output; None where it is all of them in order.

        All layers share them.
        """
        return self._placed(site)[0]

    def place(self, site: Site) -> Columns:
        """The same columns, read in host memory: nobody waits for a GPU."""
        return self._placed(site)[1]

    def _placed(self, site: Site) -> tuple[Tensor | None, Columns]:
        key = (site.info.name, site.path.removeprefix(site.info.hf_prefix))
        if key not in self._columns:
            columns = site.part.columns.cpu()
            weight: Any = site.info.module.weight
            place = Columns.of(columns, len(columns))
            if place.index is None and place == Columns.of(None, int(weight.shape[0])):
                self._columns[key] = None, place
            else:
                index = columns.to(device=self.device, dtype=torch.int32)
                self._columns[key] = index, place if place.index is None else replace(place, index=index)
        return self._columns[key]

    def sites(self, modules: Sequence[Module]) -> Iterator[tuple[int, list[Site]]]:
        """Yield the modules that are on this stage, BaseOp by BaseOp."""
        wanted = {module.path: module for module in modules}
        for op, info in self._ops:
            placed = [(wanted.get(f"{info.hf_prefix}.{path}"), part) for path, part in info.parts.items()]
            found = [Site(module, info, part) for module, part in placed if module is not None]
            if found:
                yield op, found


class AdapterSet:
    """Adapters of any mixture of kinds, ranks and targets on a backbone's stage.

    While a task has an adapter on a BaseOp, the module's `forward` is replaced on the instance; parameters, names and
    the class stay. When the last one leaves, the module is as it was.

    Args:
        host: The stage.

    Attributes:
        host: The argument.
        ops: Its BaseOps with their adapters.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self.ops = [
            (AttachedExperts if info.name in EXPERT_OPS else AttachedBaseOp)(info, host)
            for info in host.base_ops
        ]
        self._tasks: dict[str, TaskAdapter] = {}

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
            total_steps: Optimizer steps that the task runs for.
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
        adapter.rows.leave()
        for op in adapter.at:
            self.ops[op].remove(name)
        adapter.at.clear()  # its parts know the whole: their memory would wait for the garbage collector

    def renew_experts(self) -> None:
        """Compute with the experts that this rank holds by now, after some have moved."""
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
        if self.host.device.type == "cuda":
            for op in self.ops:
                op.prepare()

    @property
    def tasks(self) -> Mapping[str, TaskAdapter]:
        """Attached adapters by task name."""
        return self._tasks
