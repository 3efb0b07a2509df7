"""The profile of a master: what managers compute is part of its messages."""

from __future__ import annotations

import pytest

from megatron_mux.expert_shape import Placement
from megatron_mux.fusion.device import device_of
from megatron_mux.fusion.even_experts import even_selection
from megatron_mux.fusion.profiler.expert_managers import with_managers
from megatron_mux.fusion.profiler.roofline import roofline
from tests.unit.fusion.planner.test_messages import shape_of


def test_managers_compute_while_messages_are_on_their_way() -> None:
    shape, managers, rows = shape_of("mixtral"), 2, 256.0
    assert shape.experts is not None
    about = {"device": "made-up", "kind": "cpu", "threads": 1}
    alone = roofline(shape, about, 4, most_tokens=1024)
    master = with_managers(alone, shape, managers)
    routed = alone.curves["experts"].at(rows)
    assert all(master.curves[op].at(rows) == (0, 0) for op in ("experts", "experts_fc1", "experts_fc2"))
    assert (
        master.curves["router"] == alone.curves["router"] and master.message_share > alone.message_share == 0
    )

    device = device_of("cpu", "made-up", 1)
    served = Placement.among_managers(shape.experts.count, managers, (0,)).serving(0, 0)
    selected = even_selection(shape.experts.count, shape.experts.routing, 1024)
    copies = sum(len({served[e] for e in row}) for row in selected.tolist()) / len(selected)
    link = device.latency + rows * copies * shape.hidden * 4 / device.link
    for way, seconds in enumerate(master.curves["exchange"].at(rows)):
        # Two messages a pass: together they wait for the managers once.
        assert 2 * seconds == pytest.approx(2 * link + routed[way] / managers)
    lora = "LORA:experts_fc1:8"
    assert master.curves[lora].at(rows)[0] == pytest.approx(alone.curves[lora].at(rows)[0] / managers)
