"""The device that a run computes on: its name, and the limits that rooflines are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mux.gpus import assumed

NODE = 8
"""GPUs of a node."""
_REACHED = 0.8
"""Share of a link that large collectives reach: NCCL's protocol takes a fifth (NVIDIA/nccl-tests, issue 212)."""


@dataclass(frozen=True)
class Device:
    """A device's limits.

    Attributes:
        peak: Floating-point operations a second, by bytes of the dtype (4: fp32, 2: bf16).
        bandwidth: Bytes a second to and from its memory.
        overhead: Seconds to begin an operator.
        link: Bytes a second to the next rank of a node.
        latency: Seconds of a message of no length.
        adds: Whether arithmetic and traffic take turns instead of hiding each other: a CPU's products read their
            weights through caches that they fill again and again.
        network: Bytes a second to a rank of another node; None: as `link`.
    """

    name: str
    peak: Mapping[int, float]
    bandwidth: float
    overhead: float
    link: float
    latency: float
    adds: bool = False
    network: float | None = None

    def seconds(self, flops: float, traffic: float, itemsize: int) -> float:
        """Of an operator with so many operations and bytes."""
        arithmetic, moving = flops / self.peak[itemsize], traffic / self.bandwidth
        return (arithmetic + moving if self.adds else max(arithmetic, moving)) + self.overhead

    def link_over(self, ranks: int) -> float:
        """Bytes a second between neighbours of a group that spans so many ranks, which fill one node after another."""
        return self.link if ranks <= NODE or self.network is None else self.network


def device_of(kind: str, name: str, threads: int) -> Device:
    """The limits of a device.

    Args:
        kind: `cuda` or `cpu`.
        name: The GPU's name; see `assumed` for one that is not known.
        threads: Threads that compute, on a CPU.
    """
    if kind == "cuda":
        gpu, called = assumed(name)
        peak = {2: gpu.half, 4: gpu.single, 8: gpu.single / 2}
        link, network = _REACHED * gpu.link, _REACHED * gpu.network
        return Device(called, peak, gpu.bandwidth, 8e-6, link, 2e-5, network=network)
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
