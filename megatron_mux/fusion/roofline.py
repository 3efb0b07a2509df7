"""A profile that nobody has measured: the roofline of the device, its peak and its bandwidth.

An operator takes the longer of its arithmetic at the device's peak and its traffic at the device's bandwidth (on a CPU
both), and a little to begin. Good enough to compare layouts; predicted seconds may be far off, and a plan made from it
says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_mux.base_ops import BaseOpName
from megatron_mux.fusion.profile import Curve, Profile, grid_up_to
from megatron_mux.gpus import GPUS, find
from megatron_mux.memory.forms.sites import OPS


@dataclass(frozen=True)
class Device:
    """A device's limits.

    Attributes:
        name: What it is called.
        peak: Floating-point operations a second, by bytes of the dtype (4: fp32, 2: bf16).
        bandwidth: Bytes a second to and from its memory.
        overhead: Seconds to begin an operator.
        link: Bytes a second to the next rank.
        latency: Seconds of a message of no length.
        adds: Whether arithmetic and traffic take turns instead of hiding each other: a CPU's products read their
            weights through caches that they fill again and again.
    """

    name: str
    peak: Mapping[int, float]
    bandwidth: float
    overhead: float
    link: float
    latency: float
    adds: bool = False

    def seconds(self, flops: float, traffic: float, itemsize: int) -> float:
        """Of an operator with so many operations and bytes."""
        arithmetic, moving = flops / self.peak[itemsize], traffic / self.bandwidth
        return (arithmetic + moving if self.adds else max(arithmetic, moving)) + self.overhead


def device_of(kind: str, name: str, threads: int) -> Device:
    """The limits of a device.

    Args:
        kind: `cuda` or `cpu`.
        name: The GPU's name; one that is not known is taken for an A100.
        threads: Threads that compute, on a CPU.
    """
    if kind == "cuda":
        gpu = find(name) or GPUS["A100"]
        peak = {2: gpu.half, 4: gpu.single, 8: gpu.single / 2}
        return Device(name, peak, gpu.bandwidth, 8e-6, 50e9, 2e-5)
    core = 90e9  # fp32 of a server core with AVX2 or wider, as products of matrices reach it
    return Device(
        f"{threads} CPU thread(s)",
        {2: core * threads / 2, 4: core * threads, 8: core * threads / 2},
        6e9 * threads,
        2e-5,
        3e9,
        1e-4,
        adds=True,
    )


def about_device(kind: str, threads: int) -> dict[str, Any]:
    """What a profile depends on of a device.

    Args:
        kind: `cpu` or `cuda`: what this process computes on; or a GPU's name, such as `H100`, that is elsewhere.
        threads: Threads that compute, on a CPU.
    """
    if kind not in ("cpu", "cuda"):
        return {"device": kind, "kind": "cuda", "threads": 0}
    if kind == "cuda":
        import torch

        return {"device": torch.cuda.get_device_name(), "kind": kind, "threads": 0}
    return {"device": cpu_name(), "kind": kind, "threads": threads, "cores": os.cpu_count()}


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def roofline(
    shape: Any, about: Mapping[str, Any], itemsize: int, tensor_parallel: int = 1, most_tokens: int = 16384
) -> Profile:
    """The estimated profile.

    Args:
        shape: The backbone's sizes.
        about: What `about_device` says, and whatever else names the run.
        itemsize: Bytes of the backbone's dtype.
        tensor_parallel: Ranks that share each layer.
        most_tokens: Rows of the last point of the curves.
    """
    device = device_of(about["kind"], about["device"], about["threads"])
    sizes = grid_up_to(most_tokens)

    def curve(work: Callable[[float], tuple[float, float]], backward: float = 1.0) -> Curve:
        """`work` gives FLOP and bytes; the backward takes `backward` times as long."""
        seconds = []
        for size in sizes:
            flops, traffic = work(size)
            seconds.append(device.seconds(flops, traffic, itemsize))
        return Curve(tuple(sizes), tuple(seconds), tuple(backward * s for s in seconds))

    def product(k: float, n: float) -> Curve:
        return curve(lambda rows: (2 * rows * k * n, itemsize * (rows * (k + n) + k * n)))

    def passes(width: float) -> Curve:
        """Reading and writing rows of so many elements."""
        return curve(lambda rows: (rows * width, itemsize * rows * width))

    tp, h = tensor_parallel, shape.hidden
    inner = shape.out_features("linear_fc1") / tp
    curves: dict[str, Curve] = {
        **{str(op): product(*_widths(shape, op, tp)) for op in OPS},
        "norm": passes(2 * h),
        "rotary": passes(2 * (shape.heads + shape.kv_heads) * shape.head_dim / tp if any(shape.ropes) else 0),
        "activation": passes(inner + shape.ffn / tp),
        "glue_attention": passes(3 * h),
        "glue_mlp": passes(3 * h),
        "entry": passes(2 * h),
        "head": curve(_head(h, shape.vocab / tp, itemsize), backward=0.0),
        **_attention(shape, device, itemsize, tp),
        **_adapters(shape, tp, curve, itemsize),
        "transfer": _link(sizes, device, h * itemsize),
    }
    if tp > 1:
        curves["all_reduce"] = _link(sizes, device, 2 * h * itemsize * (tp - 1) / tp)
    return Profile(
        source="roofline",
        about={**about, "device": device.name},
        curves=curves,
        attention_in_one_call=about["kind"] == "cuda",
        tensor_seconds=2 * device.overhead,
        element_seconds=28 / device.bandwidth,
        sequence_seconds=5e-5,
        step_seconds=10 * device.overhead,
    )


def _head(hidden: int, vocab: float, itemsize: int) -> Callable[[float], tuple[float, float]]:
    """FLOP and bytes of labels' losses, forward and gradient at once: 4 V H a label."""
    return lambda labels: (4 * labels * hidden * vocab, itemsize * 2 * (hidden + labels) * vocab)


def _widths(shape: Any, op: BaseOpName, tensor_parallel: int) -> tuple[float, float]:
    """Input and output width of a BaseOp on a rank."""
    rows = tensor_parallel if op in ("linear_proj", "linear_fc2") else 1
    return shape.in_features(op) / rows, shape.out_features(op) / (tensor_parallel / rows)


def _link(sizes: list[int], device: Device, bytes_per_row: float) -> Curve:
    seconds = tuple(device.latency + size * bytes_per_row / device.link for size in sizes)
    return Curve(tuple(sizes), seconds, seconds)


def _attention(shape: Any, device: Device, itemsize: int, tp: int) -> dict[str, Curve]:
    """Scores and values, twice that backward."""
    found: dict[str, Curve] = {}
    for length in grid_up_to(8192, least=8):
        for past in (0, 256, 1024, 4096):
            pairs = length * (length + 1) / 2 + length * past
            flops = 4 * pairs * shape.heads * shape.head_dim / tp
            keys = 2 * (length + past) * shape.kv_heads + 2 * length * shape.heads
            traffic = itemsize * keys * shape.head_dim / tp
            seconds = (
                device.seconds(2 * flops, traffic, itemsize),
                device.seconds(16 * flops, 8 * traffic, itemsize),
            )
            found[f"attention:{length}:{past}"] = Curve((1, 8), seconds, tuple(2 * s for s in seconds))
    return found


def _adapters(shape: Any, tp: int, curve: Callable[..., Curve], itemsize: int) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for op in OPS:
        k, n = _widths(shape, op, tp)
        for rank in (8, 64):

            def low_rank(rows: float, k: float = k, n: float = n, rank: int = rank) -> tuple[float, float]:
                return 2 * rows * rank * (k + n), itemsize * rows * (k + 2 * n)

            def dropped(rows: float, k: float = k, n: float = n, rank: int = rank) -> tuple[float, float]:
                return 2 * rows * rank * (k + n), itemsize * rows * (4 * k + 2 * n)

            found[f"LORA:{op}:{rank}"] = curve(low_rank, backward=2.0)
            found[f"LORA_DROPOUT:{op}:{rank}"] = curve(dropped, backward=2.0)
            if op in ("linear_proj", "linear_fc2"):
                found[f"BOTTLENECK:{op}:{rank}"] = curve(
                    lambda rows, n=n, rank=rank: (4 * rows * rank * n, itemsize * rows * 3 * n), backward=2.0
                )
        found[f"IA3:{op}:0"] = curve(lambda rows, n=n: (rows * n, 2 * itemsize * rows * n), backward=2.0)
        found[f"DIFF_PRUNING:{op}:0"] = curve(
            lambda rows, k=k, n=n: (2 * rows * k * n, itemsize * (rows * (k + 2 * n) + 4 * k * n)),
            backward=2.0,
        )
    for kind in ("LORA", "LORA_DROPOUT", "BOTTLENECK", "IA3", "DIFF_PRUNING"):
        found[f"utilisation:{kind}"] = Curve((1,), (1.0,), (1.0,))
    return found
