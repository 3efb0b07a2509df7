"""Connections that are cut, and frames that are doubled, reordered, late and lost, change no result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.split.client import stream as client_stream
from megatron_mux.split.client import transport
from megatron_mux.split.client.trainer import SplitTrainer
from megatron_mux.split.protocol import framing
from tests.unit.split.faulty_connections import CuttingProxy, faulty_stream
from tests.unit.split.running_server import RunningServer, running_server
from tests.unit.split.splitting import task_of

CUTS = 4
FRAME_BYTES = 2048


@pytest.fixture(scope="module")
def server(whole_backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    parallel = runtime.initialize(device="cpu")
    backbone = Backbone.load(whole_backbone, parallel, torch.float64, split=(1, 3, 0), stage=1, ends=False)
    store, fingerprint = tmp_path_factory.mktemp("store"), read_backbone_info(whole_backbone).fingerprint
    with running_server(backbone, parallel, store, fingerprint=fingerprint) as running:
        yield running


def train(whole_backbone: Path, data: Path, address: str, save: Path) -> dict[str, Tensor]:
    trainer = SplitTrainer(
        whole_backbone,
        task_of(data),
        address,
        None,
        save=save,
        wire="f64",
        dtype=torch.float64,
        progress=False,
    )
    assert trainer.train().status == "finished"
    return load_file(save / "one" / "checkpoint-6" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(
    server: RunningServer, whole_backbone: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    return train(whole_backbone, data, server.address, tmp_path_factory.mktemp("undisturbed"))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_cut_connections_change_nothing(
    server: RunningServer, undisturbed: dict[str, Tensor], whole_backbone: Path, data: Path, tmp_path: Path
) -> None:
    proxy = CuttingProxy(server.port, seed=1, cuts=CUTS, most=40_000)
    try:
        assert same(train(whole_backbone, data, proxy.address, tmp_path), undisturbed)
    finally:
        proxy.close()
    assert proxy.cuts == 0


def test_faulty_frames_change_nothing(
    server: RunningServer,
    undisturbed: dict[str, Tensor],
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages have several frames here; a doubled message of one frame is a doubled request."""
    faults = ["double", "swap", "late", "double", "swap", "late"]
    monkeypatch.setattr(framing, "FRAME_BYTES", FRAME_BYTES)
    monkeypatch.setattr(transport, "ClientStream", faulty_stream(2, faults))
    assert same(train(whole_backbone, data, server.address, tmp_path), undisturbed)
    assert not faults


def test_a_lost_frame_is_sent_again(
    server: RunningServer,
    undisturbed: dict[str, Tensor],
    whole_backbone: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = ["drop"]
    monkeypatch.setattr(framing, "FRAME_BYTES", FRAME_BYTES)
    monkeypatch.setattr(client_stream, "_SECONDS_OF_SILENCE", 1.0)
    monkeypatch.setattr(transport, "ClientStream", faulty_stream(3, faults))
    assert same(train(whole_backbone, data, server.address, tmp_path), undisturbed)
    assert not faults
