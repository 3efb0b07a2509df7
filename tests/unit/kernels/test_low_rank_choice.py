"""Which kernels compute low-rank terms on which device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_mux.kernels import triton_choice
from megatron_mux.kernels.groups import PART_ROWS, RowGroups
from megatron_mux.kernels.low_rank import choice as low_rank_choice
from megatron_mux.kernels.low_rank.choice import DryKernels, alternatives, kernels_for
from megatron_mux.kernels.low_rank.reference import LoopKernels
from megatron_mux.kernels.low_rank.terms import Term, TermTable
from megatron_mux.kernels.triton_choice import notice_of_loops

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def on_a_fake_gpu(dtype: torch.dtype) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(4, 8, dtype=dtype, device=GPU)


@pytest.mark.parametrize("installed", [True, False])
def test_a_dry_run_predicts_a_gpu_that_has_triton_whether_it_is_installed_here_or_not(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(low_rank_choice, "has_triton", lambda: installed)
    x = on_a_fake_gpu(torch.bfloat16)
    assert kernels_for(x) is DryKernels and kernels_for(x, "triton") is DryKernels
    assert kernels_for(x, "loop") is LoopKernels
    assert kernels_for(on_a_fake_gpu(torch.float64)) is LoopKernels


@pytest.mark.parametrize(
    ("rows", "width", "divided"),
    [(2 * PART_ROWS, 8, True), (2 * PART_ROWS - 1, 8, False), (2 * PART_ROWS, 8200, False)],
)
def test_a_dry_run_counts_the_parts_of_long_tasks(
    monkeypatch: pytest.MonkeyPatch, rows: int, width: int, divided: bool
) -> None:
    added: list[None] = []
    monkeypatch.setattr(DryKernels, "add_parts_", staticmethod(lambda: added.append(None)))
    table = TermTable([Term(0, torch.zeros(2, width), torch.zeros(width, 2), 1.0)])
    none = torch.zeros(0, dtype=torch.int32)
    groups = RowGroups((0,), ((0, rows),), (0,), True, none, none, none, none)
    values, latent = torch.empty(rows, 1).expand(rows, width), torch.empty(rows, 16)
    DryKernels.weight_gradients(values, latent, values, latent, table, groups)
    assert len(added) == divided


def test_alternatives_are_those_that_can_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank_choice, "has_triton", lambda: True)
    assert alternatives(GPU, torch.bfloat16) == ("triton", "loop")
    assert alternatives(GPU, torch.float64) == alternatives(CPU, torch.bfloat16) == ("loop",)
    monkeypatch.setattr(low_rank_choice, "has_triton", lambda: False)
    assert alternatives(GPU, torch.bfloat16) == ("loop",)


def test_a_choice_that_cannot_compute_an_input_gives_way_to_the_default() -> None:
    assert kernels_for(torch.zeros(4, 8), "triton") is LoopKernels


def test_a_gpu_without_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_choice, "has_triton", lambda: False)
    said = notice_of_loops(GPU)
    assert said is not None and "pip install 'triton>=3.6'" in said
    assert notice_of_loops(CPU) is None
    monkeypatch.setattr(triton_choice, "has_triton", lambda: True)
    assert notice_of_loops(GPU) is None
