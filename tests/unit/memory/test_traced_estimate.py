"""What is checked before a traced estimate is given."""

from __future__ import annotations

import pytest

from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder, StreamError
from megatron_mux.memory.traced_estimate import check_layers


def _loading(size: int) -> Stream:
    builder = StreamBuilder()
    builder.allocate(size, Moment("load", None, "empty"), category=Category.PARAMETERS)
    builder.allocate(10**9, Moment("forward", 0, "mm"), category=Category.ACTIVATIONS)
    return builder.done()


def test_traced_layers_have_to_make_the_whole_model() -> None:
    check_layers(_loading(2_000_000), 2_000_000)
    check_layers(_loading(2_400_000), 2_000_000)  # buffers
    for other in (110_000, 1_990_000, 9_000_000):  # DeepSeek's first layers are dense, the others are not
        with pytest.raises(StreamError, match="its layers differ"):
            check_layers(_loading(other), 2_000_000)
