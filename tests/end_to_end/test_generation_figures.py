"""Tasks that are evaluated together find what each finds alone, whatever becomes of the others."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine import Engine, EvalResult
from megatron_mux.engine.evaluation.held_out import HeldOut
from megatron_mux.runtime import Parallel
from tests.budget import failing
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.harness import Case, Records, random_records
from tests.end_to_end.held_out import VOCABULARY, classified, make_case, plain


def cases(path: Path) -> list[tuple[Case, Records]]:
    """Tasks of several kinds, each with few held-out records of its own."""
    short = Records(random_records(7, VOCABULARY, 3, 9, seed=11).pairs, end_of_sequence=5)
    return [
        (replace(make_case("lora", path), name="words"), plain()),
        (replace(make_case("prefix", path), name="choices"), classified(3)),
        (replace(make_case("lora", path), name="few"), short),
    ]


def test_tasks_are_evaluated_together_as_alone(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel
) -> None:
    engine = Engine(backbone_of("llama", torch.float64), parallel)
    own = cases(path_of("llama"))
    for case, records in own:
        task = case.task
        task.evaluation = records.as_dataset()
        engine.register_tasks([task])
    alone = {name: engine.evaluate(name) for name in engine.tasks}
    passes: list[set[str]] = []

    def note(batch: PackedBatch) -> bool:
        passes.append(set(batch.task_rows))
        return False

    with failing([engine.backbone], note):
        together = engine.evaluate_together(engine.tasks)
    assert any(len(names) > 1 for names in passes), "no pass holds sequences of several tasks"
    for name, wanted in alone.items():
        found = together[name]
        assert isinstance(found, EvalResult) and wanted is not None
        assert found.values == pytest.approx(wanted.values, rel=1e-12)
        assert (found.records, found.choices) == (wanted.records, wanted.choices)
    # A task that diverged leaves the others as they are.
    for tensor in engine.adapters.tasks["words"].parameters:
        tensor.value.data.fill_(math.nan)
    found_then = engine.evaluate_together(engine.tasks)
    words, few = found_then["words"], found_then["few"]
    assert isinstance(words, EvalResult) and math.isnan(words.loss)
    assert isinstance(few, EvalResult) and few.values == pytest.approx(alone["few"].values, rel=1e-12)  # type: ignore[union-attr]
    for name in list(engine.tasks):
        engine.remove_task(name)


def test_a_sequence_that_never_fits_ends_the_evaluation_of_its_task_alone(
    backbone_of: BackboneOf, path_of: PathOf, parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(backbone_of("llama", torch.float64), parallel)
    (long, records), _, (short, few) = cases(path_of("llama"))
    for case, own in ((long, records), (short, few)):
        task = case.task
        task.evaluation = own.as_dataset()
        engine.register_tasks([task])
    wanted = engine.evaluate("few")
    monkeypatch.setattr(HeldOut, "batch_size", 4)  # of a pass, whoever is in it
    sequences: list[int] = []

    def too_long(batch: PackedBatch) -> bool:
        sequences.append(len(batch.segments))
        return max(segment.length for segment in batch.segments) > 12

    with failing([engine.backbone], too_long):
        found = engine.evaluate_together(engine.tasks)
    assert max(sequences) == 4
    assert "one sequence alone ran out of memory" in str(found["words"])
    assert wanted is not None and isinstance(found["few"], EvalResult)
    assert found["few"].values == pytest.approx(wanted.values, rel=1e-12)
    for name in list(engine.tasks):
        engine.remove_task(name)
