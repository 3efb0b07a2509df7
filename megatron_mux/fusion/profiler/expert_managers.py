"""The profile of a master whose routed experts are on expert managers (VELA, section IV.A).

The master sends all rows that managers compute over its own link, waits while they compute, and receives as much.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.expert_shape import Placement
from megatron_mux.fusion.device import device_of
from megatron_mux.fusion.even_experts import even_selection
from megatron_mux.fusion.profiler.profile import Curve, Profile
from megatron_mux.fusion.profiler.roofline import MESSAGE_SHARE
from megatron_mux.shape import BackboneShape

_SAMPLE = 1024
"""Rows from which the number of managers of a row is taken."""


def with_managers(profile: Profile, shape: BackboneShape, managers: int) -> Profile:
    """The seconds of a master, from those of a process that has all experts.

    Managers share the pairs evenly. A message of rows is on its way as long as the link takes, and half of the time in
    which managers compute. Nothing of it is measured: the link is the device's, by its roofline.

    Args:
        profile: Of a process that has all experts.
    """
    experts = shape.experts
    assert experts is not None
    about, curves = profile.about, dict(profile.curves)
    device = device_of(about["kind"], about["device"], about["threads"])
    placement = Placement.among_managers(experts.count, managers, (0,))
    selected = even_selection(experts.count, experts.routing, _SAMPLE)
    served = np.asarray(placement.serving(0, 0))[selected]  # [R, K]
    copies = float(np.mean([len(set(row)) for row in served.tolist()]))
    itemsize = 2 if about.get("dtype") == "bfloat16" else 4
    routed = curves["experts"]
    sizes = routed.sizes
    seconds = []
    for size in sizes:
        link = device.latency + size * copies * shape.hidden * itemsize / device.link
        seconds.append(tuple(link + way / managers / 2 for way in routed.at(size)))
    nothing = Curve((1,), (0.0,), (0.0,))
    curves |= dict.fromkeys(("experts", *EXPERT_OPS), nothing)
    curves["exchange"] = Curve(sizes, tuple(f for f, _ in seconds), tuple(b for _, b in seconds))
    curves["exchange_sizes"] = Curve((1,), (device.latency,), (device.latency,))
    for name, curve in profile.curves.items():
        if any(f":{op}:" in name for op in EXPERT_OPS):  # what adapters add there: on managers, too
            shares = (tuple(s / managers for s in way) for way in (curve.forward, curve.backward))
            curves[name] = Curve(curve.sizes, *shares)
    return replace(profile, curves=curves, message_share=MESSAGE_SHARE[about["kind"]])
