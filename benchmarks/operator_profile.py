"""Where the time of a step goes, by kind of operator: for any function, on a CPU or a GPU.

On a CPU an operator's own time is its self time there, on a GPU that of the kernels. The host's own work (views,
allocations, Python in autograd functions) has a kind of its own on a CPU; on a GPU it is not in the table.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_ATTENTION = r".*(scaled_dot_product|flash_attention|efficient_attention|flash_fwd|flash_bwd|fmha|varlen).*"
_PRODUCTS = (
    r"aten::(addmm_?|mm|bmm|baddbmm_?|_grouped_mm|mkldnn_linear|linear_backward)|.*(gemm|nvjet|cutlass).*"
)
_OPTIMIZER = r"aten::_(fused|foreach)_.*|.*multi_tensor_apply.*"
_COPIES = r"aten::(copy_|cat|fill_|zero_|index.*|_index.*|embedding.*|gather)|.*(copy_kernel|CatArray|memcpy|memset).*"
_REDUCTIONS = r"aten::(.*norm.*|.*softmax.*|sum|mean|amax|max|argmax|cumsum|.*nll_loss.*)|.*reduce_kernel.*"
_HOST = (
    r"aten::(.*view.*|reshape|transpose|t|permute|expand.*|.*squeeze|slice|select|.*split.*|chunk|as_strided|narrow"
    r"|detach|empty.*|resize_|flatten|unflatten|alias|_reshape_alias|set_|to|_to_copy|clone|contiguous|linear|matmul"
    r"|item|_local_scalar_dense|is_nonzero|result_type|lift_fresh|new_.*|zeros.*|ones.*|full.*|arange|repeat_.*"
    r"|unbind)|(?!aten::).*"
)

KINDS: tuple[tuple[str, str], ...] = (
    ("attention", _ATTENTION),
    ("matrix products", _PRODUCTS),
    ("optimizer", _OPTIMIZER),
    ("copies", _COPIES),
    ("reductions and norms", _REDUCTIONS),
    ("views, allocation, autograd", _HOST),
    ("element-wise", ".*"),
)
"""Kinds of operators, each with a pattern of their names; the first that matches counts."""


def kind_of(name: str, on_device: bool = False) -> str:
    """Return the kind of the operator (on a CPU) or kernel (on a GPU) of this name."""
    for kind, pattern in KINDS:
        if on_device and pattern is _HOST:
            continue
        if re.fullmatch(pattern, name):
            return kind
    raise AssertionError("the last pattern matches everything")


def profile_by_kind(run: Callable[[], object], device: torch.device) -> dict[str, dict[str, float]]:
    """Run a function under the profiler.

    Args:
        run: The function; it waits for the device before it returns.
        device: Where it computes.

    Returns:
        By kind: `seconds` and `calls`.
    """
    on_device = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device
    with profile(activities=activities) as found:
        run()
    return _by_kind(found.key_averages(), on_device)


def _by_kind(events: Iterable[Any], on_device: bool) -> dict[str, dict[str, float]]:
    wanted = DeviceType.CUDA if on_device else DeviceType.CPU
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "calls": 0})
    for event in events:
        if event.device_type != wanted or event.is_user_annotation:
            continue
        of_kind = kinds[kind_of(event.key, on_device)]
        time = event.self_device_time_total if on_device else event.self_cpu_time_total
        of_kind["seconds"] += time / 1e6
        of_kind["calls"] += event.count
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
