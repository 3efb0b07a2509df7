"""Bottlenecks and factors by Triton kernels on a GPU: as in the interpreter, and bf16, which that cannot."""

from __future__ import annotations

import torch

from tests.gpu.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

if torch.cuda.is_available():
    from tests.unit.kernels.interpreted.low_rank import groups_of
    from tests.unit.kernels.interpreted.rows import (  # noqa: F401
        bottleneck,
        check,
        factors,
        test_bottlenecks,
        test_factors,
        test_half_precision,
        test_many_tasks,
        test_neighbours_leave_no_trace,
        test_ragged_groups,
        test_rows_without_terms_are_copies,
    )


def test_bf16() -> None:
    terms = [bottleneck(0, 24, "gelu", dtype=torch.bfloat16), factors(1)]
    check(terms, groups_of([0, 1], [(0, 140), (140, 149)]), 1e-2)
