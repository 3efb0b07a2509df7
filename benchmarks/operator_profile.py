"""Where the GPU's time of a step goes, by kind of kernel.

Kernels are recorded without the host's operators, which would slow the host down.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS: tuple[tuple[str, str], ...] = (
    (
        "attention",
        r".*(flash_attention|efficient_attention|flash_fwd|flash_bwd|fmha|sdpa|varlen|FlashAttn).*",
    ),
    (
        "adapters",
        r"(reduce|up|input_gradient|weight_gradient|add_parts|activation|scale|factor_gradient|expand|outer)_kernel",
    ),
    ("dequantise", r"(nf4|eight_bit)_kernel|.*(kDequantize|kgemm_4bit|Dequantize).*"),
    ("matrix products", r"product_kernel|.*(gemm|nvjet|cutlass|cublas|splitKreduce).*"),
    ("optimizer", r".*(multi_tensor_apply|FusedAdam).*|_update|_tile_squares|_row_sums"),
    (
        "norms",
        r"_?(block_)?(rms|layer)_norm_\w+|_join(_backward)?|.*(layer_norm|LayerNorm|RMSNorm|rms_norm|NormTwoOps|lpnorm).*",
    ),
    ("loss", r"(liger_cross_entropy|statistics|gradient)_kernel|.*(softmax|nll_loss|SoftMax).*"),
    (
        "copies",
        r".*(copy_kernel|CatArray|[mM]emcpy|[mM]emset|FillFunctor|indexSelect|index_elementwise|indexFunc|gather|embedding).*",
    ),
    ("reductions", r".*(reduce_kernel|DeviceScan|DeviceReduce|DeviceRadixSort).*"),
    ("element-wise", ".*"),
)
"""Kinds of kernels, each with a pattern of their names; the first that matches counts.

Triton kernels have their function's name; those of no other kind (`_activate`, `_turn`, Liger's `_swiglu_*`) are
element-wise. `_join` adds sublayers' outputs and computes norms.
"""


class Kernel(NamedTuple):
    """What ran on the GPU: a kernel, a copy or a fill. Times in nanoseconds."""

    name: str
    start: int
    duration: int


def kind_of(name: str) -> str:
    """Return the kind of the kernel of this name."""
    return next(kind for kind, pattern in KINDS if re.fullmatch(pattern, name))


def record_kernels(run: Callable[[], object]) -> list[Kernel]:
    """Run a function, which waits for the GPU before it returns; returns what ran on the GPU, in order of start."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events = found.profiler.kineto_results.events()
    kernels = [
        Kernel(event.name(), event.start_ns(), event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one kernel ran: the union of their intervals.

    Args:
        kernels: In order of start.
    """
    total, end = 0, 0
    for kernel in kernels:
        stop = kernel.start + kernel.duration
        total += max(0, stop - max(kernel.start, end))
        end = max(end, stop)
    return total / 1e9


def kernels_by_kind(kernels: Iterable[Kernel]) -> dict[str, dict[str, float]]:
    """Sum kernels by kind: `seconds` and `calls`."""
    names: dict[str, str] = {}
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "calls": 0})
    for kernel in kernels:
        if kernel.name not in names:
            names[kernel.name] = kind_of(kernel.name)
        own = found[names[kernel.name]]
        own["seconds"] += kernel.duration / 1e9
        own["calls"] += 1
    return dict(found)
