"""A profile of tensor ranks: products without their messages, and what messages take from computation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.model import Backbone
from megatron_mux.fusion.profiler.measure import measure
from megatron_mux.fusion.profiler.probes import Probes
from megatron_mux.fusion.profiler.profile_store import about_run
from megatron_mux.runtime import Parallel
from tests import tiny_models


def test_layers_are_timed_without_their_messages(
    once: Callable[[str, Callable[[Path], object]], Path],
    joined: Callable[..., Parallel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = once("profile", lambda directory: tiny_models.make(directory, "llama")) / "llama"
    parallel = joined(2, 1)
    sent = 0
    original = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += kwargs.get("group") is parallel.tp_group
        return original(*args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with monkeypatch.context() as without:
        for probes in ("_messages", "_ends"):  # the embedding and the loss head include their messages
            without.setattr(Probes, probes, lambda probes: [])
        without.setattr("megatron_mux.fusion.profiler.measure._Bench._message_share", lambda bench: 0.0)
        # DoRA sums its norms over ranks once an optimizer step: here in the pass that warms up, which is not timed.
        without.setattr("megatron_mux.adapters.dora.dist", SimpleNamespace(all_reduce=original))
        backbone = Backbone.load(path, parallel, torch.float32)
        about = about_run(backbone.shape, "cpu", torch.float32, 2)
        measure(backbone, about, 32, rounds=1)
        assert sent == 0, "layers are timed without their messages"
    found = measure(backbone, about, 32, rounds=1)
    assert sent > 0
    assert min(found.curves["all_reduce"].forward) > 0
    assert 0 <= found.message_share <= 0.5
