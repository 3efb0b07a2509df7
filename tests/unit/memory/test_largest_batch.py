from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.memory.largest_batch import largest_batch


@given(st.integers(0, 1000), st.integers(1, 50), st.integers(0, 5000))
def test_the_largest_batch_is_that_of_counting(fixed: int, each: int, limit: int) -> None:
    counted = 0
    while fixed + each * (counted + 1) <= limit:
        counted += 1
    assert largest_batch(lambda batch: fixed + each * batch <= limit) == counted
