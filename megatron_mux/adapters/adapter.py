"""The run-time interface of a PEFT method: its parameters, and what it adds at a BaseOp.

MuxTune section 3.2 divides the PEFT workflow into BaseOp, Adapter, Dispatch and Aggregate. Here an `Adapter` is one
task's method at one BaseOp and says at which *stages* of that BaseOp it acts; `base_op.AttachedBaseOp` dispatches
the task's rows to it and aggregates what it returns. A `TaskAdapter` is the whole of one task's method on this rank.

Shapes: n rows of the task, K and N the BaseOp's input and output width on this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_mux.adapters.flat_params import FlatParams
from megatron_mux.adapters.host import Host, Site
from megatron_mux.adapters.own_rows import TaskRows
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.tensors import AdapterTensor, tensor_key
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.dropout import key_of
from megatron_mux.kernels.low_rank.terms import Term

Grouped = Literal["before", "after"]
"""Stages that kernels compute for all tasks at once."""


class Adapter:
    """One task's method at one BaseOp. The stages it names in `stages` are called, in this order:

    1. `extend(batch)`: add keys and values for core attention (prefix tuning);
    2. `before(x)`: replace the BaseOp's input, row-parallel BaseOps only;
    3. `low_rank(slot)`: terms fused into the product itself, the same in every micro-batch;
    4. `product(x, y, batch)`: change the product before it is summed over tensor ranks;
    5. `after(y)`: change the BaseOp's finished output, bias included.

    All tensors are the task's own rows.

    Attributes:
        stages: Names of the stages.
        grouped: Stages for which `row_terms` are an alternative: where kernels compute these for all tasks at once, on
            a GPU, the stage's own method is not called.
    """

    stages: frozenset[str] = frozenset()
    grouped: frozenset[Grouped] = frozenset()

    def extend(self, batch: PackedBatch) -> None:
        """Change the micro-batch, in place."""
        raise NotImplementedError

    def before(self, x: Tensor) -> Tensor:
        """Map the BaseOp's input `[n, K]` to the `[n, K]` that the BaseOp gets."""
        raise NotImplementedError

    def low_rank(self, slot: int) -> Sequence[Term]:
        """Return the low-rank terms of the task, which has this slot."""
        raise NotImplementedError

    def row_terms(self, stage: Grouped, slot: int) -> Sequence[Term]:
        """Return what a stage in `grouped` does, as terms of `low_rank.grouped_rows`; the task has this slot."""
        raise NotImplementedError

    def product(self, x: Tensor, y: Tensor, batch: PackedBatch) -> Tensor:
        """Map input `[n, K]` and product `[n, N]` to `[n, N]`.

        The product has the bias of a column-parallel BaseOp, unless the module skips it.
        """
        raise NotImplementedError

    def after(self, y: Tensor) -> Tensor:
        """Map the finished output `[n, N]` to `[n, N]`."""
        raise NotImplementedError


class TaskAdapter(ABC):
    """One task's PEFT method on this rank: its parameters and what it does at each BaseOp.

    Args:
        task: The task: `name`, `adapter` (its section), `training.seed`.
        initial: Full tensors to start from, by key, already checked to be those of `AdapterSpec.tensors`; None makes a
            fresh adapter from the task's seed.

    Attributes:
        parameters: Local parameters, in the order of layers.
        fixed: Local tensors that are not trained.
        flat_params: Storage of `parameters`, their gradients and copies.
        slot: The smallest integer that no other attached task has: see `kernels.groups.RowGroups`.
        at: Index of a BaseOp in `host.base_ops` to the method there.
        rows: The rows of the embedding and of the output layer that the task trains.
    """

    def __init__(self, host: Host, task: Any, total_steps: int, initial: Mapping[str, Tensor] | None) -> None:
        self.host = host
        self.name: str = task.name
        self.spec = task.adapter
        self.seed: int = task.training.seed
        self.total_steps = total_steps
        self.initial = initial
        self.tensors: Mapping[str, AdapterTensor] = self.spec.tensors(host.shape)
        self.parameters: list[AdapterParameter] = []
        self.fixed: list[AdapterParameter] = []
        self.slot = 0
        self.at: dict[int, Adapter] = {}
        self._starts: dict[str, Tensor] = {}
        self._ordered: list[AdapterParameter] = []
        self.build()
        self.rows = TaskRows(host, self.name, self.spec.own_rows(host.shape), self.make, initial is None)
        # What `adapt` has not ordered belongs to no module.
        others = [p for p in self.parameters if p not in set(self._ordered)]
        self.flat_params = FlatParams(
            [(p, self._starts.pop(p.key)) for p in (*others, *self._ordered)],
            host.device,
            host.parameter_dtype,
            host.dtype,
        )
        self.rows.find(self.flat_params)
        self.initial = None

    def build(self) -> None:
        """Make `parameters` and `at`."""
        for op, sites in self.host.sites(self.spec.modules(self.host.shape)):
            modules = [(site, self._tensors_of(site)) for site in sites]
            # All A of a BaseOp next to each other, then all B: one product serves neighbours.
            self._ordered += [
                p
                for alike in zip(*(params for _, params in modules), strict=True)
                for p in alike
                if self.tensors[p.key].trained
            ]
            self.at[op] = self.adapt(modules)

    @abstractmethod
    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> Adapter:
        """Make the method at a BaseOp.

        Args:
            modules: The targeted modules inside it, each with its tensors in the order of
                `AdapterSpec.module_tensors`.
        """

    def penalty(self, step: int) -> Tensor | float:
        """Add the gradients of a regulariser, once per optimizer step, before gradients are summed over ranks.

        This and the next two are called if `AdapterSpec.acts_in_steps`.

        Args:
            step: Optimizer steps done so far.

        Returns:
            The regulariser over the elements that this rank owns.
        """
        return 0.0

    def after_step(self, step: int, skip: Tensor | None = None) -> None:
        """Called after each optimizer step, on every rank.

        Args:
            step: Optimizer steps done, this one included.
            skip: Scalar bool on the device, which the host does not read: if it is true, the step was skipped, and
                no tensor may change. None: it was not.
        """

    def rollback_after(self, steps: int) -> None:
        """Called once the host knows how many optimizer steps were done, skipped ones not counted.

        Args:
            steps: How many. What the host has noted for later steps is undone.
        """

    def state(self) -> dict[str, Tensor]:
        """Return local tensors to save besides parameters, by the key of the parameter that is divided alike."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state()` from full tensors, of which this rank takes its part."""

    def _tensors_of(self, site: Site) -> list[AdapterParameter]:
        """Make a module's tensors, divided over tensor ranks as the section says, or over ranks of experts."""
        made = []
        for name in self.spec.module_tensors(site.module, self.host.shape):
            key = tensor_key(self.spec.key_path(site.module), name)
            tensor = self.tensors[key]
            held = site.part.features if site.info.column_parallel else site.inputs
            dim, index = tensor.dim, None if tensor.dim is None else held
            if tensor.expert_dim is not None:
                of_experts = tensor.expert_dim, partial(self.places_of_experts, tensor, site.info.experts)
                dim, index = self.host.parallel.experts.adapter_part((dim, index), *of_experts)
            made.append(self.make(key, dim, index))
        return made

    def places_of_experts(self, tensor: AdapterTensor, held: Sequence[int]) -> Tensor:
        """Where along `expert_dim` a tensor has the ranks of these experts: `[n]` int64."""
        experts, dim = self.host.shape.experts, tensor.expert_dim
        assert experts is not None and dim is not None
        places = torch.arange(tensor.shape[dim])
        local = torch.tensor(held, dtype=torch.int64)
        if dim == 0:
            return places.view(experts.count, -1)[local].flatten()
        return places.view(-1, experts.count)[:, local].flatten()

    def fresh(self, key: str) -> Tensor:
        """The initial value of a whole tensor: the same however the backbone is divided."""
        tensor = self.tensors[key]
        full = torch.empty(tensor.shape, dtype=torch.float32)
        tensor.init(full, torch.Generator().manual_seed(key_of(self.seed, "initial", key) >> 1))
        return full

    def make(
        self,
        key: str,
        dim: int | None = None,
        index: Tensor | None = None,
        owner: bool = True,
        start: Tensor | None = None,
    ) -> AdapterParameter:
        """Make the local part of a tensor and note it in `parameters`, or in `fixed` if it is not trained.

        Args:
            key: Name in `adapter_model.safetensors`.
            dim, index: See `AdapterParameter`.
            owner: Whether this stage owns it; of tensor ranks that each hold the same, the first does.
            start: What the local part of a fresh adapter starts from; None: from `AdapterTensor.init`.
        """
        tensor, parallel, of_stage = self.tensors[key], self.host.parallel, owner
        if tensor.dim is None:
            owner = owner and parallel.tp_rank == 0
        partial = tensor.dim is None and (parallel.sequence_parallel or not tensor.on_output)
        value = nn.Parameter(torch.empty(0), requires_grad=tensor.trained)
        record = AdapterParameter(
            key, value, tensor.shape, dim, index, partial, owner, tensor.decay, of_stage
        )
        given = self.initial if tensor.stored else None
        if start is not None:
            local = start
        else:
            local = record.slice_of(self.fresh(key) if given is None or key not in given else given[key])
        local = local.to(dtype=self.host.parameter_dtype).contiguous()
        if tensor.trained:  # its storage is flat
            self._starts[key] = local
            record.value = nn.Parameter(torch.empty(0, dtype=local.dtype, device=self.host.device))
            self.parameters.append(record)
        else:
            record.value = nn.Parameter(local.to(self.host.device), requires_grad=False)
            self.fixed.append(record)
        return record
