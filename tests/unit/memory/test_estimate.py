"""From a stream to an answer."""

from __future__ import annotations

import pytest

from megatron_mux.gpus import Gpu
from megatron_mux.memory import untraced
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import COMMUNICATORS, CONTEXT, FRAGMENTATION, predict
from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.stream.events import Category, Moment, Stream, StreamBuilder
from megatron_mux.memory.stream.insertion import buckets

GPU = Gpu((8, 0), False)
CUBLAS = 8_519_680


@pytest.fixture(autouse=True)
def plain_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def _step(scratch: int = 0) -> Stream:
    builder = StreamBuilder()
    builder.allocate(30 * MIB, Moment("load"), category=Category.PARAMETERS)
    x = builder.allocate(11 * MIB, Moment("forward", 0, "mm"), category=Category.ACTIVATIONS)
    builder.allocate(12 * MIB + 3, Moment("backward", 0, "mm"), category=Category.GRADIENTS)
    if scratch:
        builder.free(builder.allocate(scratch, Moment("backward", 0, untraced.CUDNN)), Moment("backward", 0))
    builder.free(x, Moment("optimizer"))
    return builder.done()


def test_the_breakdown_adds_up_to_the_peak() -> None:
    found = predict(_step(), GPU)
    # Two workspaces: one begins a segment of 20 MiB, the other goes into what is left of it.
    assert found.peak_reserved == (30 + 12 + 14 + 20) * MIB
    # 11 MiB have a segment of 12, of which a rest of 1 MiB is not split off.
    assert found.peak_allocated == (30 + 12 + 12) * MIB + 512 + 2 * CUBLAS
    assert found.process == found.peak_reserved + 512 * MIB
    assert sum(found.breakdown.values()) == found.process
    assert found.breakdown["workspace"] == 2 * CUBLAS
    assert found.breakdown[CONTEXT] == 512 * MIB
    assert found.breakdown[FRAGMENTATION] == found.peak_reserved - (53 * MIB + 3 + 2 * CUBLAS)
    assert COMMUNICATORS not in found.breakdown
    assert found.moment == "in the backward pass, for cuBLAS workspace"
    assert found.peak_reserved_expandable == 80 * MIB, "in pages of 20 MiB"
    assert predict(_step(), GPU, Settings(expandable_segments=True)).peak_reserved == 80 * MIB


def test_data_parallelism_adds_buckets_and_a_communicator() -> None:
    one, two = predict(_step(), GPU), predict(_step(), GPU, communicators=1, blocks=buckets(_step()))
    assert two.breakdown["communication"] == 12 * MIB + 3
    assert two.process - one.process == 14 * MIB + untraced.COMMUNICATOR_BYTES
    assert sum(two.breakdown.values()) == two.process


def test_the_interval_is_of_what_is_not_known() -> None:
    least, most = 300 * MIB, 1024 * MIB
    known = predict(_step(), GPU)
    assert known.interval == (known.peak_reserved + least, known.peak_reserved + most)
    large = predict(_step(scratch=40 * MIB), GPU)
    assert large.peak_reserved == known.peak_reserved + 40 * MIB
    assert large.interval == (known.peak_reserved + least, known.peak_reserved + 80 * MIB + most)
