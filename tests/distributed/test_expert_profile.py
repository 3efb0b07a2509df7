"""A profile of expert ranks: experts without their messages, and messages of as many rows as a run sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.experts.exchange import dispatch
from megatron_mux.backbone.experts.permutation import ExpertPermutation
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import activate
from megatron_mux.fusion.even_experts import ExpertShares
from megatron_mux.fusion.profiler import measure as module
from megatron_mux.fusion.profiler.expert_probes import ExpertProbes
from megatron_mux.fusion.profiler.layer_operators import layer_operators
from megatron_mux.fusion.profiler.probed_stage import ProbedStage
from megatron_mux.fusion.profiler.probes import Probes
from megatron_mux.fusion.profiler.profile_store import about_run
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.runtime import Parallel

OWN = 256
"""Rows of a rank: as many as a roofline counts the ranks of."""


@pytest.mark.parametrize(
    ("tensor", "expert", "expert_tensor"),
    [(1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)],
    ids=["data", "data of four", "tensor", "divided", "both"],
)
def test_ranks_compute_and_send_what_a_roofline_counts(
    tensor: int,
    expert: int,
    expert_tensor: int,
    model_of: Callable[[str], Path],
    joined: Callable[..., Parallel],
) -> None:
    """With rows sent for real and experts selected evenly, each rank computes as many pairs as the probes do."""
    parallel = joined(tensor, 1, tensor > 1, expert=expert, expert_tensor=expert_tensor)
    backbone = Backbone.load(model_of("deepseek_v3"), parallel, torch.float32)
    rows = OWN * tensor
    stage = ProbedStage(backbone, rows)
    experts = ExpertProbes(stage)
    shares = ExpertShares.of(backbone.shape, tensor, expert, expert_tensor)
    batch = stage.batch(rows)
    given = experts.given(batch)
    pairs = experts.pairs(given)
    assert len(pairs.rows) == rows * shares.pairs
    assert len(given.x) == pytest.approx(rows * shares.sent)
    layer, routes = experts.layer, experts.routes(rows)
    with activate(batch):
        assert layer.exchange is not None
        sent = layer.exchange.send_to(routes)
        x = torch.zeros(len(routes.experts), backbone.shape.hidden)
        received = dispatch(x, routes, layer.slots(len(x)), sent, layer.anchor)
    assert sum(sent.outgoing) == len(given.x)
    real = ExpertPermutation.of(
        received.experts, received.slots, layer.places, len(layer.held), received.pairs
    )
    sources = parallel.experts.size * expert_tensor
    assert len(real.rows) == pytest.approx(len(pairs.rows), abs=2 * len(layer.held) * sources)


def test_halves_are_timed_without_messages(
    model_of: Callable[[str], Path],
    joined: Callable[..., Parallel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of tensor ranks or of expert ranks; what is measured is what a roofline estimates."""
    parallel = joined(2, 1, True, expert=2, expert_tensor=1)
    backbone = Backbone.load(model_of("deepseek_v3"), parallel, torch.float32)
    about = about_run(backbone.shape, "cpu", torch.float32, 2, expert_parallel=2, expert_tensor=1)
    monkeypatch.setattr(module, "_TURN_SECONDS", 1e-9)  # each probe once
    sent, of_norms = 0, dist.all_reduce

    def counted(original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            sent += kwargs.get("group") in (parallel.tp_group, parallel.experts.group)
            return original(*args, **kwargs)

        return collective

    for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
        monkeypatch.setattr(dist, name, counted(getattr(dist, name)))
    with monkeypatch.context() as without:
        for probes in ("_messages", "_ends"):  # the embedding and the loss head include their messages
            without.setattr(Probes, probes, lambda probes: [])
        without.setattr("megatron_mux.fusion.profiler.measure._Bench._message_share", lambda bench: 0.0)
        # DoRA sums its norms over ranks once an optimizer step: here in the pass that warms up, which is not timed.
        without.setattr("megatron_mux.adapters.dora.dist", SimpleNamespace(all_reduce=of_norms))
        module.measure(backbone, about, 32, rounds=1)
        assert sent == 0, "layers are timed without their messages"
    found = module.measure(backbone, about, 32, rounds=1)
    assert sent > 0
    estimated = roofline(backbone.shape, about, 4, 2, most_tokens=32)
    assert set(layer_operators(backbone.shape)) | {"exchange", "exchange_sizes"} <= set(found.curves)
    missing = {name for name in estimated.curves if ":" not in name} - set(found.curves)
    assert not missing
    assert min(found.curves["exchange"].forward) > 0 and min(found.curves["exchange"].backward) > 0
    assert len(found.curves["exchange_sizes"].sizes) == 1
