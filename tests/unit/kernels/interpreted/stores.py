"""Two programs of a launch that store to one address fail a test. Run by `test_triton_interpreted.py`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from megatron_mux.kernels.low_rank.terms import ENTRY, TermTable
from megatron_mux.kernels.low_rank.triton import TritonKernels
from tests.unit.kernels.interpreted.low_rank import fixed, groups_of, term_of


@triton.jit
def _add_one(values, stride, ATOMIC: tl.constexpr):
    places = values + tl.program_id(0) * stride + tl.arange(0, 4)
    if ATOMIC:
        tl.atomic_add(places, 1.0)
    else:
        tl.store(places, tl.load(places) + 1.0)


@pytest.mark.parametrize("atomic", [False, True])
def test_programs_that_share_an_address_fail(atomic: bool) -> None:
    values = torch.zeros(12)
    _add_one[(3,)](values, 4, ATOMIC=atomic)
    assert (values == 1).all()
    with pytest.raises(AssertionError, match="programs of _add_one store to one address"):
        _add_one[(2,)](values, 3, ATOMIC=atomic)


def test_a_program_for_each_term_on_the_same_columns_fails() -> None:
    """As terms of PiSSA and OLoRA would be added if they were not one program's."""
    table = TermTable([term_of(0, 8, n=16), fixed(term_of(0, 8, n=16, module="v"))])
    groups = groups_of([0], [(0, 5)])
    y, latent = torch.ones(8, 16), torch.ones(8, 16)
    TritonKernels.up_(y, latent, table, groups)
    table.entries[:, ENTRY.index("sharing")] = 1
    with pytest.raises(AssertionError, match="programs of up_kernel store to one address"):
        TritonKernels.up_(y, latent, table, groups)
