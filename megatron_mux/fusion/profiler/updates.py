"""Seconds of optimizer steps, by what runs: on a GPU few launches for all tasks, elsewhere operators task after task.

A step is the norm of the gradients, clipping, the optimizer's update, the copy in the compute dtype and gradients made
zero, as in `engine.updates`; a test holds the operators measured here against those.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.fusion.device import Device
from megatron_mux.kernels.triton_choice import has_triton, suits_triton
from megatron_mux.kernels.update.table import LAUNCHES, Piece, UpdateTable, options_of
from megatron_mux.optimizers.adamw import AdamW
from megatron_mux.optimizers.optimizer import Optimizer, Options, ParamGroup, ParamLayout, ParamSlice
from megatron_mux.optimizers.registry import OPTIMIZERS

_SMALL, _LARGE, _MANY = 1 << 12, 1 << 20, 16
"""Values of a small and of a large tensor, and the tensors of a task with many."""
_AROUND = 12
"""Launches of a task's step besides its optimizer's: norm, clipping, copy, gradients made zero."""
_RANK = 16
"""Rows of the matrices that are stepped."""


@dataclass(frozen=True)
class UpdateSeconds:
    """What an optimizer step takes.

    Attributes:
        task: For each task; with `together` once for all tasks of a bucket.
        run: For each group of parameters that are stepped as one.
        tensor: For each parameter.
        value: For each trained value.
        together: Whether kernels step all tasks of a bucket at once.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    task: float
    run: float
    tensor: float
    value: float
    together: bool = False


def estimated_updates(device: Device, on_gpu: bool) -> dict[str, UpdateSeconds]:
    """Estimate by numbers of launches and bytes, for each optimizer by its first name."""
    seconds = {}
    for kind in dict.fromkeys(OPTIMIZERS.values()):
        together = on_gpu and kind.together
        launches = (sum(LAUNCHES.values()), 0) if together else (_AROUND, kind.launches)
        task, run = (count * device.overhead for count in launches)
        around = 10 if together else 22  # bytes of norm, copy and zeros; of clipping, too
        seconds[kind.names[0]] = UpdateSeconds(
            task, run, 0.0, (kind.traffic + around) / device.bandwidth, together
        )
    return seconds


def measured_updates(
    device: torch.device, dtype: torch.dtype, rounds: int, synchronize: Callable[[], None]
) -> dict[str, UpdateSeconds]:
    """Measure every optimizer that is installed, by its first name.

    Args:
        rounds: Measurements, of which the median counts.
        synchronize: Waits for the device.
    """

    def seconds(kind: type[Optimizer], tensors: int, runs: int, size: int) -> float:
        step, taken = sample_step(kind, tensors, runs, size, device, dtype), []
        for _ in range(rounds + 1):  # the first one warms up
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    measured = {}
    for kind in dict.fromkeys(OPTIMIZERS.values()):
        if kind.needs and importlib.util.find_spec(kind.needs) is None:
            continue
        small, large = seconds(kind, 1, 1, _SMALL), seconds(kind, 1, 1, _LARGE)
        many, divided = seconds(kind, _MANY, 1, _SMALL), seconds(kind, _MANY, _MANY, _SMALL)
        value = max(0.0, large - small) / (_LARGE - _SMALL)
        tensor = max(0.0, (many - small) / (_MANY - 1) - _SMALL * value)
        run = max(0.0, divided - many) / (_MANY - 1)
        task = max(0.0, small - run - tensor - _SMALL * value)
        measured[kind.names[0]] = UpdateSeconds(task, run, tensor, value, _is_together(kind, device))
    return measured


def sample_step(
    kind: type[Optimizer], tensors: int, runs: int, size: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """The optimizer step of a made-up task.

    Args:
        tensors: Number of parameters.
        runs: Groups of them that are stepped as one.
        size: Values of each.
    """
    values = torch.zeros(tensors * size, device=device)
    gradients = torch.ones_like(values)
    copies = values if dtype == values.dtype else torch.empty_like(values, dtype=dtype)
    span, each = len(values) // runs, tensors // runs
    alike = [ParamGroup(i * span, (i + 1) * span, 1e-3 * i) for i in range(runs)]
    shape, nowhere = (_RANK, size // _RANK), nn.Parameter(torch.empty(0))
    slices = [
        ParamSlice(
            AdapterParameter(str(i), nowhere, shape),
            shape,
            alike[i // each]._replace(first=i * size, last=(i + 1) * size),
        )
        for i in range(tensors)
    ]
    optimizer = kind(ParamLayout(values, gradients, alike, slices), Options())
    skip = torch.zeros(1, device=device)
    if _is_together(kind, device):
        return _step_together(optimizer, copies, skip)

    def step() -> None:
        (norm,) = torch._foreach_norm([gradients])
        norm = norm.double().square().sqrt()
        gradients.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0).to(gradients.dtype))
        optimizer.update(0, 1e-3, skip[0])
        if copies is not values:
            copies.copy_(values)
        gradients.zero_()

    return step


def _step_together(optimizer: Optimizer, copies: Tensor, skip: Tensor) -> Callable[[], None]:
    """The step of kernels that would step other tasks with it."""
    from megatron_mux.kernels.update import triton as triton_update

    layout, device = optimizer.layout, skip.device
    average, square = optimizer.tensors if isinstance(optimizer, AdamW) else (None, None)

    def piece(group: ParamGroup) -> Piece:
        tensors = (
            layout.values,
            layout.gradients,
            average,
            square,
            None if copies is layout.values else copies,
        )
        value, gradient, first, second, copy = (
            None if t is None else t[group.first : group.last] for t in tensors
        )
        assert value is not None and gradient is not None
        return Piece(0, value, gradient, first, second, copy, group.weight_decay)

    table = UpdateTable([piece(group) for group in layout.groups], 1)
    options = torch.tensor([options_of(1e-3, *optimizer.options, 1.0, 1)], dtype=torch.float64, device=device)
    stopped = skip.bool()

    def step() -> None:
        triton_update.update_(table, options, triton_update.squared_norms(table), stopped)

    return step


def _is_together(kind: type[Optimizer], device: torch.device) -> bool:
    return kind.together and suits_triton(device, torch.float32) and has_triton()
