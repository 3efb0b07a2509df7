"""The plug-in on tensor-parallel stages, with the rows divided among tensor ranks, and in groups handed to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_mux.pipeline.plugin import multi_bucket
from megatron_mux.runtime import Parallel
from tests.distributed.small_gpt import (
    BUCKETS,
    assert_same,
    batches_of,
    gradients,
    mean,
    megatrons,
    on_cpu,
    ours,
    small_gpt,
)

pytestmark = pytest.mark.versions


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_stages(sequence_parallel: bool, joined: Callable[..., Parallel]) -> None:
    parallel = joined(2, 2, sequence_parallel)
    from megatron.core.process_groups_config import ProcessGroupCollection

    with on_cpu():
        model = small_gpt(parallel)
        losses = [loss for bucket in BUCKETS for loss in megatrons(model, mean, bucket)]
        expected = losses, gradients(model)
        for groups in (None, ProcessGroupCollection.use_mpu_process_groups()):
            given = {"pg_collection": groups, "p2p_communicator": groups and object()}
            data = [iter(batches_of(bucket)) for bucket in BUCKETS]
            found = ours(multi_bucket(BUCKETS, own_means=True), model, mean, data, **given)
            assert_same((found, gradients(model)), expected)


def test_a_length_that_tensor_ranks_cannot_divide_is_refused(joined: Callable[..., Parallel]) -> None:
    model = small_gpt(joined(2, 2, True))
    odd = [type(bucket)(bucket.name, bucket.micro_batches, 7, 1) for bucket in BUCKETS]
    with pytest.raises(ValueError, match="'short': 2 tensor ranks cannot divide 7 tokens"):
        ours(multi_bucket(odd), model, mean, None)
