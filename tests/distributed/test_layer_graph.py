"""A layer cut at its messages by hand does what its traced graph does, message by message, in fp64.

Attention and low-rank terms of the two are different kernels, so results agree to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.backbone.communication import GroupExchange
from megatron_mux.backbone.exchange import Course, interleave
from megatron_mux.backbone.layer_pieces import LayerPieces, TensorMessages
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.pieces import received
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.fusion.graphs.layer_graph import LayerGraph, trace_layer
from megatron_mux.fusion.graphs.operators import layer_subgraphs
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.kernels.low_rank.terms import Term
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec
from tests import tiny_models
from tests.distributed.message_log import logged

LAYER = 1
LENGTHS = {"everywhere": (9, 5), "some": (10,)}
LIMIT = 1e-12


@pytest.fixture(scope="module")
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("interleaved", lambda directory: tiny_models.make(directory, "llama")) / "llama"


def _batch() -> PackedBatch:
    r = np.random.default_rng(0)
    sequences = [
        PackedSequence(task, i, r.integers(3, 96, length), np.ones(length, np.bool_), 1.0)
        for task, lengths in LENGTHS.items()
        for i, length in enumerate(lengths)
    ]
    return pack(sequences, tuple(LENGTHS), dict.fromkeys(LENGTHS, 0)).to()


def _adapters(backbone: Backbone) -> AdapterSet:
    """One task with LoRA on every linear module, one on two; no entry of A and B is zero."""
    found = AdapterSet(Host(backbone.base_ops(), backbone.parallel, torch.float64, backbone.shape))
    for name, targets in (("everywhere", "all-linear"), ("some", ["v_proj", "down_proj"])):
        section = {"peft_type": "LORA", "r": 3, "lora_alpha": 5, "target_modules": targets}
        task = {"name": name, "adapter": section, "data": {"path": "none", "max_length": 16}}
        adapter = found.add(TaskSpec.model_validate({**task, "training": {"max_steps": 1}}), 1)
        adapter.flat_params.values.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return found


def _terms(adapters: AdapterSet) -> Iterator[tuple[str, Term]]:
    for op in adapters.ops:
        if op.info.layer == LAYER:
            for slot, own in op.tables.low_rank.of_slot.items():
                yield from ((f"{op.info.name} of {slot}", term) for term, _ in own)


def _cut(
    backbone: Backbone, batch: PackedBatch, x: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, list[list[tuple[str, int]]]]:
    """Output, gradient of the input, and the messages of both passes of the layer cut by hand."""
    parallel = backbone.parallel
    exchange, logs = GroupExchange(parallel.tp_group), []
    layer = LayerPieces(
        layer=backbone.model.decoder.layers[LAYER],
        batch=batch,
        angles=backbone.angles(batch)[LAYER],
        messages=TensorMessages(True, parallel.sequence_parallel),
        labelled_only=False,
        recompute=False,
        last_norm=None,
        anchor=torch.zeros(0, requires_grad=True),
        exchanged=True,
    )
    messages = 4 if parallel.sequence_parallel else 2

    def run(steps: Any) -> Any:
        with logged() as log:
            (made,) = interleave([Course(steps, batch)], [0] * (messages + 1), exchange)
        logs.append(log)
        return made

    y, trained = run(layer.forward(x, True))
    assert trained
    return y, received(run(layer.backward(dy))), logs


def _messages(traced: LayerGraph, parallel: Parallel, backbone: Backbone) -> list[list[tuple[str, int]]]:
    about = {"device": "made-up", "kind": "cpu", "threads": 1, "tensor_parallel": 2}
    profile = roofline(backbone.shape, about, 8, parallel.tp_size)
    rows = sum(map(sum, LENGTHS.values()))
    hidden = backbone.shape.hidden
    found = layer_subgraphs(traced, profile, hidden, [LAYER], rows, parallel.sequence_parallel)
    return [
        [(subgraph.message, subgraph.bytes // 8) for subgraph in subgraphs if subgraph.message]
        for subgraphs in found.passes.values()
    ]


def _distance(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None and wanted is not None and wanted.norm() > 0
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_cut_layer_is_the_traced_graph(
    path: Path, joined: Callable[..., Parallel], sequence_parallel: bool
) -> None:
    parallel = joined(2, 1, sequence_parallel)
    backbone, batch = Backbone.load(path, parallel, torch.float64), _batch()
    adapters = _adapters(backbone)
    generator = torch.Generator().manual_seed(parallel.tp_rank if sequence_parallel else 0)
    shape = backbone.hidden_shape(batch)
    x, dy = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))

    y, dx, logs = _cut(backbone, batch, x, dy)
    hidden = x.clone().requires_grad_()
    traced = trace_layer(backbone, LAYER, adapters, batch, hidden)
    traced.output.backward(dy)

    assert all(len(log) == (4 if sequence_parallel else 2) for log in logs)
    assert _messages(traced, parallel, backbone) == logs
    assert _distance(traced.output, y) <= LIMIT
    assert _distance(hidden.grad, dx) <= LIMIT
    terms = list(_terms(adapters))
    assert len(terms) == 9
    for name, term in terms:
        assert _distance(term.down.grad, term.down_gradient) <= LIMIT, name
        assert _distance(term.up.grad, term.up_gradient) <= LIMIT, name
