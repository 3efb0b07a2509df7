"""Counts, in a dry run, what a step launches on a GPU, and where the host waits for it.

Every operator with a tensor of the fake GPU counts as one launch, except for views and allocations. Operators that
Triton kernels compute on a real GPU declare theirs (`LAUNCHES`), which tests hold against what the kernels launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.host_waits import host_waits
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.base_op import AttachedBaseOp
from megatron_mux.attributes import replaced
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.dry_run.process import in_forks
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.engine.step_runner import StepRunner
from megatron_mux.engine.updates import DryUpdateKernels, GroupedUpdate
from megatron_mux.kernels.dequantise import interface as dequantise
from megatron_mux.kernels.dequantise.choice import DryDequantise
from megatron_mux.kernels.experts import interface as experts
from megatron_mux.kernels.experts import linear, product
from megatron_mux.kernels.experts.choice import DryExpertKernels
from megatron_mux.kernels.low_rank import grouped_rows
from megatron_mux.kernels.low_rank import product as low_rank
from megatron_mux.kernels.low_rank.choice import DryKernels
from megatron_mux.kernels.pointwise import choice as pointwise
from megatron_mux.kernels.pointwise.choice import DryPointwise
from megatron_mux.kernels.update import table as update
from megatron_mux.memory.worker import Worker

_ALLOCATIONS = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "lift_fresh",
        "detach",
    }
)


@dataclass
class StepLaunches:
    """Counts of one optimizer step.

    Attributes:
        forward, backward: The most launches of one call of a BaseOp with adapters. The frozen product is included, in
            the backward pass only where low-rank terms are fused with it; what acts on finished rows counts by itself.
        experts: The most launches of a layer's experts in the forward pass, router and order of pairs included.
        experts_backward: The most launches of one call of a BaseOp of routed experts with adapters in the backward.
        kept: Bytes that autograd keeps for all BaseOps with adapters.
        norm, update, options: The most launches of the end of a bucket's step: norms; clipping and updates; and the
            copy of what the optimizers need, once for all steps that roll together.
        tables: Launches that bring tables of tasks to the device, after they came or went; none in a steady step.
        others: All other launches, by operator.
        waits: Operators for which the host waits, and how often: blocking copies, and results that it reads.
        reads: Launches at the end of steps that roll together, when the host reads their results: it waits once, there.
    """

    forward: int = 0
    backward: int = 0
    experts: int = 0
    experts_backward: int = 0
    kept: int = 0
    norm: int = 0
    update: int = 0
    options: int = 0
    tables: int = 0
    reads: int = 0
    others: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)


class LaunchCounter(TorchDispatchMode):
    """Counts launches step by step, each under the place that is entered.

    Attributes:
        steps: One for each step that has begun.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[StepLaunches] = []
        self._place = ""
        self._here = 0

    def launch(self, name: str, count: int = 1) -> None:
        """Count launches here."""
        if self._place:
            self._here += count
        else:
            self.steps[-1].others[name] += count

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, a step runs."""
        self.steps.append(StepLaunches())
        with self:
            yield

    def inside(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose launches count under a place."""

        def counted(*args: Any, **named: Any) -> Any:
            around, self._place, self._here = (self._place, self._here), place, 0
            try:
                return function(*args, **named)
            finally:
                now, found = self.steps[-1], self._here
                before = getattr(now, place)
                setattr(now, place, before + found if place == "tables" else max(before, found))
                self._place, self._here = around
                self._here += found

        return counted

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd keeps for a BaseOp."""
        if self._place == "forward":
            self.steps[-1].kept += tensor.nbytes
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self._see(func, args, kwargs or {}, made)
        return made

    def _see(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        tensors = [x for x in tree_iter((args, kwargs, made)) if isinstance(x, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors)
        if not on_gpu or name in _ALLOCATIONS or _is_view(func):
            return
        if self._place != "reads" and host_waits(func, args, kwargs):
            self.steps[-1].waits[name] += 1
        self.launch(name)


@cache
def _is_view(func: Any) -> bool:
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    return alias is not None and not alias.is_write


def count_launches(run: RunSpec, seconds: float = 300.0) -> list[StepLaunches]:
    """Count the launches of each of a run's steps, on the first rank.

    Args:
        run: Not rolling. All tasks join before the first step; the others are steady.
        seconds: Time limit.

    Raises:
        WorkerError: The dry run failed.
    """
    with Worker(seconds) as worker:
        return worker.submit(_counted_in_fork, run).result()


def _counted_in_fork(run: RunSpec) -> list[StepLaunches]:
    return in_forks(_counted, [run], 1)[0]


def _counted(run: RunSpec) -> list[StepLaunches]:
    from megatron_mux.dry_run.execute import execute_dry_run

    counter = LaunchCounter()
    with ExitStack() as stack:
        for owner, name, place in (
            (AdapterSet, "prepare", "tables"),
            (StepRunner, "_updates_of", "tables"),
            (GroupedUpdate, "prepare", "options"),
            (AttachedBaseOp, "forward", "forward"),
            (MoELayer, "forward", "experts"),
            (BucketFinalizer, "norm", "norm"),
            (BucketFinalizer, "update", "update"),
            (BucketFinalizer, "finish", "reads"),
        ):
            stack.enter_context(replaced(owner, name, _method(counter.inside(place, getattr(owner, name)))))
        for function, place in (
            (low_rank._LowRankLinear, "backward"),
            (grouped_rows._AdaptedRows, "backward"),
            (linear._ExpertLinear, "experts_backward"),
        ):
            inside = staticmethod(counter.inside(place, function.backward))
            stack.enter_context(replaced(function, "backward", inside))
        for module in (product, linear):
            noted = _noting(counter, "grouped_product", module.multiply, product.LAUNCHES)
            stack.enter_context(replaced(module, "multiply", noted))
        of_adapters = {**low_rank.LAUNCHES, **grouped_rows.LAUNCHES}
        kinds: tuple[tuple[type, Mapping[str, int]], ...] = (
            (DryKernels, of_adapters),
            (DryExpertKernels, experts.LAUNCHES),
            (DryUpdateKernels, update.LAUNCHES),
            (DryPointwise, pointwise.LAUNCHES),
            (DryDequantise, dequantise.LAUNCHES),
        )
        for kind, launches in kinds:
            for name, many in launches.items():
                noted = _noting(counter, name, getattr(kind, name), many)
                stack.enter_context(replaced(kind, name, staticmethod(noted)))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda kept: kept))
        execute_dry_run(run, 0, counter.step)
    return counter.steps


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, bound to instances as a method is."""

    def method(self: Any, *args: Any, **named: Any) -> Any:
        return function(self, *args, **named)

    return method


def _noting(
    counter: LaunchCounter, name: str, function: Callable[..., Any], launches: int
) -> Callable[..., Any]:
    def noting(*args: Any, **named: Any) -> Any:
        counter.launch(name, launches)
        return function(*args, **named)

    return noting
