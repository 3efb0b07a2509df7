"""Packs cut into chunks give the gradients of packs that are not cut, under every adapter kind."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Planning
from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.families import FAMILIES, lora
from tests.end_to_end.harness import Case, assert_close, assert_same, train
from tests.end_to_end.test_isolation import EXACT, PLAIN_SGD, kinds, make_cases, moved, tensors_become

CHUNK = 5
LENGTHS = (4, 40)  # tokens: sequences have up to eight chunks


def cases_of(path: Path, family: str) -> list[Case]:
    """A task of every kind, and one that trains the upper layers alone."""
    sections = kinds(FAMILIES[family]) | {"upper": lora(".*[23].*(q_proj|c_attn).*", r=4)}
    return list(make_cases(path, sections, PLAIN_SGD, lengths=LENGTHS).values())


def check(
    backbone: Backbone, cut: Backbone, parallel: Parallel, cases: list[Case], *plannings: Planning
) -> None:
    """Each of the plans leads to the same gradients on `cut` as whole packs on `backbone`."""
    whole = moved(backbone, parallel, cases)
    for planning in plannings:
        for name, found in moved(cut, parallel, cases, planning=planning).items():
            assert_close(found, whole[name], EXACT, f"{name} {planning.chunk}")


@pytest.mark.parametrize(
    ("family", "micro_batches"), [("mistral", 1), ("gpt2", 2), ("gpt_neo", 1), ("qwen3", 2)]
)
def test_exact_in_fp64(
    family: str, micro_batches: int, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone = backbone_of(family, torch.float64)
    plannings = [Planning("spatial", 1, micro_batches=micro_batches, chunk=chunk) for chunk in (CHUNK, 16)]
    check(backbone, backbone, parallel, cases_of(path_of(family), family), *plannings)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_exact_with_recomputation(
    recompute: Any, backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    path = path_of("llama")
    backbone = Backbone.load(path, parallel, torch.float64, recompute)
    plain, cases = backbone_of("llama", torch.float64), cases_of(path, "llama")
    check(plain, backbone, parallel, cases, Planning("spatial", 1, chunk=CHUNK))


def test_padding_changes_nothing(backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel) -> None:
    backbone, cases = backbone_of("llama", torch.float64), cases_of(path_of("llama"), "llama")[:3]
    plannings = [
        Planning("spatial", 1, chunk=16, alignment="longest"),
        Planning("spatial", 1, chunk=16, alignment="max-length"),
    ]
    check(backbone, backbone, parallel, cases, *plannings)


def test_a_neighbour_that_is_not_finite_stays_alone(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone, planning = backbone_of("llama", torch.float64), Planning("spatial", 1, chunk=CHUNK)
    own, sick = cases_of(path_of("llama"), "llama")[:2]
    healthy = train(backbone, parallel, [own, sick], 1, planning=planning)
    with tensors_become(sick, "", math.nan):
        found = train(backbone, parallel, [own, sick], 1, planning=planning)
    assert found.results[sick.name][0].status == "failed"
    assert found.losses(own.name) == healthy.losses(own.name)
    assert_same(found.tensors[own.name], healthy.tensors[own.name], own.name)
