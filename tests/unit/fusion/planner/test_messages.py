"""Messages of tensor ranks and expert ranks: the engine's pieces, and seconds that add up."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from megatron_mux.backbone.layer_pieces import TensorMessages
from megatron_mux.backbone.pieces import Yields
from megatron_mux.backbone.registry import read_shape
from megatron_mux.base_ops import BaseOpName
from megatron_mux.fusion.planner.backbone_time import BackboneTimeModel
from megatron_mux.fusion.planner.messages import LayerParallelism, Messages
from megatron_mux.fusion.profiler.layer_operators import ORDER
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.shape import BackboneShape
from tests import tiny_models

LAYOUTS = (
    LayerParallelism(),
    LayerParallelism(tensor=True, recomputes=True),
    LayerParallelism(tensor=True, sequence_parallel=True),
    LayerParallelism(exchanges=True),
    LayerParallelism(tensor=True, sequence_parallel=True, exchanges=True, recomputes=True),
)


@cache
def shape_of(name: str) -> BackboneShape:
    with TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        tiny_models.config(name).to_json_file(file)
        return read_shape(file)


def profile_of(shape: BackboneShape) -> Profile:
    about = {"device": "made-up", "kind": "cpu", "threads": 2, "expert_parallel": 2}
    return roofline(shape, about, 4, 2, most_tokens=1024)


def made(name: str, layout: LayerParallelism, stages: int = 1) -> tuple[BackboneTimeModel, Messages]:
    shape = shape_of(name)
    each = shape.layers // stages
    frozen = BackboneTimeModel(
        profile_of(shape), shape, [range(s * each, (s + 1) * each) for s in range(stages)]
    )
    return frozen, Messages(frozen, shape, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_a_layer_has_the_pieces_of_the_engine(name: str, layout: LayerParallelism) -> None:
    frozen, messages = made(name, layout)
    nothing = np.zeros((1, 2, len(ORDER)))
    ((forward, backward),) = messages.layers(np.array([64.0]), np.ones((1, 2)), nothing)
    tensor = TensorMessages(layout.tensor, layout.sequence_parallel).yields
    for experts, there, back in zip(frozen.experts, forward, backward, strict=True):
        exchange = Yields(3, 2) if layout.exchanges else Yields(0, 0)  # `CutExperts.yields`
        wanted = tensor + (exchange if experts else tensor)
        wanted = wanted.recomputed if layout.recomputes else wanted
        assert (len(there.pieces), len(back.pieces)) == (wanted.forward, wanted.backward)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "llama"])
def test_the_pieces_of_layers_add_up_to_their_seconds(name: str, layout: LayerParallelism) -> None:
    """With the loss on every row, and gradients everywhere."""
    frozen, messages = made(name, layout)
    rows, attention = np.array([64.0, 200.0]), np.array([[1e-3, 2e-3], [2e-3, 3e-3]])
    lowest = np.zeros(2, dtype=np.int64)
    passes = frozen.seconds(rows, rows, attention[..., None], lowest, layout.recomputes)
    below = frozen.below[0].many(rows)[1]
    sent = messages.seconds(rows, rows, lowest)
    needless = frozen.curves["all_reduce"].many(rows)[0] * layout.tensor  # into the lowest adapter's layer
    found = messages.layers(rows, attention, np.zeros((2, 2, len(ORDER))))
    for b, ways in enumerate(found):
        layers = [[way[kind] for kind in frozen.kinds] for way in ways]
        compute, message = (
            [sum(getattr(own, what) for own in way) for way in layers] for what in ("compute", "message")
        )
        assert compute == pytest.approx([passes[b, 0, 0], passes[b, 1, 0] + below[b]])
        assert message == pytest.approx([sent[b, 0, 0], sent[b, 1, 0] + needless[b]])


def test_stages_without_experts_exchange_nothing() -> None:
    """Layer 1 of four is dense: two layers with experts are on the second stage, one is on the first."""
    _, messages = made("qwen3_moe", LayerParallelism(exchanges=True), stages=2)
    rows = np.array([64.0])
    first, second = messages.seconds(rows, rows, np.zeros(1, dtype=np.int64))[0, 0]
    assert second == pytest.approx(2 * first)
    nowhere = np.array([len(ORDER) * shape_of("qwen3_moe").layers])
    assert not messages.seconds(rows, rows, nowhere)[0, 1].any(), "without adapters nothing goes back"
    _, dense = made("llama", LayerParallelism())
    assert not dense.any and made("llama", LayerParallelism(exchanges=True))[1].any is False


def test_only_labelled_rows_go_to_the_experts_of_the_last_layer() -> None:
    frozen, messages = made("mixtral", LayerParallelism(exchanges=True))
    rows, labels, lowest = np.array([512.0]), np.array([64.0]), np.zeros(1, dtype=np.int64)
    all_rows = messages.seconds(rows, rows, lowest)[0, :, 0]
    fewer = messages.seconds(rows, labels, lowest)[0, :, 0]
    saved = frozen.curves["exchange"].many(rows)[0] - frozen.curves["exchange"].many(labels)[0]
    assert all_rows - fewer == pytest.approx([2 * saved[0]] * 2)


@pytest.mark.parametrize(
    ("op", "trained"),
    [
        ("experts_fc2", []),
        ("experts_fc1", ["experts", "-experts_fc1"]),
        ("shared_fc2", ["experts"]),
        ("shared_fc1", ["experts", "shared", "-shared_fc1"]),
    ],
)
def test_below_the_lowest_adapter_nothing_goes_back(op: BaseOpName, trained: list[str]) -> None:
    """An adapter in the last layer, of which the lowest is at this BaseOp: `trained` are added, or taken off."""
    frozen, _ = made("deepseek_v3", LayerParallelism())
    rows, attention = np.array([128.0]), np.array([[1e-3, 2e-3]])
    lowest = np.array([(shape_of("deepseek_v3").layers - 1) * len(ORDER) + ORDER.index(op)])
    backward = frozen.seconds(rows, rows, attention[..., None], lowest, recomputes=False)[0, 1, 0]
    wanted = (
        frozen.curves[name.removeprefix("-")].at(128.0)[1] * (-1 if name.startswith("-") else 1)
        for name in trained
    )
    assert backward == pytest.approx(sum(wanted), abs=1e-12)
