"""A profile: the seconds of a backbone's operators on a device, by size. Data, nothing else.

It is measured once (`measure.py`) or estimated (`roofline.py`); `profile_store.py` keeps the measured ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict

from megatron_mux.adapters.registry import KINDS
from megatron_mux.fusion.profiler.updates import UpdateSeconds
from megatron_mux.kernels.low_rank.choice import KernelChoice

FORMAT: Literal[5] = 5


@dataclass(frozen=True)
class Curve:
    """Seconds over a size.

    Attributes:
        sizes: Ascending.
        forward, backward: Seconds at each; all zero where there is no such pass.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    sizes: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or not len(self.sizes) == len(self.forward) == len(self.backward):
            raise ValueError("a curve has as many sizes as seconds, and at least one")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError("the sizes of a curve ascend")

    def at(self, size: float) -> tuple[float, float]:
        """Forward and backward seconds: between two points linear; below the first as there, above the last on the
        slope of the last two."""
        (forward,), (backward,) = self.many(np.array([float(size)])).tolist()
        return forward, backward

    @cached_property
    def _tables(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return np.array(self.sizes, np.float64), np.array([self.forward, self.backward])

    def many(self, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The same of many sizes `[B]`: `[2, B]`."""
        known, seconds = self._tables
        if len(known) == 1:
            return np.repeat(seconds, len(sizes), axis=1)
        clamped = np.maximum(sizes, known[0])
        i = np.minimum(np.maximum(np.searchsorted(known, clamped, side="right"), 1), len(known) - 1)
        share = (clamped - known[i - 1]) / (known[i] - known[i - 1])
        value: npt.NDArray[np.float64] = seconds[:, i - 1] + share * (seconds[:, i] - seconds[:, i - 1])
        return np.maximum(value, 0.0)


def summed(curves: Sequence[Curve]) -> Curve:
    """One curve for several operators, exact between their points."""
    sizes = sorted({size for curve in curves for size in curve.sizes})
    sums = [[curve.at(size) for curve in curves] for size in sizes]
    return Curve(
        tuple(sizes),
        tuple(sum(f for f, _ in here) for here in sums),
        tuple(sum(b for _, b in here) for here in sums),
    )


@dataclass(frozen=True)
class Profile:
    """The seconds of a backbone's operators on a device at one tensor-parallel degree and one division of experts.

    Rows are those of a micro-batch, on all tensor ranks together. Seconds of experts are those of a rank when each of
    the expert ranks has as many rows, and experts are selected evenly.

    Attributes:
        source: Whether the seconds were measured or estimated.
        about: What they depend on: device, threads, dtype, backbone, versions.
        curves: By name. Over rows: those of `layer_operators` (half layers and BaseOps), `entry` (embedding, angles),
            `all_reduce`, `transfer`, `exchange` (one message of rows among expert ranks, one way),
            `<KIND>:<BaseOp>:<size>` (what an adapter adds), `utilisation:<KIND>` (equation 3's u_a as a share, not in
            seconds). Over labels: `head` (final norm and loss). Over the past: `attention:<length>`, core attention of
            one sequence. Of one point: `attention_launch`, that of a batch whatever its sequences, `exchange_sizes`, by
            which expert ranks agree on the sizes of their messages, and `dequantise`, a layer's weights if they are
            quantised.
        message_share: Part of the processor's time that a message of tensor ranks, or without them of expert ranks,
            takes while it is on its way: of a core, the communication thread's; of a GPU, that of the multiprocessors
            that move the message.
        links: Whether transfers between ranks were measured too; a process alone cannot.
        kernels: Of several kernels for the low-rank terms of a BaseOp, the fastest; empty where there is one.
        updates: What an optimizer step takes, by the optimizer's first name.
        sequence_seconds: Reading and laying out a sequence.
        step_seconds: Of a step whatever is in it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    source: Literal["measured", "roofline"]
    about: dict[str, Any]
    curves: dict[str, Curve]
    message_share: float = 0.0
    links: bool = False
    kernels: KernelChoice = ()
    updates: dict[str, UpdateSeconds] = field(default_factory=dict)
    sequence_seconds: float = 0.0
    step_seconds: float = 0.0
    format: Literal[5] = FORMAT

    @property
    def key(self) -> str:
        """Names the file."""
        return key_of(self.about)

    @property
    def description(self) -> str:
        """Where predictions from it come from, for a plan and for people."""
        device = self.about.get("device", "?")
        if self.source == "measured":
            busy = self.about.get("busy", 1)
            return f"profile {self.key} measured on {device}{f', {busy} processes busy' * (busy > 1)}"
        return f"roofline of {device} (no profile: megatron-mux profile measures one)"


def key_of(about: Mapping[str, Any], form: int = FORMAT) -> str:
    """A short name of everything that seconds depend on, of the adapter kinds that were known, and of the format."""
    text = json.dumps({**about, "format": form, "adapters": sorted(KINDS)}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def probe_sizes(most: int, least: int = 16) -> list[int]:
    """Powers of two from `least` to `most`, both included."""
    sizes = [least]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes


def points(curve: Mapping[float, tuple[float, float]]) -> Curve:
    """A curve from its points."""
    sizes: Sequence[float] = sorted(curve)
    return Curve(tuple(sizes), tuple(curve[s][0] for s in sizes), tuple(curve[s][1] for s in sizes))
