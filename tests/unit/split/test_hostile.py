"""Hostile clients: every case is refused or answered, and another client's results stay the same to the bit."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from tests import tiny_models
from tests.unit.split.hostile import MOST_GROWTH, Battle
from tests.unit.split.running_server import running_server

CASES = 150


def test_hostile_clients_change_nothing(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "llama", num_hidden_layers=3)
    parallel = runtime.initialize(device="cpu")
    backbone = Backbone.load(path, parallel, torch.float32, split=(1, 2, 0), stage=1, ends=False)
    with running_server(backbone, parallel, tmp_path / "store", idle_s=2.0) as server:
        report = Battle(server, tmp_path / "tls").fight(CASES, seed=1)
        assert not report.failures
        assert report.rounds and not report.changed
        assert report.growth < MOST_GROWTH
        assert sum(counts.total() for counts in report.outcomes.values()) == CASES
        names = {path.name for path in tmp_path.rglob("*")}
        assert not names & {"passwd", "x", "etc"}, "names are no paths"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["llama", "store", "tls"]
