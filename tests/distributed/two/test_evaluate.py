"""However two processes share an evaluation, it comes to the same; what one of them cannot read ends it on both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_mux.backbone.model import load_stages
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.evaluation import evaluator
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.budget import failing
from tests.distributed.conftest import assert_no_problems
from tests.end_to_end.held_out import COUNT, classified, evaluated, make_case, plain, uneven

DATA, TENSOR, SEQUENCE, PIPELINE = (1, 1, False), (2, 1, False), (2, 1, True), (1, 2, False)


@pytest.fixture
def path(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    return once("models", lambda directory: tiny_models.make(directory, "llama")) / "llama"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator, "TOKENS_PER_PASS", 40)
    monkeypatch.setattr(evaluator, "PASSES_PER_STAGE", 2)


@pytest.mark.parametrize("choices", [0, 3])
def test_every_layout_finds_the_same(choices: int, path: Path, joined: Callable[..., Parallel]) -> None:
    found = []
    divided = ((DATA, None), (TENSOR, None), (SEQUENCE, None), (PIPELINE, (3, 1)), (PIPELINE, (1, 1, 1, 1)))
    for layout, split in divided:
        parallel = joined(*layout)
        stages = load_stages(path, parallel, torch.float64, split=split)
        records = classified(choices) if choices else uneven(plain(), 2)
        found.append(evaluated(stages, parallel, make_case("lora", path), records))
    for result in found[1:]:
        assert result.loss == pytest.approx(found[0].loss, rel=1e-9)
        assert (result.accuracy, result.records) == (found[0].accuracy, COUNT)
    everyone: list[float] = [0.0, 0.0]
    dist.all_gather_object(everyone, found[0].loss)
    assert everyone[0] == everyone[1], "every rank gets the answer"


@pytest.mark.parametrize(
    ("short", "layout", "split"),
    [(1, DATA, None), (1, PIPELINE, None), (0, PIPELINE, (1, 1, 1, 1))],
)
def test_one_rank_that_lacks_memory_makes_all_take_smaller_passes(
    short: int,
    layout: tuple[int, int, bool],
    split: tuple[int, ...] | None,
    path: Path,
    joined: Callable[..., Parallel],
) -> None:
    parallel = joined(*layout)
    stages = load_stages(path, parallel, torch.float64, split=split)
    case, records = make_case("lora", path), plain()
    longest = max(len(tokens) for tokens, _ in records.pairs)
    wanted = evaluated(stages, parallel, case, records)
    lacking = 0

    def lacks(batch: PackedBatch) -> bool:
        nonlocal lacking
        hit = dist.get_rank() == short and batch.rows > longest
        lacking += hit
        return hit

    with failing(stages, lacks):
        found = evaluated(stages, parallel, case, records)
    problem = "" if found.loss == pytest.approx(wanted.loss, rel=1e-9) else f"{found} for {wanted}"
    if found.accuracy != wanted.accuracy or (dist.get_rank() == short and not lacking):
        problem += f" {lacking} lacking, accuracy {found.accuracy} for {wanted.accuracy}"
    with failing(stages, lambda batch: dist.get_rank() == short):
        try:
            evaluated(stages, parallel, case, records)
            problem += " what never fits was evaluated"
        except UserError as error:
            if f"ran out of memory (rank {short} at" not in str(error):
                problem += f" {error}"
    assert_no_problems([problem] if problem else [])
