"""Packs cut into chunks give the gradients of packs that are not cut, under every adapter kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Planning, prepared
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.step import Lengths, StepChunks, step_chunks
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


@contextmanager
def counted() -> Iterator[list[int]]:
    """Within, the chunks of each micro-batch that is prepared."""
    found: list[int] = []

    def chunks(plan: Plan, lengths: Mapping[str, Lengths], data_rank: int = 0) -> StepChunks:
        chunked = step_chunks(plan, lengths, data_rank)
        found.extend(count for bucket in chunked.sizes for count in bucket)
        return chunked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "step_chunks", chunks)
        yield found


def check(
    backbone: Backbone, cut: Backbone, parallel: Parallel, cases: list[Case], *plannings: Planning
) -> None:
    """Each of the plans leads to the same gradients on `cut` as whole packs on `backbone`, and does cut packs."""
    whole = moved(backbone, parallel, cases)
    for planning in plannings:
        with counted() as chunks:
            gradients = moved(cut, parallel, cases, planning=planning)
        assert planning.chunk is not None and max(chunks) > LENGTHS[1] // planning.chunk // 2, chunks
        for name, found in gradients.items():
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


def test_masks_and_later_steps_are_the_same(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    backbone, targets = backbone_of("llama", torch.float64), FAMILIES["llama"]
    sections = {name: lora(targets.mixed, r=3, lora_dropout=0.2) for name in ("one", "other")}
    training = {**PLAIN_SGD, "learning_rate": 0.3}
    cases = list(make_cases(path_of("llama"), sections, training, lengths=LENGTHS).values())
    whole = train(backbone, parallel, cases, 3)
    with counted() as chunks:
        cut = train(backbone, parallel, cases, 3, planning=Planning("spatial", 1, chunk=CHUNK))
    assert max(chunks) > 1
    for case in cases:
        assert cut.losses(case.name) == pytest.approx(whole.losses(case.name), rel=1e-6)  # reported in fp32
        assert_close(cut.tensors[case.name], whole.tensors[case.name], EXACT, case.name)


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
