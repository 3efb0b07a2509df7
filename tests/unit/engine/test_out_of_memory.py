"""What stands in for a pass that found no memory takes none itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_mux.engine.compute import EvaluationCompute, TrainingCompute
from megatron_mux.engine.messages import Messages
from megatron_mux.engine.out_of_memory import Shortage
from megatron_mux.engine.room import Room
from megatron_mux.pipeline.action import Action
from tests.budget import Budget

ROWS, HIDDEN = 1000, 64
DEVICE = torch.device("cpu")
PARALLEL: Any = SimpleNamespace(rank=0, world_size=1, dp_size=1, tp_size=1, device=DEVICE)


def stage(last: bool) -> Any:
    """One that never finds memory."""

    def forward(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("made to fail. Nothing is short")

    return SimpleNamespace(
        last=last,
        shape=SimpleNamespace(hidden=HIDDEN),
        dtype=torch.float32,
        device=DEVICE,
        hidden_shape=lambda batch: (batch.rows, 1, HIDDEN),
        forward=forward,
    )


class Batches(dict[Any, Any]):
    most_rows = ROWS

    def __missing__(self, unit: Any) -> Any:
        return (SimpleNamespace(rows=ROWS - 1),)


@pytest.mark.parametrize(("number", "last"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("training", [True, False])
def test_zeros_are_there_already(training: bool, number: int, last: bool) -> None:
    shortage = Shortage(1, PARALLEL, Messages([], PARALLEL, Room(DEVICE)))
    stages = {number: stage(last)}
    compute: Any
    if training:
        ends: Any = SimpleNamespace(
            shortage=shortage, tokens=[{}], buckets=[0], running={}, parallel=PARALLEL
        )
        batches: Any = Batches()
        compute = TrainingCompute(stages, batches, ends)
    else:
        compute = EvaluationCompute(stages, [SimpleNamespace(rows=ROWS - 1)] * 2, 3, 7, shortage)  # type: ignore[list-item]
    hidden = None if number == 0 else torch.ones(ROWS - 1, 1, HIDDEN, requires_grad=training)
    with Budget(limit=512) as budget:
        made = [compute.forward(Action(number, "F", 0, 0), hidden) for _ in range(2)]  # fails; is left out
    assert budget.failures == 0 and shortage.concerns(0)
    for one in made:
        assert one.shape == (() if last and training else (ROWS - 1, 1, HIDDEN))
        assert one.is_contiguous() and not (training and one.count_nonzero())
