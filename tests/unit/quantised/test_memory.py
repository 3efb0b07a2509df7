"""What quantised weights take is what the sizes of matrices, a dry run and the planner say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.fusion.profiler.profile_store import about_run
from megatron_mux.fusion.profiler.roofline import roofline
from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.quantised.scheme import METHODS, QuantMethod
from megatron_mux.runtime import Parallel
from tests import quantised_models


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised_models.make_plain(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("residence", ["resident", "offloaded"])
@pytest.mark.parametrize("method", METHODS)
def test_bytes_held_are_those_predicted(method: QuantMethod, residence: Any, plain: Path) -> None:
    parallel = Parallel.alone(torch.device("cpu"))
    backbone = Backbone.load(plain, parallel, residence=residence, quantise=method)
    held = quantised_models.held_bytes([backbone])
    assert held == pytest.approx(quantised_models.predicted_bytes([backbone], 4), rel=0.03)


def test_a_layer_is_in_memory_while_it_is_in_use(plain: Path) -> None:
    backbone = Backbone.load(plain, Parallel.alone(torch.device("cpu")), quantise="nf4")
    held, form = quantised_models.held_bytes([backbone]), architecture_of(backbone.shape).layers[0]
    with backbone.offload.using(0, 1):
        weight = backbone.model.decoder.layers[0].mlp.linear_fc1.weight
        assert weight.abs().sum() > 0
        used = quantised_models.held_bytes([backbone])
    assert used - held == 4 * form.dequantised
    assert quantised_models.held_bytes([backbone]) == held


def test_the_planner_counts_seconds_of_dequantising(plain: Path) -> None:
    shape = Backbone.load(plain, Parallel.alone(torch.device("cpu")), quantise="int8").shape
    as_stored = dataclasses.replace(shape, quantisation=None)
    abouts = [about_run(one, "cpu", torch.float32, 1) for one in (shape, as_stored)]
    assert abouts[0] != abouts[1], "measured profiles would take each other's place"
    profiles = [roofline(one, about, 4) for one, about in zip((shape, as_stored), abouts, strict=True)]
    assert profiles[0].curves["dequantise"].at(1)[0] > 0
    assert "dequantise" not in profiles[1].curves
