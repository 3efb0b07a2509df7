"""Columns of a matrix as a slice, as runs, or as any: the same as indexing."""

import pytest
import torch

from megatron_mux.kernels.low_rank.columns import Columns

CASES = {
    "all": (None, False),
    "slice": ([3, 4, 5], False),
    "runs": ([1, 2, 5, 6, 9, 10], False),
    "last run shorter": ([1, 2, 5, 6, 9], True),
    "single columns": ([0, 4, 8], False),
    "backwards": ([5, 4], True),
    "none": ([], False),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_indexing(case: str) -> None:
    places, irregular = CASES[case]
    index = None if places is None else torch.tensor(places, dtype=torch.int32)
    columns = Columns.of(index, 12)
    assert (columns.index is not None) == irregular
    chosen = list(range(12)) if places is None else places
    x = torch.randn(20, 12)[3:9]  # a part of a larger tensor
    assert torch.equal(columns.take(x), x[:, chosen])
    more, wanted = torch.randn(6, len(chosen)), x.clone()
    wanted[:, chosen] += 2.0 * more
    columns.add_(x, more, 2.0)
    torch.testing.assert_close(x, wanted)
    a, b = torch.randn(6, 2), torch.randn(2, len(chosen))
    wanted[:, chosen] += 0.5 * (a @ b)
    columns.add_product_(x, a, b, 0.5)
    torch.testing.assert_close(x, wanted)
