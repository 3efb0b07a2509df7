"""Where the time of a step goes, by kind of operator: for any function, on a CPU or a GPU.

On a CPU an operator's own time is its self time there, on a GPU that of the kernels, recorded without the host's
operators, which would slow the host down. The host's own work (views, allocations, Python in autograd functions) has a
kind of its own on a CPU; on a GPU it is what the wall has beside the kernels.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_ATTENTION = (
    r".*(scaled_dot_product|flash_attention|efficient_attention|flash_fwd|flash_bwd|fmha|sdpa|varlen"
    r"|FlashAttn).*"
)
_ADAPTERS = r"(reduce|up|input_gradient|weight_gradient|add_parts|activation|scale|factor_gradient|expand|outer)_kernel"
_DEQUANTISE = r"(nf4|eight_bit)_kernel|.*(kDequantize|kgemm_4bit|Dequantize).*"
_PRODUCTS = (
    r"aten::(addmm_?|mm|bmm|baddbmm_?|_?grouped_mm|mkldnn_linear|linear_backward)|product_kernel"
    r"|.*(gemm|nvjet|cutlass|cublas|splitKreduce).*"
)
_OPTIMIZER = (
    r"aten::_(fused_(adam|sgd|adagrad)|foreach_).*|.*(multi_tensor_apply|FusedAdam).*"
    r"|_update|_tile_squares|_row_sums"
)
_COPIES = (
    r"aten::(copy_|cat|fill_|zero_|index.*|_index.*|embedding.*|gather|scatter.*)"
    r"|.*(copy_kernel|CatArray|memcpy|memset|Memcpy|Memset|FillFunctor|indexSelect|index_elementwise|indexFunc"
    r"|gather_kernel|scatter_gather|embedding).*"
)
_NORMS = (
    r"aten::(.*norm.*)|_?(block_)?(rms|layer)_norm_\w+|_join|_join_backward"
    r"|.*(layer_norm|LayerNorm|RMSNorm|rms_norm|NormTwoOps|lpnorm).*"
)
_LOSS = (
    r"aten::(.*softmax.*|.*nll_loss.*|.*cross_entropy.*|logsumexp)|(liger_cross_entropy|statistics|gradient)_kernel"
    r"|.*(softmax|nll_loss|SoftMax).*"
)
_REDUCTIONS = (
    r"aten::(sum|mean|amax|max|argmax|cumsum)|.*(reduce_kernel|DeviceScan|DeviceReduce|DeviceRadixSort).*"
)
_HOST = (
    r"aten::(.*view.*|reshape|transpose|t|permute|expand.*|.*squeeze|slice|select|.*split.*|chunk|as_strided|narrow"
    r"|detach|empty.*|resize_|flatten|unflatten|alias|_reshape_alias|set_|to|_to_copy|clone|contiguous|linear|matmul"
    r"|item|_local_scalar_dense|is_nonzero|result_type|lift_fresh|new_.*|zeros.*|ones.*|full.*|arange|repeat_.*"
    r"|unbind)|(?!aten::).*"
)

KINDS: tuple[tuple[str, str], ...] = (
    ("attention", _ATTENTION),
    ("adapters", _ADAPTERS),
    ("dequantise", _DEQUANTISE),
    ("matrix products", _PRODUCTS),
    ("optimizer", _OPTIMIZER),
    ("norms", _NORMS),
    ("loss", _LOSS),
    ("copies", _COPIES),
    ("reductions", _REDUCTIONS),
    ("views, allocation, autograd", _HOST),
    ("element-wise", ".*"),
)
"""Kinds of operators, each with a pattern of their names; the first that matches counts.

Triton kernels have their function's name; those of no other kind (`_activate`, `_turn`, Liger's `_swiglu_*`) are
element-wise. `_join` adds sublayers' outputs and computes norms.
"""


GAP_CLASSES = (("to 10 us", 10.0), ("to 50 us", 50.0), ("to 1 ms", 1e3), ("more", math.inf))
"""Classes of gaps between kernels, each with its longest in microseconds."""

_NAMED_GAP = 50.0


class Kernel(NamedTuple):
    """What ran on the GPU: a kernel, a copy or a fill. Times in nanoseconds."""

    name: str
    start: int
    duration: int


def kind_of(name: str, on_device: bool = False) -> str:
    """Return the kind of the operator (on a CPU) or kernel (on a GPU) of this name."""
    for kind, pattern in KINDS:
        if on_device and pattern is _HOST:
            continue
        if re.fullmatch(pattern, name):
            return kind
    raise AssertionError("the last pattern matches everything")


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


def gaps(kernels: Sequence[Kernel], steps: int, most: int = 12) -> dict[str, Any]:
    """Where the GPU idles between kernels.

    Args:
        kernels: Of some steps, in order of start.
        steps: Their number.
        most: Pairs of kernels to name.

    Returns:
        Of a step: `classes`, microseconds and number of gaps by size; `largest`, for gaps of more than 50 us the
        kernels `before` and `after`, their microseconds and number, most microseconds first.
    """
    classes = {name: {"us": 0.0, "gaps": 0.0} for name, _ in GAP_CLASSES}
    pairs: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    last = kernels[0]
    end = last.start + last.duration
    for kernel in kernels:
        gap = (kernel.start - end) / 1e3
        if gap > 0:
            own = classes[next(name for name, bound in GAP_CLASSES if gap <= bound)]
            own["us"] += gap / steps
            own["gaps"] += 1 / steps
            if gap > _NAMED_GAP:
                pair = pairs[last.name[:80], kernel.name[:80]]
                pair[0] += gap / steps
                pair[1] += 1 / steps
        if kernel.start + kernel.duration >= end:
            last, end = kernel, kernel.start + kernel.duration
    ordered = sorted(pairs.items(), key=lambda item: -item[1][0])[:most]
    largest = [
        {"before": before, "after": after, "us": us, "gaps": count}
        for (before, after), (us, count) in ordered
    ]
    return {"classes": classes, "largest": largest}


def profile_by_kind(run: Callable[[], object], device: torch.device) -> dict[str, dict[str, float]]:
    """Run a function under the profiler.

    Args:
        run: The function; it waits for the device before it returns.
        device: Where it computes.

    Returns:
        By kind: `seconds` and `calls`.
    """
    if device.type == "cuda":
        return kernels_by_kind(record_kernels(run))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return _by_kind(
        (kind_of(event.key), event.self_cpu_time_total / 1e6, event.count)
        for event in found.key_averages()
        if event.device_type == DeviceType.CPU and not event.is_user_annotation
    )


def kernels_by_kind(kernels: Iterable[Kernel]) -> dict[str, dict[str, float]]:
    """Sum kernels by kind: `seconds` and `calls`."""
    kinds: dict[str, str] = {}
    for kernel in kernels:
        if kernel.name not in kinds:
            kinds[kernel.name] = kind_of(kernel.name, on_device=True)
    return _by_kind((kinds[kernel.name], kernel.duration / 1e9, 1) for kernel in kernels)


def by_name(kernels: Iterable[Kernel], most: int = 40) -> list[dict[str, Any]]:
    """Sum kernels by name; the `most` that took longest, with their kind."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        found[kernel.name][0] += kernel.duration / 1e9
        found[kernel.name][1] += 1
    ordered = sorted(found.items(), key=lambda item: -item[1][0])[:most]
    return [
        {"name": name[:160], "kind": kind_of(name, on_device=True), "seconds": seconds, "calls": calls}
        for name, (seconds, calls) in ordered
    ]


def _by_kind(events: Iterable[tuple[str, float, int]]) -> dict[str, dict[str, float]]:
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "calls": 0})
    for kind, seconds, calls in events:
        kinds[kind]["seconds"] += seconds
        kinds[kind]["calls"] += calls
    return dict(kinds)


def rows(kinds: Mapping[str, Mapping[str, float]], steps: int) -> list[tuple[str, str, str, str]]:
    """Rows of a table: kind, share of the profiled time, milliseconds and calls in a step."""
    total = sum(found["seconds"] for found in kinds.values())
    ordered = sorted(kinds.items(), key=lambda item: -item[1]["seconds"])
    return [
        (
            kind,
            f"{found['seconds'] / total:.1%}",
            f"{1e3 * found['seconds'] / steps:.0f}",
            f"{found['calls'] / steps:.0f}",
        )
        for kind, found in ordered
    ]
