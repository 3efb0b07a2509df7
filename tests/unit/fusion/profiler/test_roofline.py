"""A roofline knows every operator of every kind of layer, and counts what a rank computes and sends for experts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.registry import read_shape
from megatron_mux.base_ops import EXPERT_OPS
from megatron_mux.expert_shape import Routing
from megatron_mux.fusion.device import Device
from megatron_mux.fusion.even_experts import ExpertShares, even_selection
from megatron_mux.fusion.profiler import roofline as module
from megatron_mux.fusion.profiler.layer_operators import base_ops, layer_operators
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.fusion.profiler.profile_store import about_run
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.shape import BackboneShape
from tests import tiny_models

ABOUT = {"device": "made-up", "kind": "cpu", "threads": 2}
DIVISIONS = {
    "one process": (1, 1, 1),
    "expert ranks": (1, 2, 1),
    "expert ranks among tensor ranks": (2, 2, 1),
    "experts divided": (2, 1, 2),
    "expert ranks of divided experts": (2, 2, 2),
}
"""Ranks that share a layer, expert ranks, ranks that share an expert."""


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BackboneShape]:
    found = {}
    for name in tiny_models.WITH_EXPERTS:
        path: Path = tmp_path_factory.mktemp(name) / "config.json"
        tiny_models.config(name).to_json_file(path)
        found[name] = read_shape(path)
    return found


def profile_of(shape: BackboneShape, tensor: int, expert: int, expert_tensor: int, **changes: Any) -> Profile:
    about = {**ABOUT, "expert_parallel": expert, "expert_tensor": expert_tensor}
    return roofline(shape, about, 4, tensor, **changes)


@pytest.mark.parametrize("name", tiny_models.WITH_EXPERTS)
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_operator_has_a_curve(name: str, division: str, shapes: dict[str, BackboneShape]) -> None:
    shape, (tensor, expert, expert_tensor) = shapes[name], DIVISIONS[division]
    curves = profile_of(shape, tensor, expert, expert_tensor, most_tokens=64).curves
    assert set(layer_operators(shape)) | {"entry", "head"} <= set(curves)
    exchanged = {"exchange", "exchange_sizes"} & set(curves)
    assert len(exchanged) == (2 if expert * expert_tensor > 1 else 0)
    placed = {parts[1] for parts in (curve.split(":") for curve in curves if curve.startswith("LORA:"))}
    assert placed == {op for op in base_ops(shape) if op not in EXPERT_OPS or expert_tensor == 1}
    assert all(f"utilisation:{kind}" in curves for kind, own in KINDS.items() if own.samples())
    assert min(min(curve.forward) for curve in curves.values()) >= 0


@pytest.mark.parametrize("division", DIVISIONS)
def test_products_of_experts_count_pairs_and_their_matrices(
    division: str, shapes: dict[str, BackboneShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose only price is a byte of memory, or a product, or a launch: a second each."""
    shape, (tensor, expert, expert_tensor) = shapes["deepseek_v3"], DIVISIONS[division]
    assert shape.experts is not None
    routing, held = shape.experts.routing, shape.experts.count / expert
    width, rows = 2 * shape.experts.ffn / expert_tensor, 64
    pairs = rows * routing.top_k * expert_tensor / tensor
    big = dict.fromkeys((2, 4, 8), 1e30)

    def seconds(**limits: Any) -> float:
        device = dataclasses.replace(Device("", big, 1e30, 0.0, 1e30, 0.0), **limits)
        monkeypatch.setattr(module, "device_of", lambda *_: device)
        found = profile_of(shape, tensor, expert, expert_tensor, most_tokens=rows)
        return found.curves["experts_fc1"].at(rows)[0]

    assert seconds(peak=dict.fromkeys(big, 1.0)) == pytest.approx(2 * pairs * shape.hidden * width)
    values = pairs * (shape.hidden + width) + held * shape.hidden * width
    assert seconds(bandwidth=1.0) == pytest.approx(4 * values)
    assert seconds(overhead=1.0) == pytest.approx(held), "a launch for each expert"


def test_tensor_ranks_of_an_h100_sum_over_nvlink(shapes: dict[str, BackboneShape]) -> None:
    """4,096 rows of a 70B model on eight of them: twice 7/8 of 64 MiB in bf16."""
    shape = dataclasses.replace(shapes["mixtral"], hidden=8192)
    curves = roofline(shape, {"device": "NVIDIA H100 80GB HBM3", "kind": "cuda", "threads": 1}, 2, 8).curves
    summed = 2 * 7 / 8 * 4096 * 8192 * 2 / (0.8 * 450e9)
    assert curves["all_reduce"].at(4096)[0] == pytest.approx(summed + 2e-5, rel=1e-6)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v2-groups"])
def test_rows_go_once_to_each_rank_of_their_experts(name: str, shapes: dict[str, BackboneShape]) -> None:
    shape = shapes[name]
    assert shape.experts is not None
    count, routing = shape.experts.count, shape.experts.routing
    selected = even_selection(count, routing, 256).tolist()
    ranks = sum(len({expert * 2 // count for expert in row}) for row in selected) / len(selected)
    over_data = ExpertShares.of(shape, 1, 2, 1)
    assert over_data.sent == pytest.approx(ranks) and over_data.away == pytest.approx(ranks / 2)
    within = ExpertShares.of(shape, 2, 2, 1)
    assert within.sent == pytest.approx(ranks / 2) and within.pairs == routing.top_k / 2
    divided = ExpertShares.of(shape, 2, 1, 2)
    assert (divided.sent, divided.away, divided.pairs) == (1.0, 0.5, routing.top_k)
    exchange = profile_of(shape, 1, 2, 1).curves["exchange"]
    sent = (exchange.at(16384)[0] - exchange.at(8192)[0]) * 3e9  # bytes over a link of 3 GB/s
    assert sent == pytest.approx(8192 * ranks / 2 * shape.hidden * 4)


@pytest.mark.parametrize("routing", [Routing(2), Routing(3, groups=4, top_groups=2), Routing(8)])
def test_selection_is_even_however_many_rows(routing: Routing) -> None:
    selected = even_selection(8, routing, 200)
    for rows in (16, 64, 200):
        counts = Counter(selected[:rows].flatten().tolist())
        slack = 1 if routing.groups == 1 else 2
        assert len(counts) == 8 and max(counts.values()) - min(counts.values()) <= slack
    for row in selected.tolist():
        assert len(set(row)) == routing.top_k
        assert routing.groups == 1 or len({expert // 2 for expert in row}) <= routing.top_groups


def test_profiles_are_named_by_the_division_of_experts(shapes: dict[str, BackboneShape]) -> None:
    """Where it is not the default, and where there are experts."""
    shape = shapes["mixtral"]

    def about(expert: int = 1, expert_tensor: int | None = None) -> dict[str, Any]:
        return about_run(shape, "H100", "torch.float32", 2, None, None, expert, expert_tensor)

    plain = about()
    assert "expert_parallel" not in plain and "expert_tensor" not in plain and about(1, 2) == plain
    assert about(2) == {**plain, "expert_parallel": 2}
    assert about(2, 1) == {**plain, "expert_parallel": 2, "expert_tensor": 1}
    dense = dataclasses.replace(shape, experts=None)
    assert not {"expert_parallel", "expert_tensor"} & set(
        about_run(dense, "H100", "torch.float32", 2, expert_tensor=1)
    )
