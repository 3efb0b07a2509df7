"""From what probes took to the curves of a profile: what whole things take is told apart into what the parts add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megatron_mux.fusion.profiler.layer_operators import attention_operators, mlp_operators
from megatron_mux.fusion.profiler.probed_stage import SEGMENT
from megatron_mux.fusion.profiler.profile import Curve, points
from megatron_mux.shape import BackboneShape


def operator_curves(
    timed: Mapping[str, Curve], shape: BackboneShape, depths: Mapping[str, int], divided: int
) -> dict[str, Curve]:
    """The curves of a profile.

    Args:
        timed: What probes took: halves of layers, adapters with their BaseOps, transfers there and back.
        shape: The backbone's.
        depths: How many layers each half (`attention`, `mlp`, `experts`) was timed with.
        divided: Tensor ranks that divide the rows of hidden states.
    """
    curves = dict(timed)
    curves.setdefault("rotary", Curve((1,), (0.0,), (0.0,)))
    for half, depth in depths.items():
        parts = _Parts(curves, shape, half, divided)
        curves[f"glue_{half}"] = _less_parts(curves.pop(f"{half}_half"), depth, parts)
    if "transfer" in curves:  # it was timed there and back
        there = curves["transfer"]
        curves["transfer"] = Curve(there.sizes, *(tuple(s / 2 for s in there.forward),) * 2)
    if "exchange" in curves:  # the same either way
        curves["exchange"] = replace(curves["exchange"], backward=curves["exchange"].forward)
    for name in list(curves):
        parts_of_name = name.split(":")  # an adapter's: curve, BaseOp, size
        if len(parts_of_name) == 3 and parts_of_name[1] in timed:
            curves[name] = _less(curves[name], timed[parts_of_name[1]])
    for name in [n for n in curves if n.endswith("-tasks")]:
        both = curves.pop(name)
        kind, op = name.split(":")[:2]
        alone = curves[name.rpartition(":")[0]]
        curves[f"utilisation:{kind}"] = _utilisation(_less(both, timed[op]), alone)
    return curves


class _Parts:
    """The operators of a half layer, on as many rows as they had when the half was timed.

    A half with experts had a rank's own rows, its shared experts too. The others had all rows, also their norm.

    Args:
        curves: Of operators.
        shape: The backbone's.
        half: Its name.
        divided: Tensor ranks that divide the rows of hidden states.
    """

    def __init__(self, curves: Mapping[str, Curve], shape: BackboneShape, half: str, divided: int) -> None:
        self._curves, self._half, self._divided = curves, half, divided
        self._operators = (
            attention_operators(shape) if half == "attention" else mlp_operators(shape, half == "experts")
        )

    def of(self, rows: float) -> Iterator[tuple[float, float]]:
        """Forward and backward seconds of each."""
        for name in self._operators:
            if not name.startswith("glue"):
                yield self._curves[name].at(rows * self._times(name))
        if self._half == "attention":
            length = min(SEGMENT, int(rows))
            yield self._curves[f"attention:{length}:0"].at(rows / length)

    def _times(self, name: str) -> float:
        """Rows that an operator had for each of those by which its curve counts."""
        if self._half == "experts":
            return 1 / self._divided if name.startswith("shared") else 1
        return self._divided if name == "norm" else 1


def _less_parts(whole: Curve, depth: int, parts: _Parts) -> Curve:
    """What one of `depth` equal half layers takes more than its operators."""
    found: dict[float, tuple[float, float]] = {}
    for i, rows in enumerate(whole.sizes):
        known = list(parts.of(rows))
        found[rows] = (
            max(0.0, whole.forward[i] / depth - sum(f for f, _ in known)),
            max(0.0, whole.backward[i] / depth - sum(b for _, b in known)),
        )
    return points(found)


def _less(whole: Curve, part: Curve) -> Curve:
    """What `whole` takes more than `part`."""
    found = {}
    for i, size in enumerate(whole.sizes):
        forward, backward = part.at(size)
        found[size] = max(0.0, whole.forward[i] - forward), max(0.0, whole.backward[i] - backward)
    return points(found)


def _utilisation(both: Curve, one: Curve) -> Curve:
    """Equation 3's u_a, as it can be measured on any device.

    Two equal adapters that run beside each other take `max(2 u t, t)`: a device that one of them fills takes twice as
    long (u = 1), one that it uses to half takes no longer (u = 1/2). `both` is for twice the rows of `one`.
    """
    found = {}
    for i, size in enumerate(both.sizes):
        alone = one.at(size / 2)
        shares = [
            min(1.0, max(0.05, pair / (2 * single))) if single > 0 else 1.0
            for pair, single in zip((both.forward[i], both.backward[i]), alone, strict=True)
        ]
        found[size / 2] = shares[0], shares[1]
    return points(found)
