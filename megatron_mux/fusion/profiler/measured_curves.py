"""From what probes took to the curves of a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron_mux.fusion.profiler.core_attention import AttentionCosts
from megatron_mux.fusion.profiler.probed_stage import SEGMENT
from megatron_mux.fusion.profiler.profile import Curve, points


def profile_curves(timed: Mapping[str, Curve], depths: Mapping[str, int], divided: int) -> dict[str, Curve]:
    """The curves of a profile.

    Args:
        timed: What probes took: half layers, core attention, what adapters add, transfers there and back.
        depths: How many layers each half (`attention`, `mlp`, `experts`) was timed with.
        divided: Tensor ranks that divide the rows of hidden states.
    """
    curves = {name: curve for name, curve in timed.items() if not name.startswith("attention:")}
    curves |= _attention(timed)
    for name in (f"{half}_half" for half in depths):
        depth = depths[name.removesuffix("_half")]
        curves[name] = _changed(curves[name], lambda _, s, way, depth=depth: s / depth)  # type: ignore[misc]
    cores = AttentionCosts(curves)

    def without_core(rows: float, seconds: float, way: int) -> float:
        length = min(SEGMENT, int(rows))
        return seconds - float(cores.of(length, 0)[way]) * rows / length - float(cores.launch[way])

    curves["attention_half"] = _changed(curves["attention_half"], without_core)
    if "experts_half" in curves:
        curves |= _experts(curves.pop("experts_half"), curves, divided)
    if "transfer" in curves:  # it was timed there and back
        there = _changed(curves["transfer"], lambda _, s, way: s / 2)
        curves["transfer"] = replace(there, backward=there.forward)
    if "exchange" in curves:  # the same either way
        curves["exchange"] = replace(curves["exchange"], backward=curves["exchange"].forward)
    for name in [n for n in curves if n.endswith("-tasks")]:
        alone, kind = curves[name.rpartition(":")[0]], name.partition(":")[0]
        curves[f"utilisation:{kind}"] = _utilisation(curves.pop(name), alone)
    # What is a difference of two noisy figures may come out below zero.
    return {name: _changed(curve, lambda _, s, way: max(0.0, s)) for name, curve in curves.items()}


def _changed(curve: Curve, change: Callable[[float, float, int], float]) -> Curve:
    """A curve with what `change` makes of size, seconds and way (0: forward, 1: backward) of each point."""
    forward, backward = (
        tuple(change(size, s, way) for size, s in zip(curve.sizes, seconds, strict=True))
        for way, seconds in enumerate((curve.forward, curve.backward))
    )
    return Curve(curve.sizes, forward, backward)


def _attention(timed: Mapping[str, Curve]) -> dict[str, Curve]:
    """Seconds of a sequence over its past, by length; and `attention_launch`, of a batch whatever its sequences.

    Where one sequence and eight were timed, a sequence takes what another one more takes.
    """
    known: dict[int, dict[int, Curve]] = {}
    for name, curve in timed.items():
        if name.startswith("attention:"):
            _, length, past = name.split(":")
            known.setdefault(int(length), {})[int(past)] = curve

    def of_one(curve: Curve, way: int) -> float:
        first, last = curve.at(1)[way], curve.at(8)[way]
        return max(0.0, (last - first) / 7) if len(curve.sizes) > 1 else first - launch[way]

    shortest = known[min(known)][0]
    launch = [0.0, 0.0]
    launch = [max(0.0, shortest.at(1)[way] - of_one(shortest, way)) for way in range(2)]
    return {
        "attention_launch": Curve((1,), (launch[0],), (launch[1],)),
        **{
            f"attention:{length}": points(
                {past: (of_one(curve, 0), of_one(curve, 1)) for past, curve in of_length.items()}
            )
            for length, of_length in known.items()
        },
    }


def _experts(half: Curve, parts: Mapping[str, Curve], divided: int) -> dict[str, Curve]:
    """Half layers with experts in their parts, which add up to them.

    The half had a rank's own rows, also for shared experts; `parts` had all rows.
    """

    def shared(rows: float, way: int) -> float:
        return parts["shared"].at(rows / divided)[way] if "shared" in parts else 0.0

    def routed(rows: float, seconds: float, way: int) -> float:
        return min(parts["experts"].at(rows)[way], max(0.0, seconds - shared(rows, way)))

    def rest(rows: float, seconds: float, way: int) -> float:
        return max(0.0, seconds - shared(rows, way) - routed(rows, seconds, way))

    return {"router": _changed(half, rest), "experts": _changed(half, routed)}


def _utilisation(both: Curve, alone: Curve) -> Curve:
    """Equation 3's u_a, as it can be measured on any device.

    Two equal adapters that run beside each other take `max(2 u t, t)`: a device that one of them fills takes twice as
    long (u = 1), one that it uses to half takes no longer (u = 1/2). `both` is for twice the rows of `alone`.
    """

    def share(rows: float, pair: float, way: int) -> float:
        single = alone.at(rows / 2)[way]
        return min(1.0, max(0.05, pair / (2 * single))) if single > 0 else 1.0

    shares = _changed(both, share)
    return replace(shares, sizes=tuple(size / 2 for size in both.sizes))
