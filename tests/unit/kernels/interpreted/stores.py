"""Two programs of a launch that store to one address fail a test. Run by `test_triton_interpreted.py`."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


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
