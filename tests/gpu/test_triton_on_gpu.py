"""Triton kernels on a GPU: the tests that run in the interpreter elsewhere, and bf16, which the interpreter cannot."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.needs_gpu import NEEDS_GPU

pytestmark = NEEDS_GPU

if torch.cuda.is_available():
    from tests.unit.kernels.interpreted.cross_entropy import (  # noqa: F401
        test_a_rank_without_the_label_or_without_tokens,
        test_a_row_that_is_not_finite_leaves_the_others,
        test_a_vocabulary_divided_among_ranks,
        test_agrees_with_torch,
    )
    from tests.unit.kernels.interpreted.low_rank import (  # noqa: F401
        INTERLEAVED,
        check,
        groups_of,
        term_of,
        test_dropout,
        test_factors,
        test_factors_beside_neighbours_that_are_not_aligned,
        test_half_precision,
        test_many_tasks,
        test_neighbours_leave_no_trace,
        test_neighbours_of_rows_in_parts_leave_no_trace,
        test_neighbours_that_are_not_aligned_leave_no_trace,
        test_ragged_groups_with_several_terms,
        test_ranks,
        test_rows_at_any_address,
        test_rows_in_parts,
        test_terms_on_the_same_columns,
    )
    from tests.unit.kernels.interpreted.update import (  # noqa: F401
        test_a_task_that_skips_keeps_what_it_has,
        test_squared_norms,
        test_steps_equal_those_of_torch,
    )


@pytest.mark.parametrize("rank", [8, 13, 64])
def test_bf16(rank: int) -> None:
    terms = [
        term_of(0, rank, INTERLEAVED, dtype=torch.bfloat16, dropout=0.1),
        term_of(1, 24, dtype=torch.bfloat16),
    ]
    check(terms, groups_of([0, 1], [(0, 140), (140, 149)]), 1e-2)
