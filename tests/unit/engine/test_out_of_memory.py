"""What stands in for the output of a pass that ran out of memory takes no memory itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mux.engine.forward_compute import EvaluationCompute
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.train_step import TrainStep
from megatron_mux.pipeline.action import Action
from tests.budget import Budget

ROWS, HIDDEN = 1000, 64
DEVICE = torch.device("cpu")


def parallel(tensor: int = 1) -> Any:
    return SimpleNamespace(rank=0, pp_rank=0, world_size=1, dp_size=1, tp_size=tensor, device=DEVICE)


def stage(last: bool) -> Any:
    """One that never has memory."""

    def forward(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("made to fail. Nothing is short")

    return SimpleNamespace(
        last=last,
        shape=SimpleNamespace(hidden=HIDDEN),
        dtype=torch.float32,
        device=DEVICE,
        hidden_shape=lambda batch: (batch.rows, 1, HIDDEN),
        forward=forward,
        in_step=False,
        offload=SimpleNamespace(groups={}, abandon=lambda: None),
    )


class Batches(dict[Any, Any]):
    max_rows = ROWS

    def __missing__(self, chunk_id: Any) -> Any:
        return (SimpleNamespace(rows=ROWS - 1, training=True),)


def compute_of(training: bool, stages: Any, failed: FailedBuckets) -> Any:
    if not training:
        ends = torch.full((3,), 7)
        return EvaluationCompute(stages, [SimpleNamespace(rows=ROWS - 1)] * 2, ends, failed)  # type: ignore[list-item]
    burst = SimpleNamespace(steps=[{}], buckets=[0], tasks={}, parallel=parallel())
    # Parts are asked on the last stage, once its layers have not run out of memory.
    finalizer: Any = SimpleNamespace(failed=failed, burst=burst, parts=None)
    batches: Any = Batches()
    return TrainStep(stages, batches, finalizer, exchange=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("number", "last"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("training", [True, False])
def test_zeros_are_there_already(training: bool, number: int, last: bool) -> None:
    stages = {number: stage(last)}
    failed = FailedBuckets(1, stages.values(), parallel())
    compute = compute_of(training, stages, failed)
    hidden = None if number == 0 else torch.ones(ROWS - 1, 1, HIDDEN, requires_grad=training)
    with Budget(limit=512) as budget:
        made = [compute.forward(Action(number, "F", 0, 0), hidden) for _ in range(2)]  # fails; is left out
    assert budget.failures == 0 and 0 in failed
    for one in made:
        assert one.shape == (() if last and training else (ROWS - 1, 1, HIDDEN))
        assert one.is_contiguous() and not (training and one.count_nonzero())


@pytest.mark.parametrize("training", [True, False])
def test_where_ranks_meet_the_error_is_raised(training: bool) -> None:
    stages = {0: stage(False)}
    failed = FailedBuckets(1, stages.values(), parallel(tensor=2))
    with pytest.raises(torch.OutOfMemoryError, match="made to fail"):
        compute_of(training, stages, failed).forward(Action(0, "F", 0, 0), None)
    assert not failed
